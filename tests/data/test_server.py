"""The server's public records: which, in what order, who is judged by them, and what is refused."""

from __future__ import annotations

import os
import pickle
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fairveil.config import RunConfig, make_config
from fairveil.contract import differ, outcome
from fairveil.data.datasets import build_federation
from fairveil.data.federation import ClientData, Dataset, Federation, Pool, Records, ServerRecords
from fairveil.data.partition import owned
from fairveil.data.server import check_server, with_server
from fairveil.engine.local import LocalEngine, _held
from fairveil.engine.messages import packed
from fairveil.errors import UserError
from fairveil.guard.policy import OwnData
from fairveil.options import parse
from fairveil.plan import make_plan
from fairveil.privacy.release import Kept, Reply
from fairveil.reading import load_run
from fairveil.run import start_run
from fairveil.session import Call, Job, Member

ROWS, TESTS = 40, 20


def numbered(count: int, first: int, shape: tuple[int, ...], classes: int) -> Records:
    """Records whose every feature is their number, a class after the other."""
    numbers = torch.arange(first, first + count)
    return Records(numbers.float().reshape(-1, *[1] * len(shape)).expand(-1, *shape).clone(), numbers % classes)


class Faxes(Dataset):
    """Rows that belong to nobody: numbers from 1,000 on for training, from 2,000 on for testing."""

    default_split: ClassVar[dict[str, Any]] = {"kind": "iid", "clients": 2}
    shape: tuple[int, ...] = (1, 8, 8)
    classes: int = 10
    first: int = 1000
    tests: int = TESTS

    def load(self, seed: int) -> Pool:
        train, test = (
            numbered(count, first, self.shape, max(self.classes, 1))
            for count, first in ((ROWS, self.first), (self.tests, self.first + 1000))
        )
        if not self.classes:
            train, test = (Records(part.x, part.y.float()) for part in (train, test))
        return Pool("faxes", train, test, self.classes)


class Offices(Dataset):
    """Rows that have owners: 3 offices of 10, 20 and 30 records, a fifth of them for testing."""

    words: int | None = None

    def load(self, seed: int) -> Federation:
        client = np.repeat(np.arange(3), (10, 20, 30))
        rows = numbered(60, 5000, (1, 8, 8), 10)
        return owned("offices", rows, client, classes=10, test_fraction=0.2, seed=seed, tokens=self.words)


@pytest.fixture(autouse=True)
def _importable() -> Iterator[None]:
    module = types.ModuleType("a_users_data")
    module.Faxes, module.Offices = Faxes, Offices  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield
    del sys.modules[module.__name__]


FAXES, OFFICES = "a_users_data:Faxes", "a_users_data:Offices"


def config(small: dict[str, Any], seed: int = 0, data: dict[str, Any] | None = None, **server: Any) -> RunConfig:
    """The small federation of digits, with a server."""
    return make_config(small | {"seed": seed, "data": {**(data or small["data"]), "server": server}})


def federation(small: dict[str, Any], seed: int = 0, data: dict[str, Any] | None = None, **server: Any) -> Federation:
    return config(small, seed, data, **server).build_federation()


def refused(small: dict[str, Any], data: dict[str, Any] | None = None, **server: Any) -> UserError:
    with pytest.raises(UserError) as error:
        federation(small, 0, data, **server)
    return error.value


def held(found: Federation) -> ServerRecords:
    assert found.server is not None
    return found.server


def numbers(x: Tensor) -> list[int]:
    """The number that is every feature of each record."""
    flat = x.flatten(1)
    assert (flat == flat[:, :1]).all()
    return flat[:, 0].int().tolist()


# ---- which records ---------------------------------------------------------------------------------


