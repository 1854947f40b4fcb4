"""The calls of many clients in one envelope, and their replies in another: what a simulation on a cluster sends.

A text (JSON) says who is asked what, and which of the arrays beside it belongs where; what several clients get travels
once. Nothing is pickled. Floats in the text are written so that they come back bit for bit.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from importlib import import_module
from typing import Any, cast

from torch import Tensor

from fairveil import errors
from fairveil.engine.local import Bench
from fairveil.errors import UserError
from fairveil.privacy.mechanisms import ClientMechanism, Mechanism, SumMechanism, canonical, from_canonical
from fairveil.privacy.release import MINT, Kept, Plain, Public, Release, Reply, Share
from fairveil.remote import DTYPES, Envelope
from fairveil.session import Call, Job, Task

# ---- asked -----------------------------------------------------------------------------------------


def question(job: Job, calls: Sequence[Call]) -> Envelope:
    """Some of the calls of a job.

    Raises:
        UserError: a mechanism that is not one of this library's.
    """
    writing = _Writing()
    asked = [
        {
            "client": call.client,
            "each": writing.values(call.each),
            "mechanism": writing.mechanism(call.mechanism),
            "personal": writing.values(call.personal),
            "digest": call.digest.hex(),
        }
        for call in calls
    ]
    task = [job.task.__module__, job.task.__qualname__]
    return writing.envelope(
        "task", {"task": task, "request": job.request, "shared": writing.values(job.shared), "calls": asked}
    )


def check_mechanisms(calls: Sequence[Call]) -> None:
    """Whether a process elsewhere can make these mechanisms of their canonical form.

    Raises:
        UserError: one of them is not of this library.
    """
    for mechanism in {id(call.mechanism): call.mechanism for call in calls}.values():
        if mechanism is not None and _mechanism(canonical(mechanism)) is None:
            raise _foreign(type(mechanism).__qualname__)


def answer(bench: Bench, envelope: Envelope) -> Envelope:
    """Perform what a question asks: the replies, or what went wrong."""
    try:
        reading = _Reading(envelope)
        asked = reading.text
        calls = [
            Call(
                call["client"], reading.values(call["each"]), reading.mechanism(call["mechanism"]),
                cast(Mapping[str, Tensor], reading.values(call["personal"])), bytes.fromhex(call["digest"]),
            )
            for call in asked["calls"]
        ]  # fmt: skip
        job = Job(_task(*asked["task"]), asked["request"], reading.values(asked["shared"]), calls)
        writing = _Writing()
        replies = [
            {
                "client": client,
                **_out(reply.out, writing),
                "keep": None if reply.keep is None else writing.values(reply.keep),
                "diagnostics": writing.values(reply.diagnostics),
            }
            for block in bench.perform(job)
            for client, reply in block
        ]
        return writing.envelope("replies", {"replies": replies})
    except Exception as error:
        return failed(error)


def _task(module: str, name: str) -> Task:
    """Any function of any module: the cluster is the user's own, unlike the client of a federation."""
    return cast(Task, reduce(getattr, name.split("."), import_module(module)))


def _out(out: object, writing: _Writing) -> dict[str, Any]:
    match out:
        case Release():
            by = writing.mechanism(out.mechanism)
            return {"out": "release", "value": writing.values(out.value), "by": by, "digest": out.digest.hex()}
        case Share():
            return {"out": "share", "value": writing.values(out.value), "by": writing.mechanism(out.mechanism)}
        case Public():
            return {"out": "public", "value": writing.values(out.value)}
        case Kept():
            return {"out": "kept"}
    return {"out": "nothing of these", "type": type(out).__name__}


# ---- answered --------------------------------------------------------------------------------------


def replies_of(envelope: Envelope, job: Job, calls: Mapping[int, Call], root: str) -> Iterator[tuple[int, Reply]]:
    """The replies in an answer, as the tasks gave them: releases and shares are minted anew.

    Raises:
        Whatever the task raised.
    """
    if envelope.kind == "failed":
        raise _raised(**json.loads(envelope.text("error")))
    reading = _Reading(envelope)
    for found in reading.text["replies"]:
        call = calls[found["client"]]
        keep = None if found["keep"] is None else cast(Mapping[str, Tensor], reading.values(found["keep"]))
        diagnostics = cast(Mapping[str, float], reading.values(found["diagnostics"]))
        yield call.client, Reply(_minted(found, reading, job, call, root), keep, diagnostics)


