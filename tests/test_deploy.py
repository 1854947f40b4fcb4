"""The folders of a deployment: keys that fit together, modes that keep them, mistakes that are told."""

from __future__ import annotations

import ipaddress
import json
import re
import stat
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509 import verification
from rich.console import Console

from fairveil import terminal
from fairveil.config import load_config
from fairveil.data.files import File
from fairveil.data.hospitals import HeartDisease
from fairveil.deploy.folders import init_client, init_server, renew_certificate, server_config
from fairveil.deploy.keys import certificate_mark, new_authority, public_key_mark
from fairveil.deploy.submit import follow, submit_new
from fairveil.errors import RunFault, UserError
from fairveil.guard.policy import Policy, read_client
from fairveil.options import parse
from fairveil.store import Store, hold

ROOT = Path(__file__).parents[1]
KEY = (
    "ecdsa-sha2-nistp384 AAAAE2VjZHNhLXNoYTItbmlzdHAzODQAAAAIbmlzdHAzODQAAABhBHjvSs2zPuXpKa5CvaGvdhRStU3qohjhaYxPWm"
    "9kPrLFpQ6oOU5eiprpfei0bi892+fUL1t4XH4kRJiuQM6G8pnPSkZ9hnT8UcQUXPf8wMHFuwnKa7bp9GOe085+U48f/g== test"
)
MARK = "SHA256:bV6mtkuhSvw/FXUtv9psR7zl+ULtd+NEwu8IGhNSiGI"

Call = Callable[..., tuple[int, str, str]]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def server(tmp_path: Path) -> Path:
    init_server(tmp_path / "server", ["fed.example.org", "192.0.2.7"], 9092)
    return tmp_path / "server"


@pytest.fixture
def client(tmp_path: Path, server: Path) -> Path:
    init_client(tmp_path / "north", "north", "fed.example.org:9092", server / "ca.crt")
    return tmp_path / "north"


def test_only_its_owner_may_read_a_servers_keys(server: Path) -> None:
    assert mode(server) == 0o700 and mode(server / "ca.key") == 0o600 and mode(server / "server.key") == 0o600
    assert {path.name for path in server.iterdir()} == {
        "ca.crt", "ca.key", "server.crt", "server.key", "clients", "server.toml", "flower",
    }  # fmt: skip
    assert tomllib.loads((server / "server.toml").read_text()) == {
        "hosts": ["fed.example.org", "192.0.2.7"], "listen": "0.0.0.0", "port": 9092,
    }  # fmt: skip


def test_only_its_owner_may_read_a_clients_keys(client: Path, server: Path) -> None:
    assert mode(client) == 0o700 and mode(client / "node.key") == 0o600 and mode(client / "secret.key") == 0o600
    assert {path.name for path in client.iterdir()} == {
        "ca.crt", "node.key", "north.pub", "secret.key", "client.toml", "policy.toml",
    }  # fmt: skip
    assert len(bytes.fromhex((client / "secret.key").read_text())) == 32
    assert (client / "ca.crt").read_bytes() == (server / "ca.crt").read_bytes()


@pytest.mark.parametrize(
    "subject",
    [
        x509.DNSName("fed.example.org"),
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("192.0.2.7")),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    ],
    ids=lambda subject: str(subject.value),
)
def test_the_certificate_is_the_servers_under_each_of_its_names(
    server: Path, subject: x509.DNSName | x509.IPAddress
) -> None:
    """By the rules of the web (the verifier of the library cryptography)."""
    authority = x509.load_pem_x509_certificate((server / "ca.crt").read_bytes())
    certificate = x509.load_pem_x509_certificate((server / "server.crt").read_bytes())
    store = verification.PolicyBuilder().store(verification.Store([authority]))
    chain = store.build_server_verifier(subject).verify(certificate, [])
    assert chain == [certificate, authority]


def test_the_certificate_is_nobody_elses(server: Path) -> None:
    certificate = x509.load_pem_x509_certificate((server / "server.crt").read_bytes())
    own = x509.load_pem_x509_certificate((server / "ca.crt").read_bytes())
    other = x509.load_pem_x509_certificate(new_authority()[0])
    for authority, name in ((own, "other.example.org"), (other, "fed.example.org")):
        builder = verification.PolicyBuilder().store(verification.Store([authority]))
        with pytest.raises(verification.VerificationError):
            builder.build_server_verifier(x509.DNSName(name)).verify(certificate, [])