def test_the_rows_of_a_pool_shuffled_by_the_seed(small: dict[str, Any]) -> None:
    by_seed = [held(federation(small, seed, dataset=FAXES)) for seed in (0, 0, 1)]
    first, same, other = (numbers(server.x) for server in by_seed)
    assert sorted(first) == list(range(1000, 1000 + ROWS)) and first != sorted(first)
    assert first == same and first != other and sorted(other) == sorted(first)
    for server in by_seed:
        assert server.name == "faxes" and server.x.dtype == torch.float32 and server.x.shape == (ROWS, 1, 8, 8)
        assert server.labels.tolist() == [number % 10 for number in numbers(server.x)]  # they went along


def test_so_many_of_them_drawn_by_the_seed(small: dict[str, Any]) -> None:
    drawn = [numbers(held(federation(small, seed, dataset=FAXES, records=7)).x) for seed in (0, 1)]
    assert all(len(set(each)) == 7 for each in drawn) and set(drawn[0]) != set(drawn[1])
    assert drawn[0] == numbers(held(federation(small, 0, dataset=FAXES)).x)[:7]  # the first of all


def test_rows_with_owners_are_put_together(small: dict[str, Any]) -> None:
    found = federation(small, 3, dataset=OFFICES)
    train, test = numbers(held(found).x), numbers(found.load(0).test.x)
    assert (len(train), len(test)) == (48, 12)  # a fifth of 10, 20 and 30 is for testing
    assert sorted(train + test) == list(range(5000, 5060))
    own = Offices().load(3)
    assert sorted(test) == sorted(n for client in range(3) for n in numbers(own.load(client).test.x))


def test_the_statement_says_that_nothing_protects_them(small: dict[str, Any]) -> None:
    found = config(small, dataset=FAXES)
    says = "faxes, without labels: public by declaration; nothing here protects them"
    assert found.build_federation().public["the server's records"] == says
    assert make_plan(found).statement().public["the server's records"] == says
    assert "the server's records" not in make_config(small).build_federation().public


# ---- who is judged by what -------------------------------------------------------------------------


def test_clients_keep_their_training_records_and_are_judged_by_the_servers(small: dict[str, Any]) -> None:
    """Whatever shift sets a group apart: the server's test records are as they are."""
    plain, judged = make_config(small).build_federation(), federation(small, dataset=FAXES)
    assert judged.common_tests and judged.size.tolist() == plain.size.tolist()
    for client in range(5):
        before, after = plain.load(client), judged.load(client)
        assert torch.equal(before.train.x, after.train.x) and torch.equal(before.train.y, after.train.y)
        assert numbers(after.test.x) == list(range(2000, 2000 + TESTS))
        assert after.test is judged.load(0).test  # one copy for all


def test_or_by_their_own(small: dict[str, Any]) -> None:
    plain, own = make_config(small).build_federation(), federation(small, dataset=FAXES, judge=False)
    assert len(held(own).x) == ROWS
    for client in range(5):
        before, after = plain.load(client), own.load(client)
        assert torch.equal(before.train.x, after.train.x) and torch.equal(before.test.x, after.test.x)


