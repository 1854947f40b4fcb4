"""What may be asked of a client on another machine, and the envelope in which it travels.

A task travels by name. It is found among those that the client itself has loaded, never imported because a message says
so, and only if it says beforehand which mechanism it answers by and which inputs it takes: a client checks these before
anything is computed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from fairveil.privacy.choice import PrivateChoice
from fairveil.privacy.mechanisms import ClientMechanism, Mechanism
from fairveil.privacy.release import Plain
from fairveil.session import Task

DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool)
MOST = 10**9  # of what is counted
LARGEST = 1e3  # of an input: with weights of 1e8 rounding alone moves a sum of clipped gradients beyond its bound


class Malformed(Exception):
    """A message that is not what it should be. The words say nothing of records, and may be sent."""


@dataclass(frozen=True)
class Envelope:
    """A message between a server and a client: a word that says what it is, and named arrays and plain values."""

    kind: str
    values: Mapping[str, Plain] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """In bytes, about."""
        total = sum(map(len, self.values))
        for value in self.values.values():
            total += value.nbytes if isinstance(value, Tensor) else len(value) if isinstance(value, str) else 8
        return total

    def under(self, prefix: str) -> dict[str, Plain]:
        """The values whose names begin so, by the rest of their names."""
        return {name.removeprefix(prefix): v for name, v in self.values.items() if name.startswith(prefix)}

    def text(self, name: str) -> str:
        """A value that must be there and a text."""
        value = self.values.get(name)
        if not isinstance(value, str):
            raise Malformed(f"{name!r} must be a text")
        return value


@dataclass(frozen=True)
class Array:
    """An input that is a tensor.

    Attributes:
        shape: "p" is the number of the model's parameters, "f" that of the numbers in a record; another letter is any
            length, the same wherever it stands.
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Count:
    """An input that is a whole number from 1 on: of passes, or of records in a batch."""


@dataclass(frozen=True)
class Positive:
    """An input that is a number above 0. A task may divide by it: what fails must not depend on the records.

    Attributes:
        zero: whether it may be 0 as well.
    """

    zero: bool = False


@dataclass(frozen=True)
class Deployable:
    """A task that may travel.

    Attributes:
        by: the kind of mechanism it answers by; None: it keeps everything to itself.
        inputs: what it takes: a tensor, a count, a number above 0, or a plain value of this type.
        optional: which of them may be left out.
        together: which of these are left out all, or none.
        needs: what it must find in the client's personal state.
        prepares: it is done on the records as they are, before these are standardised.
    """

    task: Task
    by: type | None
    inputs: Mapping[str, Array | Count | Positive | type]
    optional: frozenset[str]
    together: frozenset[str]
    needs: frozenset[str]
    prepares: bool

    def answers_by(self, mechanism: Mechanism) -> bool:
        """Whether this is a mechanism of its kind: that very one, since what is derived from it has another price.

        Of an abstract kind there is nothing but what is derived from it.
        """
        if self.by is None:
            return False
        return isinstance(mechanism, self.by) if inspect.isabstract(self.by) else type(mechanism) is self.by

    def check(
        self, given: Mapping[str, Plain], *, parameters: int, record: int, tokens: int | None = None
    ) -> None:  # fmt: skip
        """Whether these inputs are what the task takes, all numbers within ±LARGEST.

        Records ("f") may hold any finite number: a client's own do, and votes on them are bounded whatever they are.

        Args:
            parameters: of the model.
            record: how many numbers a record has.
            tokens: if they are those of words, how many words there are.

        Raises:
            Malformed: they are not, and why.
        """
        missing = self.inputs.keys() - self.optional - given.keys()
        if missing or given.keys() - self.inputs.keys():
            raise Malformed(f"it takes the inputs {sorted(self.inputs)}, not {sorted(given)}")
        if self.together & given.keys() and self.together - given.keys():
            raise Malformed(f"the inputs {sorted(self.together)} go together")
        lengths: dict[str, int] = {"p": parameters, "f": record}
        for name, value in given.items():
            wanted = self.inputs[name]
            if isinstance(wanted, Array):
                shape = tuple(value.shape) if isinstance(value, Tensor) else None
                if shape is None or len(shape) != len(wanted.shape):
                    raise Malformed(f"the input {name!r} has the wrong shape: {shape}")
                if value.dtype != wanted.dtype:  # type: ignore[union-attr]
                    raise Malformed(f"the input {name!r} has the wrong type: {value.dtype}")  # type: ignore[union-attr]
                for length, place in zip(shape, wanted.shape, strict=True):
                    expected = lengths.setdefault(place, length) if isinstance(place, str) else place
                    if length != expected or not length:
                        raise Malformed(f"the input {name!r} has the wrong shape: {shape}, and {place} is {expected}")
            elif isinstance(wanted, Count):
                if type(value) is not int or not 1 <= value <= MOST:
                    raise Malformed(f"the input {name!r} must be a whole number from 1 to {MOST:,}")
            elif isinstance(wanted, Positive):
                if type(value) is not float or not (value > 0 or (wanted.zero and value == 0)):
                    raise Malformed(f"the input {name!r} must be a number above 0{' or 0' if wanted.zero else ''}")
            elif type(value) is not wanted:
                raise Malformed(f"the input {name!r} must be a {wanted.__name__}, not a {type(value).__name__}")
        check_finite(given)
        for name, value in given.items():
            wanted = self.inputs[name]
            if isinstance(value, Tensor) and isinstance(wanted, Array) and wanted.shape[-1] == "f":
                if tokens is not None and not ((value >= 0) & (value < tokens) & (value == value.round())).all():
                    raise Malformed(f"the input {name!r} holds what is no number of a word")
                continue
            if isinstance(value, Tensor) and value.is_floating_point():
                largest = float(value.abs().max())
            else:
                largest = abs(value) if isinstance(value, float) else 0.0
            if largest > LARGEST:
                raise Malformed(f"the input {name!r} holds {largest:g}, beyond {LARGEST:g}")


