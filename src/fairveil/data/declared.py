"""What clients on other machines declare of their records: all that a server knows of the data."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from fairveil.data.federation import ClientData, Dataset, Federation, Standardise, fingerprint
from fairveil.errors import UserError


class Declared(BaseModel):
    """One client."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    size: int = Field(ge=1)
    group: str


class Clients(Dataset):
    """What the clients of a federation hold, each on its own machine (fairveil deploy submit).

    The options are filled in when a run begins, from what the clients declare.

    Attributes:
        clients: in the order of their numbers.
        features: shape of one record.
        classes: number of labels; 0 for regression.
        record: what one record is, in the words of the statement.
        tokens: how many words there are, if records hold the numbers of words.
        columns: features that are to be standardised, each with the one that says where it is missing, or -1.
        statistics_noise: noise multiplier of the statistics for that.
        public: what the clients took as public, and why.
    """

    clients: list[Declared] = Field([])
    features: list[int] = Field([])
    classes: int = 0
    record: str = "one row of the data"
    tokens: int | None = None
    columns: list[tuple[int, int]] = Field([])
    statistics_noise: float = 0.0
    public: dict[str, str] = Field({})

    def load(self, seed: int) -> Federation:
        """The clients, without their records."""
        if not self.clients:
            raise UserError(
                'data.dataset = "clients" has no clients here.',
                "Their records are on their own machines. A run is planned once it is submitted to their federation,\n"
                "from what they declare; see docs/deployment.md. Nothing was run.",
                "fairveil deploy submit CONFIG --server DIR",
            )
        groups = sorted({client.group for client in self.clients})
        columns = tuple((at, None if missing < 0 else missing) for at, missing in self.columns)
        return Federation(
            "clients", np.array([client.size for client in self.clients]),
            np.array([groups.index(client.group) for client in self.clients]), tuple(groups), tuple(self.features),
            self.classes, _Elsewhere(), fingerprint(self.model_dump_json()),
            names=tuple(client.name for client in self.clients), record=self.record, public=self.public,
            tokens=self.tokens, standardise=Standardise.of(columns, self.statistics_noise), elsewhere=True,
        )  # fmt: skip


class _Elsewhere:
    """The source of records that cannot be had."""

    def load(self, client: int) -> ClientData:
        raise RuntimeError("the records of a client never leave its machine")


def declared(described: list[dict[str, Any]]) -> dict[str, Any]:
    """The options of `Clients` from what clients say of themselves, in the order of their names.

    Args:
        described: of each client name, size and group, and what must be the same for all: the other options.

    Raises:
        UserError: they do not hold the same kind of records.
    """
    described = sorted(described, key=lambda client: client["name"])
    own = {"name", "size", "group"}
    first = described[0]
    for client in described[1:]:
        for key in first.keys() - own:
            if client.get(key) != first[key]:
                raise UserError(
                    f"{first['name']} and {client['name']} do not hold the same kind of records.",
                    f"They declare different {key}: {first[key]} and {client.get(key)}. Nothing was run.",
                    "the same columns in the client.toml of every client",
                )
    common = {key: value for key, value in first.items() if key not in own}
    return common | {"clients": [{key: client[key] for key in sorted(own)} for client in described]}