def test_attributes_are_of_the_test_records_and_go_with_them(small: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "visits.csv"
    rows = [f"{'ab'[at % 2]},{at % 3 / 2},{at},{at % 2},{'mf'[at % 5 == 0]}" for at in range(40)]
    path.write_text("\n".join(["client,u,v,y,sex", *rows]))
    data = {"dataset": "file", "options": {"path": str(path), "sensitive": ["sex"], "features": ["u", "v"]}}
    server = {"dataset": FAXES, "options": {"shape": [2], "classes": 2}}
    fair = small | {"fairness": {"groups": "sex"}, "privacy": {"epsilon": 8.0, "delta": 1e-2}}
    own = config(fair, 0, data, judge=False, **server)
    assert own.build_federation().attributes == {"sex": ("f", "m")} and own.build_federation().load(0).attributes
    assert make_plan(own).federation.attributes
    judged = config(fair, 0, data, **server)
    assert judged.build_federation().attributes == {} and not judged.build_federation().load(0).attributes
    with pytest.raises(UserError, match=r'fairness.groups = "sex" is not an attribute'):
        make_plan(judged)


@pytest.mark.parametrize("judge", [True, False])
def test_any_number_of_workers_gives_the_same_run(small: dict[str, Any], runs: Path, judge: bool) -> None:
    results = []
    for workers in (1, 2):
        chosen = config(small | {"engine": {"workers": workers}}, dataset=FAXES, judge=judge)
        results.append(start_run(chosen, runs=runs).folder)
    assert not differ(*map(outcome, results))
    tested = load_run(results[1]).metrics.query("split == 'test' and metric == 'accuracy'")["n"]
    assert set(tested) == {TESTS if judge else 359}


def test_the_score_is_that_on_the_servers_records(small: dict[str, Any], runs: Path) -> None:
    """Counted once more from the served weights: one linear model, and one score for all clients of a group."""
    from safetensors.torch import load_file

    chosen = config(small, dataset=FAXES)
    result = start_run(chosen, runs=runs)
    weights = load_file(result.folder / "models" / "served.safetensors")
    (matrix,) = (value for value in weights.values() if value.dim() == 2)
    (bias,) = (value for value in weights.values() if value.dim() == 1)
    test = Faxes().load(0).test
    accuracy = ((test.x.flatten(1) @ matrix.T + bias).argmax(1) == test.y).double().mean()
    assert result.metrics["accuracy"].mean == pytest.approx(float(accuracy), abs=1e-9)


# ---- what workers and tasks see --------------------------------------------------------------------


def test_what_the_server_holds_stays_with_it(small: dict[str, Any]) -> None:
    found = federation(small, dataset=FAXES)
    assert pickle.loads(pickle.dumps(found)).server is None
    assert replace(found, name="another").server is found.server  # only what is sent goes without
    labels = held(found).labels
    marked = replace(found, server=ServerRecords("faxes", held(found).x, labels * 0 + 123_456_789))
    with packed(marked) as (message,):
        assert (123_456_789).to_bytes(8, "little") not in message.text + bytes(message.whole()[2])


def test_no_task_is_given_the_labels(small: dict[str, Any]) -> None:
    found = federation(small, dataset=FAXES)
    member_tensors: list[Tensor] = []

    def look(members: Sequence[Member]) -> list[Reply]:
        member_tensors.extend(tensor for member in members for tensor in _held(member))
        return [Reply(Kept()) for _ in members]

    chosen = config(small, dataset=FAXES)
    with LocalEngine(found, chosen.model_spec(found), root="a run", workers=1) as engine:
        list(engine.run(Job(look, "round 1, ask 1", {}, [Call(client) for client in range(5)])))
    assert len(member_tensors) == 5 * 4
    mine = {tensor.untyped_storage().data_ptr() for tensor in (held(found).x, held(found).labels)}
    assert mine.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in member_tensors)


def test_test_records_are_sent_once(small: dict[str, Any]) -> None:
    """One copy for all clients and all workers, of 16 MB here."""
    data = {"dataset": "gaussian-clusters", "options": {"clients": [50], "classes": 2, "records": 2}}
    rows = Records(torch.zeros(400_000, 10), torch.zeros(400_000, dtype=torch.int64))

    class Many(Dataset):
        def load(self, seed: int) -> Pool:
            return Pool("many", rows.take(np.arange(5)), rows, 2)

    clients = make_config(small | {"data": data})
    chosen = check_server(FAXES, {}, Many())  # any dataset of another kind
    assert isinstance(chosen, Faxes)
    own = build_federation("gaussian-clusters", data["options"], None, 0)
    found = with_server(own, Many(), Many(), records=None, judge=True, seed=0)
    assert clients.build_federation().fingerprint == own.fingerprint
    with packed((found, 1), (found, 2)) as messages:
        assert messages[0].memory.size < 1.1 * (rows.x.nbytes + rows.y.nbytes)


# ---- the fingerprint and the config ----------------------------------------------------------------