def check_finite(values: Mapping[str, Plain]) -> None:
    """Whether all numbers are finite.

    Raises:
        Malformed: one of them is not.
    """
    for name, value in values.items():
        finite = bool(value.isfinite().all()) if isinstance(value, Tensor) else True
        if isinstance(value, float):
            finite = math.isfinite(value)
        if not finite:
            raise Malformed(f"{name!r} holds NaN or an infinite value")


def check_release(values: Mapping[str, Plain], mechanism: ClientMechanism, inputs: Mapping[str, Plain]) -> None:
    """Whether values that came as a release have the names, types and shapes that one has, and are finite.

    Raises:
        Malformed: they have not.
    """

    def kind(value: Plain) -> tuple[object, ...]:
        return (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else (type(value),)

    found, wanted = ({name: kind(v) for name, v in many.items()} for many in (values, mechanism.nothing(inputs)))
    if found != wanted:
        raise Malformed(f"{found} came, and not {wanted}")
    check_finite(values)
    if isinstance(mechanism, PrivateChoice) and not 0 <= values["choice"] < len(inputs["models"]):  # type: ignore
        raise Malformed(f"model {values['choice']} was chosen, which there is not")


DEPLOYABLE: dict[str, Deployable] = {}  # by name, as far as modules are loaded

T = TypeVar("T", bound=Task)


def deployable(
    *, by: type | None = None, optional: tuple[str, ...] = (), together: tuple[str, ...] = (),
    needs: tuple[str, ...] = (), prepares: bool = False, **inputs: Array | Count | Positive | type,
) -> Callable[[T], T]:  # fmt: skip
    """Say of a task what it takes, so that it may run on a client's own machine."""

    def register(task: T) -> T:
        optionally, personal = frozenset(optional) | frozenset(together), frozenset(needs)
        DEPLOYABLE[name_of(task)] = Deployable(task, by, inputs, optionally, frozenset(together), personal, prepares)
        return task

    return register


def name_of(task: Task) -> str:
    """By which a task is known in messages and policies: a user's own with its module."""
    own = task.__module__.partition(".")[0] != "fairveil"
    return f"{task.__module__}:{task.__qualname__}" if own else task.__qualname__
