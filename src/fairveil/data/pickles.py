"""The batches of CIFAR-10, which are pickles, read without running anything that they ask for.

A pickle is a program. This one may do no more than build numbers, texts, lists, tuples and dicts. The three names that
an array is made with stand for objects of our own that only keep what they are given; the array is then made here,
from bytes whose type, shape and number were checked. Any other name, and any other instruction, is refused.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

import numpy as np

from fairveil.errors import UserError

COLUMNS = 3 * 32 * 32  # of an image: 1,024 red values row by row, then green, then blue
ARRAY_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): "maker",
    ("numpy._core.multiarray", "_reconstruct"): "maker",
    ("numpy", "ndarray"): "class",
    ("numpy", "dtype"): "type",
    ("_codecs", "encode"): "bytes",  # how Python 3 writes bytes for Python 2
}
CONTAINERS = {"EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE"}
INSTRUCTIONS = CONTAINERS | {
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
    "BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
    "APPEND", "APPENDS", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET",
    "GLOBAL", "STACK_GLOBAL", "BUILD",
}  # fmt: skip
MOST_CONTAINERS = 100  # a batch has about ten; what is nested deeply could overflow the interpreter's stack


def read_batch(data: bytes, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 3, 32, 32) uint8 and labels (n,) int64 of a batch.

    Args:
        data: the file.
        name: of the file, for the error.

    Raises:
        UserError: it asks for something that a batch has no need of, or is no batch. Nothing was run.
    """
    try:
        _inspect(data, name)
        batch = _Reader(data, name).load()
        if type(batch) is not dict:
            raise ValueError(f"it holds a {type(batch).__name__}, not a dict")
        images, labels = (batch.get(key, batch.get(key.encode())) for key in ("data", "labels"))
        pixels = _pixels(images)
        return pixels.reshape(-1, 3, 32, 32), _labels(labels, len(pixels))
    except UserError:
        raise
    except Exception as error:  # a broken pickle fails in any way there is
        raise _refused(name, f"it cannot be read: {type(error).__name__}: {str(error)[:200]}") from error


def _inspect(data: bytes, name: str) -> None:
    """Refuse what a batch has no need of, and sizes that are claimed but not there, before any of it is obeyed."""
    containers = 0
    for opcode, argument, _ in pickletools.genops(data):
        containers += opcode.name in CONTAINERS
        if opcode.name not in INSTRUCTIONS or containers > MOST_CONTAINERS:
            raise _refused(name, f"it asks for {opcode.name} {'' if argument is None else repr(argument)[:80]}".strip())
        if opcode.name == "LONG_BINPUT" and (not isinstance(argument, int) or argument > len(data)):
            raise _refused(name, f"it numbers a value {argument:,}, for which memory would be set aside")


class _Reader(pickle.Unpickler):
    """An unpickler that knows the names of an array only, and has stand-ins for them."""

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self.name = name

    def find_class(self, module: str, name: str) -> _StandIn:
        """A stand-in, never the thing itself."""
        if (module, name) not in ARRAY_NAMES:
            raise _refused(self.name, f"it asks for {module}.{name}")
        return _StandIn(ARRAY_NAMES[module, name])

    def persistent_load(self, pid: object) -> None:
        """There is nothing outside the file."""
        raise _refused(self.name, f"it asks for {pid!r}")


class _StandIn:
    """What a name, or a call of it, is in a batch: it keeps what it is given, and does nothing."""

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: str, arguments: tuple[Any, ...] = ()) -> None:
        self.kind, self.arguments = kind, arguments
        self.state: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> _StandIn | bytes:
        if self.kind in ("maker", "type") and not self.arguments and arguments:
            return _StandIn(self.kind, arguments)
        if self.kind == "bytes" and len(arguments) == 2 and type(arguments[0]) is str and arguments[1] == "latin1":
            return arguments[0].encode("latin-1")
        raise ValueError(f"the {self.kind} of an array is called as numpy would not")

    def __setstate__(self, state: Any) -> None:  # without it the unpickler would set attributes
        if not self.arguments or self.state or type(state) is not tuple:
            raise ValueError(f"the {self.kind} of an array is given a state as numpy would not")
        self.state = state


def _pixels(array: Any) -> np.ndarray:
    """(n, 3072) uint8, from what numpy wrote of an array: version, shape, type, whether column by column, bytes."""
    if type(array) is not _StandIn or array.kind != "maker":
        raise ValueError("the images are not an array")
    _, (rows, columns), dtype, by_column, data = array.state
    if type(dtype) is not _StandIn or dtype.kind != "type" or dtype.arguments[0] not in ("u1", b"u1"):
        raise ValueError("the images are not of unsigned bytes")
    if type(data) is not bytes or type(by_column) is not bool:
        raise ValueError("the images are not written as bytes in a known order")
    if columns != COLUMNS or type(rows) is not int or rows < 1 or len(data) != rows * COLUMNS:
        raise ValueError(f"the images are {len(data):,} bytes, which is not (n, {COLUMNS})")
    return np.frombuffer(data, np.uint8).reshape(rows, COLUMNS, order="F" if by_column else "C")


def _labels(labels: Any, count: int) -> np.ndarray:
    """(n,) int64, one for each image."""
    if type(labels) is not list or len(labels) != count or any(type(y) is not int or not 0 <= y < 10 for y in labels):
        raise ValueError(f"the labels are not {count:,} numbers from 0 to 9")
    return np.array(labels, dtype=np.int64)


def _refused(name: str, why: str) -> UserError:
    return UserError(
        f"{name} is not a batch of CIFAR-10.",
        f"{why[0].upper()}{why[1:]}.\nA pickle can run any program; nothing in it was run.",
        "get the published file: fairveil data get cifar10",
    )