def test_the_fingerprint_covers_what_the_server_holds(small: dict[str, Any]) -> None:
    different = [
        make_config(small).build_federation(),
        federation(small, dataset=FAXES),
        federation(small, dataset=FAXES, judge=False),
        federation(small, dataset=FAXES, records=39),
        federation(small, dataset=FAXES, options={"first": 1001}),
        federation(small, dataset=FAXES, options={"tests": 19}),
        federation(small, dataset=OFFICES),
        federation(small, 1, dataset=FAXES),
    ]
    assert len({found.fingerprint for found in different}) == len(different)
    assert federation(small, dataset=FAXES).fingerprint == different[1].fingerprint
    unused = federation(small, dataset=FAXES, judge=False, options={"tests": 19})  # nobody is tested on them
    assert unused.fingerprint == different[2].fingerprint


def test_the_config_reads_back_and_without_a_server_says_nothing_of_one(small: dict[str, Any]) -> None:
    plain, with_one = make_config(small), config(small, dataset=FAXES, records=7)
    assert "server" not in plain.resolved()["data"] and "server" not in plain.to_toml()
    expected = {"dataset": FAXES, "options": {}, "rows": "train", "records": 7, "judge": True}
    assert with_one.resolved()["data"]["server"] == expected
    assert make_config(with_one.resolved()).digest() == with_one.digest() != plain.digest()
    assert config(small, dataset=FAXES).digest() != with_one.digest()


def test_the_code_of_a_servers_own_dataset_counts(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = []
    for text in ("one", "two"):
        (tmp_path / "data.py").write_text(text)
        monkeypatch.setattr(sys.modules["a_users_data"], "__file__", str(tmp_path / "data.py"), raising=False)
        codes.append(config(small, dataset=FAXES).code())
    assert len({*codes, make_config(small).code()}) == 3


def test_the_records_of_one_client_have_no_server() -> None:
    with pytest.raises(UserError, match=r"data.server = .* is not a known key"):
        parse(OwnData, {"dataset": "digits", "server": {"dataset": "usps"}}, "data")


# ---- records elsewhere -----------------------------------------------------------------------------


def elsewhere(**options: Any) -> dict[str, Any]:
    clients = [{"name": name, "size": 30, "group": "all"} for name in ("a", "b")]
    return {
        "dataset": "clients",
        "options": {"clients": clients, "features": [1, 8, 8], "classes": 10, **options},
    }


def test_clients_elsewhere_are_not_judged_here(small: dict[str, Any]) -> None:
    found = federation(small, 0, elsewhere(), dataset=FAXES)
    assert found.elsewhere and len(held(found).x) == ROWS and not found.common_tests
    assert found.fingerprint == federation(small, 0, elsewhere(), dataset=FAXES, judge=False).fingerprint
    assert found.fingerprint != build_federation("clients", elsewhere()["options"], None, 0).fingerprint
    with pytest.raises(RuntimeError, match="never leave"):
        found.load(0)
    error = refused(small, elsewhere(features=[1, 9, 9]), dataset=FAXES)
    assert "(1, 8, 8)" in error.why and "(1, 9, 9)" in error.why
    assert "standardised" in refused(small, elsewhere(columns=[(0, -1)], statistics_noise=3.0), dataset=FAXES).what


# ---- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "what", "fix"),
    [
        ({}, "data.server.dataset is missing.", 'data.server.dataset = "usps"'),
        ({"dataset": "usp"}, 'data.server.dataset = "usp" is not known.', 'data.server.dataset = "usps"'),
        (
            {"dataset": "a_users_data:Fax"},
            'data.server.dataset = "a_users_data:Fax"',
            f'data.server.dataset = "{FAXES}"',
        ),
        ({"dataset": "clients"}, 'data.server.dataset = "clients" is not for a server.', "data.server.dataset = "),
        (
            {"dataset": FAXES, "options": {"row": 1}},
            "data.server.options.row = 1 is not",
            "leave out data.server.options",
        ),
        ({"dataset": "usps", "options": {"size": 3}}, "data.server.options.size = 3", "data.server.options.size = 16"),
        ({"dataset": FAXES, "split": {"kind": "iid"}}, "data.server.split = ", "leave out data.server.split"),
        ({"dataset": FAXES, "records": 0}, "data.server.records = 0 is not valid.", "data.server.records = 1000"),
        ({"dataset": FAXES, "records": 2.5}, "data.server.records = 2.5 is not valid.", "data.server.records = 1000"),
        ({"dataset": FAXES, "judge": "no"}, 'data.server.judge = "no" is not valid.', "data.server.judge = true"),
        ({"dataset": "digits"}, "data.server holds records of the clients.", "other records for the server"),
    ],
)
def test_mistakes_that_show_before_anything_is_loaded(
    small: dict[str, Any], server: dict[str, Any], what: str, fix: str
) -> None:
    with pytest.raises(UserError) as error:
        config(small, **server)
    assert error.value.what.startswith(what) and error.value.fix.startswith(fix) and error.value.why


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ({"dataset": FAXES, "records": ROWS + 1}, ["data.server.records = 41", "40 training records", "records = 40"]),
        ({"dataset": FAXES, "options": {"shape": [1, 9, 9]}}, ["(1, 9, 9)", "(1, 8, 8)"]),
        ({"dataset": FAXES, "options": {"classes": 7}}, ["does not fit digits", "7 classes", "clients have 10"]),
        ({"dataset": FAXES, "options": {"classes": 0}}, ["faxes is a regression"]),
        ({"dataset": "hospital-charges"}, ["hospital-charges"]),
        ({"dataset": FAXES, "options": {"tests": 0}}, ["data.server.judge = true needs", "data.server.judge = false"]),
        ({"dataset": OFFICES, "options": {"words": 50}}, ["numbers of 50 words", "amounts", "same vocabulary"]),
        (
            {"dataset": "usps", "options": {"folder": "nowhere"}},
            ["data.server.options.folder = ", "leave out data.server"],
        ),
    ],
)
def test_records_of_another_kind(small: dict[str, Any], server: dict[str, Any], says: list[str]) -> None:
    if server["dataset"] == "hospital-charges" and "FAIRVEIL_DATA" not in os.environ:
        pytest.skip("FAIRVEIL_DATA is not set")
    error = refused(small, **server)
    assert all(word in str(error) for word in says), str(error)