def _minted(
    found: Mapping[str, Any], reading: _Reading, job: Job, call: Call, root: str
) -> Release | Share | Public | Kept:
    if found["out"] == "kept":
        return Kept()
    if found["out"] not in ("release", "share", "public"):
        return type(found["type"], (), {})()  # the session refuses it by its name
    value = reading.values(found["value"])
    if found["out"] == "public":
        return Public(value)
    by = reading.mechanism(found["by"])
    if call.mechanism is not None and by == call.mechanism:
        by = call.mechanism
    if found["out"] == "share":
        return Share(cast(Mapping[str, Tensor], value), cast(SumMechanism, by), MINT)
    release = Release(value, cast(ClientMechanism, by), (root, job.request, call.client, call.digest.hex()), MINT)
    # of the values as they were first minted: the session sees whether the task wrote into them since
    object.__setattr__(release, "digest", bytes.fromhex(found["digest"]))
    return release


def failed(error: Exception) -> Envelope:
    """What went wrong, as an answer."""
    kind, arguments = type(error), error.__reduce__()[1]
    if kind.__module__ not in ("builtins", errors.__name__) or not all(isinstance(a, str | int) for a in arguments):
        kind, arguments = RuntimeError, (f"{kind.__name__}: {error}",)
    return Envelope("failed", {"error": json.dumps({"kind": kind.__name__, "arguments": list(arguments)})})


def _raised(kind: str, arguments: Sequence[Any]) -> Exception:
    return cast(Exception, getattr(errors, kind, None) or getattr(builtins, kind))(*arguments)  # type: ignore[operator]


# ---- text and arrays -------------------------------------------------------------------------------


class _Writing:
    """The arrays and mechanisms of an envelope, each of them once."""

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[str, Tensor]] = {}  # held, so that no other takes the identity of one
        self._mechanisms: dict[str, int] = {}
        self._known: dict[int, tuple[int, Mechanism]] = {}

    def values(self, values: Mapping[str, Plain]) -> dict[str, Any]:
        return {name: self._value(name, value) for name, value in values.items()}

    def _value(self, name: str, value: Plain) -> Any:
        if not isinstance(value, Tensor):
            if not isinstance(value, int | float | str | bool):
                raise TypeError(f"{name!r} is a {type(value).__name__}: tensors and plain values only")
            return value
        if value.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise TypeError(f"{name!r} holds {value.dtype}: to and from a cluster travel {known}")
        return {"array": self._arrays.setdefault(id(value), (str(len(self._arrays)), value))[0]}

    def mechanism(self, mechanism: Mechanism | None) -> int | None:
        if mechanism is None:
            return None
        if id(mechanism) not in self._known:
            number = self._mechanisms.setdefault(canonical(mechanism), len(self._mechanisms))
            self._known[id(mechanism)] = number, mechanism
        return self._known[id(mechanism)][0]

    def envelope(self, kind: str, text: Mapping[str, Any]) -> Envelope:
        written = json.dumps({**text, "mechanisms": list(self._mechanisms)})
        return Envelope(kind, {"text": written, **dict(self._arrays.values())})


class _Reading:
    """What `_Writing` wrote."""

    def __init__(self, envelope: Envelope) -> None:
        self.text = json.loads(envelope.text("text"))
        self._arrays = envelope.values

    def values(self, values: Mapping[str, Any]) -> dict[str, Plain]:
        return {
            name: self._arrays[value["array"]] if isinstance(value, dict) else value for name, value in values.items()
        }

    def mechanism(self, number: int | None) -> Mechanism | None:
        if number is None:
            return None
        text = self.text["mechanisms"][number]
        mechanism = _mechanism(text)
        if mechanism is None:
            raise _foreign(json.loads(text).get("type", ""))
        return mechanism


@lru_cache(maxsize=4096)
def _mechanism(text: str) -> Mechanism | None:
    return from_canonical(text)


def _foreign(name: str) -> UserError:
    return UserError(
        f'engine.kind = "ray" does not take the mechanism {name}.',
        "Mechanisms travel to the cluster by name and numbers, and only this library's own can be made of those.",
        'engine.kind = "local"',
    )