def test_certificates_last_as_long_as_the_document_says(server: Path) -> None:
    for name, days in (("ca.crt", 3650), ("server.crt", 730)):
        end = x509.load_pem_x509_certificate((server / name).read_bytes()).not_valid_after_utc
        assert abs(end - datetime.now(UTC) - timedelta(days=days)) < timedelta(minutes=5)


def test_a_new_certificate_follows_the_names_and_needs_the_authoritys_key(server: Path) -> None:
    renew_certificate(server, ["new.example.org"])
    renewed = (server / "server.crt").read_bytes()
    names = x509.load_pem_x509_certificate(renewed).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert names.value.get_values_for_type(x509.DNSName) == ["new.example.org", "localhost"]
    (server / "ca.key").unlink()  # kept elsewhere
    renew_certificate(server, ["newer.example.org"])
    assert (server / "server.crt").read_bytes() == renewed


def test_a_clients_public_key_is_that_of_its_private_key(client: Path) -> None:
    private = serialization.load_ssh_private_key((client / "node.key").read_bytes(), None)
    public = serialization.load_ssh_public_key((client / "north.pub").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey) and isinstance(private.curve, ec.SECP384R1)
    assert private.public_key() == public


def test_a_public_key_has_the_fingerprint_that_openssh_gives_it(tmp_path: Path) -> None:
    """Made and read by ssh-keygen 9.2."""
    path = tmp_path / "a.pub"
    path.write_text(KEY)
    assert public_key_mark(path) == MARK


def test_what_a_client_edits_is_toml_with_every_key(client: Path) -> None:
    values = tomllib.loads((client / "client.toml").read_text())
    assert (values["name"], values["server"], values["group"]) == ("north", "fed.example.org:9092", "")
    assert set(values["data"]) == {"dataset", "options"}
    policy = tomllib.loads((client / "policy.toml").read_text())
    assert policy == {
        "epsilon": 4.0, "delta": 1e-4, "adjacency": "add-remove", "trust": "nobody",
        "tasks": ["local_update", "fair_update", "choose_model", "personal_update", "release_moments"],
        "smallest_noise": 0.2, "open_choice": False, "largest_clip": 10.0, "largest_message": 100_000_000,
        "sizes": "rounded", "plugins": [],
    }  # fmt: skip


def test_a_server_of_this_machine_only_is_not_seen_from_others(tmp_path: Path) -> None:
    init_server(tmp_path / "s", ["localhost", "127.0.0.1"], 9999)
    config = server_config(tmp_path / "s")
    assert (config.listen, config.own_address) == ("127.0.0.1", "127.0.0.1:9999")
    flower = tomllib.loads((tmp_path / "s/flower/config.toml").read_text())["superlink"]["here"]
    assert flower == {"address": "127.0.0.1:9999", "root-certificates": str(tmp_path / "s/ca.crt")}


