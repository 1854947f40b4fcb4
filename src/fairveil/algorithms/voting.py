"""What the voting systems share: public queries, votes of all clients, and a student that learns from the winners.

Zhu, Yu, Tsai, Pittaluga, Faraki, Chandraker and Wang, "Voting-based Approaches for Differentially Private Federated
Learning" (2020). The server has public records without labels (`[data.server]`). For Q of them every client, an *agent*
there, gives its vote; the votes are added up with noise, and the winners are the labels (`fairveil.privacy.votes`). On
these the server trains the model that serves everybody, the *student*, and on the remaining public records without
labels (`fairveil.student`). Whatever the student learns is a function of public records and published labels: free.

Privacy unit: one client with all its records (`privacy.unit = "client"`, their agent level) or one record of any client
(`"record"`, their instance level). `privacy.noise_multiplier` is sigma, in votes. Trust: the server, with the votes of
every client; or, with noise that clients make together and a secure sum, nobody with single votes.

Where a record may have several classes at once, a vote names `labels` of them at most (the paper's tau: what names more
is scaled down), and a record is given each class that more than half of all votes, with their noise, name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fairveil.algorithms.base import Algorithm, NoiseFor, SmoothedCost, Unit, Voted, check_tolerated
from fairveil.errors import UserError
from fairveil.privacy.consensus import SmoothedPrice
from fairveil.privacy.mechanisms import Mechanism, Sharers
from fairveil.privacy.votes import NoisyVotes, Several, which_answered
from fairveil.session import Facts, Pick, Session, Task, Terms
from fairveil.student import StudentTraining, train_student


@dataclass(frozen=True)
class State:
    labels: np.ndarray  # of the queries asked so far (Q,), UNANSWERED where nobody won; of several classes (Q, C)
    model: Tensor  # the student (p,)
    cost: float | None  # published price of these answers, see `SmoothedPrice`; None: none was published


class Voting(Algorithm[State]):
    """Hyper-parameters and rounds of a voting system; `votes` and `task` say who votes how."""

    unit: ClassVar[Unit] = "client"
    other_units: ClassVar[tuple[Unit, ...]] = ("record",)
    pooled: ClassVar[bool] = True
    needs_public: ClassVar[bool] = True
    trust: ClassVar[str] = (
        "the server: every client sends it its votes without noise; it adds them up, adds the noise, publishes the "
        "winners, and keeps to itself what each client has voted"
    )

    rounds: int = Field(1, ge=1, description="the queries are asked in so many parts, a student after each")
    queries: int = Field(100, ge=1, description="Q, public records that are voted on")
    labels: Annotated[int, Field(ge=1)] | None = Field(
        None, examples=[5], description="tau, classes that one vote may name; for records that may have several"
    )
    confidence: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, examples=[0.6], description="share of the votes that a winner needs, else no answer"
    )
    answers: Annotated[int, Field(ge=1)] | None = Field(
        None, examples=[250], description="the most that are answered, with a confidence"
    )
    check_noise: float = Field(3.0, gt=0, description="noise of that count, over the noise of the votes")
    noise: Literal["server", "distributed"] = Field("server", description='who makes it: or "distributed", all clients')
    tolerated: int = Field(0, ge=0, description="t, clients that may drop out or conspire then")
    publish_cost: bool = Field(False, description="a price for these very data, sanitised; itself a release")
    student_steps: int = Field(1000, ge=1, description="of the student's training")
    student_batch: int = Field(64, ge=1, description="labelled records in a step, and as many others")
    student_rate: float = Field(0.002, gt=0, description="learning rate of Adam, falling to 0")
    vat: float = Field(1.0, ge=0, description="weight of virtual adversarial training; 0: labelled records only")
    vat_radius: float = Field(0.2, gt=0, description="how far it moves a record, over their distance from the mean")

    def settled(self, facts: Facts, noise: NoiseFor) -> Self:
        if not facts.classes:
            raise UserError(
                f'algorithm.name = "{self.name}" does not fit a regression.',
                "Votes are for classes. Nothing was run.",
                "data with classes",
            )
        self._check_several(facts)
        self._check_queries(facts)
        check_tolerated(self.tolerated, self.noise, facts)
        self._check_extras(facts)
        return self

    def _check_queries(self, facts: Facts) -> None:
        """Refuse more queries than there are records, and parts or limits that are no part of them."""
        if self.queries > facts.public:
            raise UserError(
                f"algorithm.queries = {self.queries} is more than the server has records: {facts.public}.",
                "Each of them is voted on once. Nothing was run.",
                f"algorithm.queries = {facts.public}, or more of data.server.records",
            )
        if self.queries < self.rounds:
            raise UserError(
                f"algorithm.rounds = {self.rounds} is more than algorithm.queries = {self.queries}.",
                "Every round asks at least one of them. Nothing was run.",
                f"algorithm.rounds = {self.queries}, or fewer",
            )
        if self.answers is not None and (self.confidence is None or not self.rounds <= self.answers <= self.queries):
            raise UserError(
                f"algorithm.answers = {self.answers} makes no sense here.",
                "It limits the answers among algorithm.queries, at least one in a round, and needs a confidence: else\n"
                "every query is answered. Nothing was run.",
                "leave it out, or algorithm.confidence = 0.6",
            )

    def _check_extras(self, facts: Facts) -> None:
        """Refuse what needs exact votes that nobody sees, and a published price where there is none."""
        if self.noise == "distributed" and (self.confidence is not None or self.publish_cost):
            what = "confidence" if self.confidence is not None else "publish_cost"
            raise UserError(
                f'algorithm.{what} does not go with algorithm.noise = "distributed".',
                "It needs the exact votes, which nobody sees then. Nothing was run.",
                'algorithm.noise = "server", or leave it out',
            )
        if self.publish_cost and self.confidence is not None:
            raise UserError(
                "algorithm.publish_cost = true does not go with algorithm.confidence.",
                "Which queries are answered is drawn as well, and the price of one draw is not that of all.\n"
                "Nothing was run.",
                "leave out one of them",
            )
        if self.publish_cost and facts.adjacency == "replace":
            raise UserError(
                'algorithm.publish_cost = true does not go with privacy.adjacency = "replace".',
                "Noise by smooth sensitivity has a price in Renyi divergence only, which is not for replaced units. "
                "Nothing was run.",
                'privacy.adjacency = "add-remove", or leave out algorithm.publish_cost',
            )

    def _check_several(self, facts: Facts) -> None:
        """Refuse a limit to the classes of a vote where a record has one, and the want of a limit where it has more."""
        if facts.several and self.labels is None:
            raise UserError(
                "algorithm.labels is missing.",
                f"A record may have several of {facts.classes} classes at once. The more of them one vote may name,\n"
                "the more it costs. Nothing was run.",
                f"algorithm.labels = {min(5, facts.classes)}",
            )
        if self.labels is not None and not (facts.several and self.labels <= facts.classes):
            raise UserError(
                f"algorithm.labels = {self.labels} makes no sense here.",
                f"There are {facts.classes} classes to name. Nothing was run."
                if facts.several
                else "It is for records that may have several classes; of these each has one. Nothing was run.",
                f"algorithm.labels = {facts.classes}, or fewer" if facts.several else "leave it out",
            )
        if self.labels is not None and (self.confidence is not None or self.publish_cost):
            what = "confidence" if self.confidence is not None else "publish_cost"
            raise UserError(
                f"algorithm.{what} does not go with records that may have several classes.",
                "There is no single winner whose lead could tell how sure an answer is. Nothing was run.",
                "leave it out",
            )

    # ---- what is asked -----------------------------------------------------------------------------

    task: ClassVar[Task]  # by which a client votes on the input "queries" (Q, d)

    @abstractmethod
    def votes(self, terms: Terms, asked: dict[str, Any]) -> NoisyVotes:
        """The mechanism of one round, from what all voting systems have in common."""

    def prepare(self, session: Session) -> None:
        """What clients do before the first vote; nothing leaves them."""

    def part(self, number: int) -> tuple[int, int]:
        """The queries of a round, from ... to."""
        first, last = (self.queries * n // self.rounds for n in (number - 1, number))
        return first, last

    def in_round(self, terms: Terms, number: int) -> NoisyVotes:
        """The votes of a round: sigma = the noise multiplier, in votes."""
        first, last = self.part(number)
        clients, sigma, most = len(terms.facts.size), terms.noise_multiplier, self.answers or self.queries
        asked: dict[str, Any] = {
            "queries": last - first,
            "classes": terms.facts.classes,
            "noise_multiplier": sigma,
            "unit": terms.facts.unit,
            "adjacency": terms.facts.adjacency,
            "answers": min(last - first, most * number // self.rounds - most * (number - 1) // self.rounds),
            "noised_by": Sharers(clients, self.tolerated) if self.noise == "distributed" else None,
            "cost": SmoothedPrice() if self.publish_cost and sigma else None,
            "several": Several(self.labels, clients / 2) if self.labels is not None else None,
        }
        if self.confidence is not None:
            asked |= {"threshold": self.confidence * clients, "threshold_noise": self.check_noise * sigma}
        return self.votes(terms, asked)

    def releases(self, terms: Terms) -> Counter[Mechanism]:
        if terms.size is not None:
            return Counter()
        return Counter(self.in_round(terms, number) for number in range(1, self.rounds + 1))

    # ---- rounds ------------------------------------------------------------------------------------

    def start(self, session: Session) -> State:
        return State(np.zeros((0, *session.model.spec.target), np.int64), session.initial_model("student"), None)

    def round(self, session: Session, state: State) -> State:
        if session.round == 1:
            self.prepare(session)
        first, last = self.part(session.round)
        public = session.public
        votes = session.sum(
            type(self).task, session.cohort(1.0), self.in_round(session.federation_terms, session.round),
            shared={"queries": public[first:last].flatten(1)},
        )  # fmt: skip
        labels = np.concatenate([state.labels, votes["labels"].numpy()])
        cost = (state.cost or 0.0) + float(votes["cost"]) if "cost" in votes else None
        return State(labels, self._student(session, labels), cost)

    def _student(self, session: Session, labels: np.ndarray) -> Tensor:
        """A model of the answered queries, and of all other public records without labels."""
        public, answered = session.public, torch.from_numpy(which_answered(labels))
        x, y = public[: len(labels)][answered], torch.from_numpy(labels)[answered]
        others = torch.cat([public[: len(labels)][~answered], public[len(labels) :]])
        training = StudentTraining(
            steps=self.student_steps, batch_size=self.student_batch, learning_rate=self.student_rate,
            vat_weight=self.vat, vat_radius=self.vat_radius,
        )  # fmt: skip
        start = session.initial_model("student")
        return train_student(session.model, start, x, y, others, training, session.stream("student"))

    def serve(self, facts: Facts, state: State) -> Pick:
        return Pick.same(state.model, facts)

    def voted(self, state: State) -> Voted:
        return Voted(
            state.labels, None if state.cost is None else SmoothedCost(state.cost, SmoothedPrice(), self.rounds)
        )
