"""Public records of the server: without labels for whoever asks about them, and test records to judge models by.

Nothing protects them: they must be of other people than the clients' records.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fairveil.data.archive import Stored
from fairveil.data.datasets import DATASETS, find_dataset
from fairveil.data.declared import Clients
from fairveil.data.federation import (
    ClientData,
    Dataset,
    Federation,
    Pool,
    Records,
    ServerRecords,
    Source,
    fingerprint,
)
from fairveil.data.files import File
from fairveil.data.synthetic import Generated
from fairveil.errors import UserError
from fairveil.options import parse
from fairveil.streams import Stream

PUBLIC = "without labels: public by declaration; nothing here protects them"


@dataclass(frozen=True, eq=False)
class Judged:
    """A source whose clients are all tested on the same records: those of the server, as they are for every group."""

    source: Source
    test: Records

    def load(self, client: int) -> ClientData:
        """The client's own training records, and the server's for testing."""
        return ClientData(self.source.load(client).train, self.test)


Rows = Literal["train", "test"]


def check_server(dataset: str, options: Mapping[str, Any], clients: Dataset, rows: Rows = "train") -> Dataset:
    """The dataset of the server, as far as it can be checked without loading anything.

    Args:
        dataset, options: as under `[data.server]`.
        clients: the dataset of the clients.
        rows: which are taken.

    Raises:
        UserError: it is not known, or holds the very records of the clients.
    """
    with _keys_of_the_server():
        server = parse(find_dataset(dataset), options, "data.options")
    if isinstance(server, Clients):
        raise UserError(
            'data.server.dataset = "clients" is not for a server.',
            "The records of clients are on their own machines; those of the server are on its own. Nothing was run.",
            'data.server.dataset = "file", or a published dataset (fairveil data list)',
        )
    files = [each.path.resolve() for each in (clients, server) if isinstance(each, File)]
    same = server == clients
    if same and rows == "train":
        raise _private("They are those of the clients")
    # read otherwise, a file is divided otherwise: its test rows may then be rows that a client trains on
    if len(files) == 2 and files[0] == files[1] and not same:
        raise _private("They are rows of the clients' file, which it is to read otherwise than they do")
    return server


def with_server(
    federation: Federation, clients: Dataset, server: Dataset, *, rows: Rows = "train", records: int | None,
    judge: bool, seed: int,
) -> Federation:  # fmt: skip
    """The federation whose server holds public records.

    Args:
        federation: of the clients.
        clients, server: the datasets of both.
        rows: of the server's dataset: its training rows; or its test rows, of which the rest is for judging. Nobody
            trains on these, so the server may hold them also where the clients hold the training rows.
        records: how many, drawn by the seed; None: all, or half of the test rows.
        judge: whether all clients are tested on the server's test records. It changes nothing where the records of the
            clients are elsewhere, and nothing is measured.
        seed: of the run.

    Raises:
        UserError: the records are not of the same kind, too few, or those of the clients.
    """
    with _keys_of_the_server():
        found = server.load(int(seed))
    _check_kind(federation, clients, server, found)
    train, test = (found.train, found.test) if isinstance(found, Pool) else _together(found)
    judged = judge and not federation.elsewhere
    order = Stream(seed, "records of the server").numpy.permutation(len(train if rows == "train" else test))
    if rows == "test":
        half = len(test) // 2 if records is None else records
        train, test, order = test, test.take(order[half:]), order[:half]
    _check_enough(found.name, rows, train, test if judged else None, records)
    same = isinstance(found, Pool) and type(server) is type(clients) and type(server) in DATASETS.values()
    if same and rows == "train":
        raise _private(f"Whatever its options, {found.name} has one set of rows, and the clients hold them")
    if _related(clients, server):
        _check_apart(federation, torch.cat([train.x, test.x]))
    drawn = train.take(order[:records])
    held = ServerRecords(found.name, drawn.x, drawn.y)
    public = {**federation.public, "the server's records": f"{found.name}, {PUBLIC}"}
    tests = (test.x, test.y) if judged else ("clients judge by their own",)
    mark = fingerprint(federation.fingerprint, held.x, held.labels, *tests)
    federation = replace(federation, server=held, public=public, fingerprint=mark)
    if not judged:
        return federation
    return replace(federation, source=Judged(federation.source, test), common_tests=True, attributes={})


def _together(federation: Federation) -> tuple[Records, Records]:
    """All training records and all test records, client after client."""
    data = [federation.load(client) for client in range(federation.clients)]
    train, test = (
        Records(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))
        for parts in ([one.train for one in data], [one.test for one in data])
    )
    return train, test


def _check_kind(federation: Federation, clients: Dataset, server: Dataset, found: Pool | Federation) -> None:
    """Raise unless one model can take the records of both."""
    names = f"data.server.dataset gives {found.name}, which does not fit {federation.name}."
    if not federation.classes or not found.classes:
        raise UserError(
            names,
            f"{(found if federation.classes else federation).name} is a regression: there is no label to vote for. "
            "Nothing was run.",
            "data with labels on both sides, or leave out data.server",
        )
    if found.classes != federation.classes:
        raise UserError(
            names,
            f"It has {found.classes} classes, and the clients have {federation.classes}: a label would not mean the "
            "same to both.\nNothing was run.",
            f"a dataset of {federation.classes} classes",
        )
    if found.several != federation.several:
        whose = "the clients'" if federation.several else "the server's"
        raise UserError(
            names,
            f"Only {whose} records may have several classes at once: a label would not mean the same to both.\n"
            "Nothing was run.",
            "records of the same kind on both sides",
        )
    if found.features != federation.features:
        raise UserError(
            names,
            f"Its records have the shape {found.features}, those of the clients {federation.features}, and one model "
            "takes both.\nNothing was run.",
            _same_size(federation, clients, server, found),
        )
    tokens = None if isinstance(found, Pool) else found.tokens
    if tokens != federation.tokens:
        raise UserError(
            names,
            f"{_words(tokens)} in the server's records, {_words(federation.tokens)} in the clients': the same number "
            "would not mean the same.\nNothing was run.",
            "the same vocabulary on both sides",
        )
    if federation.standardise or (isinstance(found, Federation) and found.standardise):
        raise UserError(
            "data.server does not go with columns that are standardised by released statistics.",
            "The records of clients and server would be on different scales. Nothing was run.",
            "ranges of the columns that are known beforehand, or published figures (docs/data.md)",
        )


def _check_enough(name: str, rows: Rows, train: Records, test: Records | None, records: int | None) -> None:
    """Raise unless there are so many to draw, and some to judge by (None: that is not asked for)."""
    if not len(train) or (records is not None and records > len(train)):
        raise UserError(
            f"data.server.records = {records} is more than there are." if records else "data.server has no records.",
            f"{name} has {len(train):,} {'training' if rows == 'train' else 'test'} records. Nothing was run.",
            f"data.server.records = {len(train)}, or leave it out" if len(train) else "another data.server.dataset",
        )
    if test is not None and not len(test):
        raise UserError(
            "data.server.judge = true needs test records.",
            f"{name} has none left. Nothing was run.",
            "data.server.judge = false",
        )


def _same_size(federation: Federation, clients: Dataset, server: Dataset, found: Pool | Federation) -> str:
    """What to type if images can be brought to the same size."""
    for dataset, key, shape in ((clients, "data", found.features), (server, "data.server", federation.features)):
        if "size" in type(dataset).model_fields and len(shape) == 3 and shape[1] == shape[2]:
            return f"{key}.options.size = {shape[1]}"
    return f"records of the shape {federation.features}"


def _words(tokens: int | None) -> str:
    return "amounts" if tokens is None else f"numbers of {tokens:,} words"


def _related(clients: Dataset, server: Dataset) -> bool:
    """Whether both read the same published files or draw from the same law: then equal records are one and the same.

    In tables of the user's own they may be of two people.
    """
    if isinstance(clients, Stored) and isinstance(server, Stored):
        files = [{one.folder for one in (dataset.archive, *dataset.archive.also)} for dataset in (clients, server)]
        return not files[0].isdisjoint(files[1])
    return isinstance(server, Generated) and type(clients) is type(server)


def _check_apart(federation: Federation, x: Tensor) -> None:
    """Raise if a client trains on one of these records (n, *features), as it is."""
    public = set(_marks(x))
    for client in range(federation.clients):
        held = sum(mark in public for mark in _marks(federation.load(client).train.x))
        if held:
            name = federation.names[client] if federation.names else str(client)
            raise _private(f"{held:,} of them are training records of client {name}")


def _marks(x: Tensor) -> Iterator[bytes]:
    """A hash of each record."""
    return (hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in x.numpy())


def _private(which: str) -> UserError:
    return UserError(
        "data.server holds records of the clients.",
        f"{which}. What the server holds is public, and nothing protects it; the guarantee would be void.\n"
        "Nothing was run.",
        "other records for the server: another dataset, or another part of this one",
    )


@contextmanager
def _keys_of_the_server() -> Iterator[None]:
    """Datasets speak of `data.dataset` and `data.options`: here these are the server's."""
    try:
        yield
    except UserError as error:
        own = (
            re.sub(r"\bdata\.(?=dataset|options)", "data.server.", text) for text in (error.what, error.why, error.fix)
        )
        raise UserError(*own) from error
