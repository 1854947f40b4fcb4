"""`pate-fl`: each client trains a teacher of its own; the teachers vote on public records (PATE across clients).

Zhu, Yu, Tsai, Pittaluga, Faraki, Chandraker and Wang, "Voting-based Approaches for Differentially Private Federated
Learning" (2020), after Papernot et al., "Scalable Private Learning with PATE" (2018). Agent i trains f_i on its own
records; for each of Q public queries x it votes onehot(f_i(x)); y = argmax of the sum, with noise N(0, sigma^2 I).
Privacy unit: a client, or a record (`privacy.unit`). Trust: the server, see `fairveil.algorithms.voting`.

A teacher never leaves its client: it is personal state. `adaptation` draws it towards the server's domain while it is
trained (`fairveil.adaptation`), by the public records alone.

Departures: sensitivities and data-dependent prices are those of `fairveil.privacy.votes`. (Theorem 14 of Zhu et al. has
an inverted exponent, and their Lemma 13 is too small: neither is used.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fairveil.adaptation import adapted
from fairveil.algorithms.base import NoiseFor
from fairveil.algorithms.voting import Voting
from fairveil.errors import UserError
from fairveil.privacy.release import Kept, Reply
from fairveil.privacy.votes import NoisyVotes
from fairveil.remote import Array, Count, deployable
from fairveil.session import Facts, Member, Session, Task, Terms
from fairveil.tasks import descent

AT_ONCE = 100  # queries: half as fast again as 500, which do not stay in the processor's cache


@deployable(
    model=Array(("p",)), learning_rate=float, local_epochs=Count(), batch_size=Count(), public=Array(("n", "f")),
    adaptation=float, together=("public", "adaptation"),
)  # fmt: skip
def train_teacher(members: Sequence[Member]) -> list[Reply]:
    """Each client trains the input "model" on its own records, and keeps what came of it.

    With an "adaptation" weight it is drawn towards the "public" records (n, d).
    """
    if "adaptation" in members[0].inputs:
        return [Reply(Kept(), keep={"model": _adapted(member)}) for member in members]
    starts = torch.stack([cast(Tensor, member.inputs["model"]) for member in members])
    return [Reply(Kept(), keep={"model": teacher}) for teacher in descent(members, starts)]


def _adapted(member: Member) -> Tensor:
    inputs: Any = member.inputs
    train, target = member.data.train, inputs["public"].reshape(-1, *member.model.spec.features)
    return adapted(
        member.model, inputs["model"], train.x, train.y, target, learning_rate=inputs["learning_rate"],
        epochs=inputs["local_epochs"], batch_size=inputs["batch_size"], weight=inputs["adaptation"],
        stream=member.stream("batches"),
    )  # fmt: skip


@deployable(by=NoisyVotes, queries=Array(("q", "f")), needs=("model",))
def teacher_votes(members: Sequence[Member]) -> list[Reply]:
    """Each client votes for what its teacher takes the input "queries" (Q, d) to be; of several classes, for each."""
    replies = []
    for member in members:
        queries = cast(Tensor, member.inputs["queries"]).reshape(-1, *member.model.spec.features)
        spec, teacher = member.model.spec, member.personal["model"]
        output = torch.cat([member.model.predict(teacher, some) for some in queries.split(AT_ONCE)])
        votes = output > 0 if spec.several else F.one_hot(output.argmax(dim=1), spec.classes)
        share, diagnostics = cast(NoisyVotes, member.mechanism).share({"votes": votes}, member)
        replies.append(Reply(share, diagnostics=diagnostics))
    return replies


class PateFL(Voting):
    name: ClassVar[str] = "pate-fl"
    task: ClassVar[Task] = teacher_votes

    local_epochs: int = Field(20, ge=1, description="passes of a teacher over its client's records")
    batch_size: int = Field(32, ge=1, description="of the teacher's plain SGD")
    learning_rate: float = Field(0.1, gt=0, description="of the teacher")
    adaptation: float = Field(0.0, ge=0, description="weight of adaptation to the server's records; 0: none")

    def settled(self, facts: Facts, noise: NoiseFor) -> Self:
        if self.adaptation and facts.several:
            raise UserError(
                f"algorithm.adaptation = {self.adaptation:g} does not go with records that may have several classes.",
                "It asks that an answer not waver between classes, and here they do not exclude each other. Nothing\n"
                "was run.",
                "algorithm.adaptation = 0",
            )
        return super().settled(facts, noise)

    def prepare(self, session: Session) -> None:
        shared: dict[str, Any] = {
            "model": session.initial_model("teacher"),
            "learning_rate": self.learning_rate,
            "local_epochs": self.local_epochs,
            "batch_size": self.batch_size,
        }
        if self.adaptation:
            shared |= {"public": session.public.flatten(1), "adaptation": self.adaptation}
        session.ask(train_teacher, session.facts.clients, shared=shared)

    def votes(self, terms: Terms, asked: dict[str, Any]) -> NoisyVotes:
        return NoisyVotes(**asked)