def test_without_test_records_clients_may_judge(small: dict[str, Any]) -> None:
    assert len(held(federation(small, dataset=FAXES, options={"tests": 0}, judge=False)).x) == ROWS


def test_a_regression_has_nothing_to_vote_for(small: dict[str, Any]) -> None:
    error = refused(small, {"dataset": "linear-clusters"}, dataset=FAXES)
    assert "linear-clusters is a regression" in error.why


def test_columns_on_different_scales(small: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "visits.csv"
    path.write_text("\n".join(["client,u,v,y", *(f"{'ab'[at % 2]},{at % 3},{at},{at % 2}" for at in range(20))]))
    columns = {"v": {"kind": "standard", "low": 0, "high": 40}}
    data = {"dataset": "file", "options": {"path": str(path), "prepare": columns}}
    faxes = {"dataset": FAXES, "options": {"shape": [2], "classes": 2}}
    error = refused(small, data, **faxes)
    assert "standardised" in error.what and "different scales" in error.why
    error = refused(small, {"dataset": FAXES, "options": {"shape": [2], "classes": 2}}, **data)  # and the other way
    assert "standardised" in error.what


# ---- whose records they are ------------------------------------------------------------------------


def test_records_of_the_clients_are_not_public(small: dict[str, Any], tmp_path: Path) -> None:
    void = "the guarantee would be void"
    assert void in refused(small, {"dataset": FAXES}, dataset=FAXES).why
    assert federation(small, 0, {"dataset": FAXES}, dataset=FAXES, options={"first": 9000}).server is not None
    path = tmp_path / "visits.csv"
    path.write_text("\n".join(["client,u,y", *(f"{'ab'[at % 2]},{at % 3},{at % 2}" for at in range(20))]))
    data = {"dataset": "file", "options": {"path": str(path)}}
    twice = {"path": str(tmp_path / "." / ".." / tmp_path.name / path.name), "test_fraction": 0.4}
    assert void in refused(small, data, dataset="file", options=twice).why
    other = tmp_path / "public.csv"
    other.write_bytes(path.read_bytes())  # rows of three values are equal by chance
    assert federation(small, 0, data, dataset="file", options={"path": str(other)}).server is not None


def test_generated_records_are_drawn_from_the_same_streams(small: dict[str, Any]) -> None:
    """The first client of both has the same records, unless the numbers of records differ."""
    data = {"dataset": "gaussian-clusters", "options": {"clients": [2], "records": 30, "test_records": 5}}
    options = {"clients": [1], "records": 30, "test_records": 5}
    error = refused(small, data, dataset="gaussian-clusters", options=options)
    assert "30 of them are training records of client 0" in error.why
    others = federation(small, 0, data, dataset="gaussian-clusters", options=options | {"records": 10})
    assert len(held(others).x) == 10


# ---- test rows -------------------------------------------------------------------------------------


def test_test_rows_are_shared_between_the_server_and_the_judges(small: dict[str, Any]) -> None:
    """Half of them unless so many are asked for; also where the clients train on the other rows of that dataset."""
    for records, expected in ((None, 179), (100, 100)):
        found = federation(small, 1, dataset="digits", rows="test", **({} if records is None else {"records": records}))
        public, judges = held(found).x, found.load(0).test.x
        assert len(public) == expected and len(judges) == 359 - expected
        rows = {row.numpy().tobytes() for row in torch.cat([public, judges])}
        assert len(rows) == 359  # no two digits of the test rows are equal
        upright = [c for c in range(found.clients) if found.groups[found.group[c]] == found.groups[0]]
        assert not rows & {row.numpy().tobytes() for c in upright for row in found.load(c).train.x}
    error = refused(small, dataset="digits", rows="test", records=360)
    assert "359 test records" in error.why
    error = refused(small, dataset="digits", rows="test", records=359)
    assert "judge" in error.what
    assert len(held(federation(small, 1, dataset="digits", rows="test", records=359, judge=False)).x) == 359


def test_a_file_of_the_clients_is_read_as_they_read_it(small: dict[str, Any], tmp_path: Path) -> None:
    """Its test rows are nobody's training rows; with another share of them for testing they might be."""
    path = tmp_path / "visits.csv"
    path.write_text("\n".join(["client,u,y", *[f"{'ab'[at % 2]},{at},{at // 2 % 2}" for at in range(40)]]))
    options = {"path": str(path), "test_fraction": 0.2}
    data = {"dataset": "file", "options": options}
    found = federation(small, 0, data, dataset="file", options=options, rows="test", records=4)
    public = set(held(found).x.flatten().tolist())
    trained = {value for client in range(2) for value in found.load(client).train.x.flatten().tolist()}
    assert len(public) == 4 and len(trained) == 32 and not public & trained
    for other in (options | {"test_fraction": 0.5}, options | {"features": ["u"]}):
        for rows in ("train", "test"):
            error = refused(small, data, dataset="file", options=other, rows=rows, records=4)
            assert "holds records of the clients" in error.what and "read otherwise" in error.why
    assert "those of the clients" in refused(small, data, dataset="file", options=options).why


# ---- what a federation can hold --------------------------------------------------------------------


def test_records_that_do_not_fit_together(small: dict[str, Any]) -> None:
    x, labels = torch.zeros(3, 1, 8, 8), torch.zeros(3, dtype=torch.int64)
    for wrong in ((x[:2], labels), (x.double(), labels), (x, labels.float()), (x[:0], labels[:0])):
        with pytest.raises(ValueError, match=r"records|labels"):
            ServerRecords("faxes", *wrong)
    plain = make_config(small).build_federation()
    assert replace(plain, server=ServerRecords("faxes", x, labels)).server
    with pytest.raises(ValueError, match="the server's records are"):
        replace(plain, server=ServerRecords("faxes", x[:, 0], labels))


def test_what_judged_clients_load() -> None:
    found = with_server(Offices().load(0), Offices(), Faxes(), records=None, judge=True, seed=0)
    data = found.load(1)
    assert isinstance(data, ClientData) and len(data.train) == 16 and len(data.test) == TESTS


# ---- the published files ---------------------------------------------------------------------------


def published(small: dict[str, Any], data: dict[str, Any], **server: Any) -> Federation:
    if "FAIRVEIL_DATA" not in os.environ:
        pytest.skip("FAIRVEIL_DATA is not set")
    return federation(small, 0, data, **server)


@pytest.mark.data
def test_clients_of_mnist_and_a_server_of_usps(small: dict[str, Any]) -> None:
    data = {"dataset": "mnist", "options": {"size": 16}, "split": {"kind": "iid", "clients": 200}}
    found = published(small, data, dataset="usps", records=3000)
    assert found.features == (1, 16, 16) and found.clients == 200 and held(found).x.shape == (3000, 1, 16, 16)
    assert len(found.load(199).test) == 2007 and found.size.tolist() == [300] * 200
    with pytest.raises(UserError) as error:
        published(small, {"dataset": "mnist"}, dataset="usps")
    assert error.value.fix == "data.options.size = 16"
    with pytest.raises(UserError) as error:
        published(small, {"dataset": "digits"}, dataset="usps")
    assert error.value.fix == "data.server.options.size = 8"


@pytest.mark.data
def test_domains_on_both_sides(small: dict[str, Any]) -> None:
    data = {"dataset": "office-caltech10", "options": {"domains": ["amazon", "caltech", "dslr"]}}
    found = published(small, data, dataset="office-caltech10", options={"domains": ["webcam"]})
    assert len(held(found).x) + len(found.load(0).test) == 295 and found.groups == ("amazon", "caltech", "dslr")
    with pytest.raises(UserError, match=r"data\.server holds records of the clients") as error:
        published(small, data, dataset="office-caltech10", options={"domains": ["dslr", "webcam"]})
    assert "client dslr" in error.value.why


@pytest.mark.data
def test_the_same_digits_under_another_name(small: dict[str, Any]) -> None:
    writers = {"dataset": "qmnist-writers"}
    found = published(small, writers, dataset="qmnist-writers", options={"part": "test"})
    assert len(held(found).x) + len(found.load(0).test) == 10_000
    for server in ({"dataset": "mnist"}, {"dataset": "qmnist-writers", "options": {"part": "both"}}):
        with pytest.raises(UserError, match=r"data\.server holds records of the clients"):
            published(small, writers, **server)
    with pytest.raises(UserError, match=r"data\.server holds records of the clients") as error:
        published(small, {"dataset": "mnist"}, dataset="mnist", options={"inputs": "standardised"})
    assert "one set of rows" in error.value.why


def test_several_classes_on_both_sides_or_on_none(small: dict[str, Any]) -> None:
    """A label of one kind would not mean the same to who has the other."""
    options = {"clients": 4, "classes": 4, "features": 10}
    data = {"dataset": "attributes", "options": options}
    found = federation(small, data=data, dataset="attributes", options=options, rows="test")
    assert held(found).labels.shape == (100, 4) and found.several
    truth = {tuple(x): y for part in range(4) for x, y in zip(*_test_rows(options, part), strict=True)}
    assert all(truth[tuple(x)] == y for x, y in zip(held(found).x.tolist(), held(found).labels.tolist(), strict=True))
    one = {"dataset": "gaussian-clusters", "options": {"clients": [2, 2]}}
    assert "Only the clients' records may have several" in refused(small, data, **one).why
    assert "Only the server's records may have several" in refused(small, one, **data).why


def _test_rows(options: dict[str, Any], client: int) -> tuple[list[list[float]], list[list[int]]]:
    test = build_federation("attributes", options, None, 0).load(client).test
    return test.x.tolist(), test.y.tolist()