def test_keys_are_never_overwritten(server: Path, client: Path) -> None:
    before = {path: path.read_bytes() for folder in (server, client) for path in folder.iterdir() if path.is_file()}
    with pytest.raises(UserError, match="is not empty"):
        init_server(server, ["localhost"], 9092)
    with pytest.raises(UserError, match="is not empty"):
        init_client(client, "north", "localhost:9092", server / "ca.crt")
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    ("name", "address", "words"),
    [
        ("../north", "fed.example.org:9092", ["--name ../north", "letters"]),
        ("", "fed.example.org:9092", ["--name", "is not a name"]),
        ("north", "fed.example.org", ["--server fed.example.org", "port"]),
        ("north", "https://fed.example.org:9092", ["--server https://", "is not an address"]),
        ("north", "fed.example.org:99999", ["is not an address"]),
    ],
)
def test_a_client_with_a_wrong_name_or_server_is_not_made(
    tmp_path: Path, server: Path, name: str, address: str, words: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        init_client(tmp_path / "c", name, address, server / "ca.crt")
    assert all(word in str(error.value) for word in words), str(error.value)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("content", [b"", b"not a certificate", None])
def test_a_client_needs_the_servers_certificate(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "ca.crt").write_bytes(content)
    with pytest.raises(UserError, match=r"ca\.crt (cannot be read|is not a certificate)"):
        init_client(tmp_path / "c", "north", "fed.example.org:9092", tmp_path / "ca.crt")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("host", ["fed.example.org:9092", "https://fed.example.org", "a b", ""])
def test_a_server_with_a_wrong_host_is_not_made(tmp_path: Path, host: str) -> None:
    with pytest.raises(UserError, match="neither a name nor an address"):
        init_server(tmp_path / "s", [host], 9092)
    assert not (tmp_path / "s").exists()


def test_what_is_not_a_clients_key_admits_nobody(server: Path, tmp_path: Path) -> None:
    for content in (b"", b"ssh-rsa AAAA x", (server / "ca.crt").read_bytes(), b"ecdsa-sha2-nistp384 AAAA"):
        (tmp_path / "x.pub").write_bytes(content)
        with pytest.raises(UserError, match="is not the public key of a client"):
            public_key_mark(tmp_path / "x.pub")


def test_both_sides_are_shown_the_same_fingerprint(fairveil: Call, tmp_path: Path) -> None:
    code, made, _ = fairveil("deploy", "init-server", "server", "--host", "fed.example.org")
    assert code == 0
    arguments = ("--name", "north", "--server", "fed.example.org:9092", "--ca", "server/ca.crt")
    code, joined, _ = fairveil("deploy", "init-client", "north", *arguments)
    mark = certificate_mark(tmp_path / "server/ca.crt")
    assert code == 0 and mark in made and mark in joined and "north/north.pub" in joined


@pytest.mark.parametrize("command", ["serve", "join"])
def test_a_folder_that_is_none_is_told(fairveil: Call, command: str) -> None:
    code, _, err = fairveil("deploy", command, "nowhere")
    assert code == 2 and "is not the folder of a" in err and "fairveil deploy init-" in err


@pytest.mark.parametrize("command", ["serve", "join"])
def test_without_flower_it_is_told_how_to_get_it(fairveil: Call, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairveil.deploy.programs.find_spec", lambda name: None)
    code, _, err = fairveil("deploy", command, "nowhere")
    assert code == 2 and "pip install 'fairveil[flower]'" in err


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a run on a federation."""
    path = tmp_path / "run.toml"
    path.write_text(
        '[data]\ndataset = "clients"\n[model]\nname = "logistic"\n[algorithm]\nname = "global"\nrounds = 7\n'
        "[privacy]\nepsilon = 4.0\ndelta = 1e-3\n"
    )
    return path


def test_a_run_with_data_of_its_own_is_not_submitted(fairveil: Call, server: Path, config: Path) -> None:
    code, _, err = fairveil("deploy", "submit", str(config), "--server", str(server), "--set", "data.dataset=digits")
    assert code == 2 and "the clients hold the data" in err and "--set data.dataset=clients" in err
    assert not Path("runs").exists()


def test_a_run_needs_a_server_that_is_running(fairveil: Call, server: Path, config: Path) -> None:
    code, _, err = fairveil("deploy", "submit", str(config), "--server", str(server))
    assert code == 2 and "no server is running" in err and f"fairveil deploy serve {server}" in err
    assert not Path("runs").exists()


def test_a_run_needs_a_client(server: Path, config: Path, tmp_path: Path) -> None:
    (server / "registered.json").write_text("{}")
    with (server / "lock").open("w") as lock:
        hold(lock, server, "")
        with pytest.raises(UserError, match="has no clients"):
            submit_new(config, (), server, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_only_a_submitted_run_is_resumed(fairveil: Call, server: Path, tmp_path: Path) -> None:
    code, _, err = fairveil("deploy", "submit", str(tmp_path), "--server", str(server), "--resume")
    assert code == 2 and "is not a run that was submitted" in err
    code, _, err = fairveil("deploy", "submit", "x", "--server", str(server), "--resume", "--set", "seed=1")
    assert code == 2 and "cannot change a run that is under way" in err


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that was submitted."""
    folder = tmp_path / "runs/run-1"
    folder.mkdir(parents=True)
    (folder / "submission.json").write_text(json.dumps({"run": "0" * 32, "clients": 3}))
    return folder


RESULT = {
    "run": "runs/run-1", "algorithm": "global", "rounds": 7, "seconds": 1.5, "epsilon": 3.99701, "epsilon_spent": 2.0,
    "delta": 1e-3, "clients": 3, "guarantee": "what a client sends is private",
}  # fmt: skip


def test_a_finished_run_gives_its_result_again(fairveil: Call, server: Path, run: Path) -> None:
    """Without any server."""
    (run / "result.json").write_text(json.dumps(RESULT))
    code, printed, _ = fairveil("deploy", "submit", str(run), "--server", str(server), "--resume", "--json")
    assert code == 0 and json.loads(printed) == RESULT
    code, printed, _ = fairveil("deploy", "submit", str(run), "--server", str(server), "--resume")
    assert code == 0 and "7 rounds with 3 clients in 2 s, epsilon 2 of 3.998 at delta 0.001" in printed
    assert "what a client sends is private" in printed


def test_a_run_that_failed_says_so_in_its_own_words(server: Path, run: Path) -> None:
    for code, kind in ((2, UserError), (1, RunFault)):
        (run / "failure.json").write_text(json.dumps({"error": "wrong.\n  Try: right", "code": code}))
        with pytest.raises(kind) as error:
            follow(run, server, lambda done, rounds: None)
        assert str(error.value) == "wrong.\n  Try: right"


def test_a_run_whose_process_is_gone_says_how_to_go_on(
    server: Path, run: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower has ended it, and there is neither a result nor a failure; two rounds of seven are done."""
    monkeypatch.setattr("fairveil.deploy.submit.ASK", 0.0)
    monkeypatch.setattr("fairveil.deploy.submit.run_states", lambda server: {"17": "finished:failed"})
    (server / "runs.jsonl").write_text(json.dumps({"folder": str(run), "flower": "17"}) + "\n{cut")
    (run / "config.toml").write_text(config.read_text())
    with Store(run) as store:
        store.database.execute("INSERT INTO round VALUES (1, 0.1), (2, 0.1)")
        store.database.commit()
    shown: list[tuple[int, int]] = []
    with pytest.raises(RunFault, match=f"submit {run} --server {server} --resume"):
        follow(run, server, lambda done, rounds: shown.append((done, rounds)))
    assert shown == [(2, 7)]


def test_a_server_that_does_not_run_shows_its_clients_and_runs(
    fairveil: Call, server: Path, client: Path, run: Path
) -> None:
    (server / "clients/north.pub").write_bytes((client / "north.pub").read_bytes())
    (server / "runs.jsonl").write_text(json.dumps({"folder": str(run), "flower": "17"}) + "\n")
    code, printed, _ = fairveil("deploy", "status", str(server), "--json")
    assert code == 0 and json.loads(printed) == {
        "kind": "server", "running": False, "listen": "0.0.0.0", "port": 9092,
        "hosts": ["fed.example.org", "192.0.2.7"],
        "clients": [{"name": "north", "state": "no server is running"}],
        "runs": [{"run": str(run), "state": "interrupted"}],
    }  # fmt: skip
    code, printed, _ = fairveil("deploy", "status", str(server))
    assert code == 0 and "fed.example.org:9092" in printed and "not running" in printed and "north" in printed


def test_a_new_client_has_spent_nothing(fairveil: Call, client: Path) -> None:
    code, printed, _ = fairveil("deploy", "status", str(client))
    assert code == 0 and "Client north of fed.example.org:9092: not running." in printed
    assert "epsilon 4, delta 0.0001; trusts nobody" in printed and "Runs: none" in printed
    code, _, err = fairveil("deploy", "status", ".")
    assert code == 2 and "neither" in err


def test_a_clients_runs_are_shown_with_what_it_scored_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {
        "run": "0123456789abcdef0123456789abcdef", "since": "2026-01-02 03:04:05", "state": "finished",
        "protects": "record", "epsilon": 3.9971, "delta": 1e-3, "released": 5, "accepted": 5,
        "own_test": {"accuracy": 0.8, "loss": 0.43, "n": 61.0},
    }  # fmt: skip
    monkeypatch.setattr(terminal, "out", Console(highlight=False, width=200))
    terminal.print_deployment(
        {
            "kind": "client", "running": True, "name": "north", "server": "x:1", "runs": [run], "refusals": [],
            "policy": {"epsilon": 4.0, "delta": 1e-3, "trust": "nobody"},
            "spent": {"epsilon": 3.9971, "delta": 1e-3},
        }
    )  # fmt: skip
    printed = capsys.readouterr().out
    for words in ("01234567 ", "3.9971 for each record", "5 of 5", "accuracy 0.800, loss 0.430, n = 61"):
        assert words in printed


def test_the_example_declares_what_the_dataset_declares(tmp_path: Path) -> None:
    """The hospitals of examples/federation see the same features as the dataset heart-disease."""
    data = tomllib.loads((ROOT / "examples/federation/hospital.toml").read_text())["data"]
    assert parse(File, data["options"], "data.options").prepare == HeartDisease.COLUMNS
    assert load_config(ROOT / "examples/federation/heart.toml").data.dataset == "clients"


def test_the_policy_in_the_document_is_the_one_that_is_written(client: Path) -> None:
    shown = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/deployment.md").read_text(), re.DOTALL)
    assert [tomllib.loads(block) for block in shown] == [tomllib.loads((client / "policy.toml").read_text())]


def test_the_policy_that_is_written_is_the_default(client: Path) -> None:
    """What is left out of the file means the same as what stands there."""
    config, policy = read_client(client)
    assert config.name == "north" and policy == Policy(epsilon=4.0, delta=1e-4)
