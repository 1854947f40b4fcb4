"""What travels: everything that can be sent comes back as it was, and whatever else comes is refused."""

from __future__ import annotations

import io
import math
import struct
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.supercore.inflatable import inflatable_utils as parts
from hypothesis import given, settings
from hypothesis import strategies as st

from fairveil.engine.flower import SMALL, Patience, Roll, packed, unpacked
from fairveil.privacy.release import Plain, digest_values
from fairveil.remote import DTYPES, Envelope, Malformed

HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }"
KIND = ConfigRecord({"kind": "task"})
LARGE = SMALL // 4 + 1  # numbers of an array that travels by itself


def through(envelope: Envelope) -> Envelope:
    """There and back, as bytes in between."""
    return unpacked(RecordDict.inflate(*_deflated(packed(envelope))))


def _deflated(records: RecordDict) -> tuple[bytes, dict[str, Any]]:
    children = records.children or {}
    return records.deflate(), {key: type(child).inflate(*_deflated_child(child)) for key, child in children.items()}


def _deflated_child(child: Any) -> tuple[bytes, dict[str, Any] | None]:
    below = child.children
    if not below:
        return child.deflate(), None
    return child.deflate(), {key: type(one).inflate(*_deflated_child(one)) for key, one in below.items()}


def same(one: Plain, other: Plain) -> bool:
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.shape == other.shape
    return type(one) is type(other) and digest_values({"it": one}) == digest_values({"it": other})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (2, 0), (2, 3), (2, 1, 3)])
def test_tensors_arrive_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    bits = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)  # NaN with any payload too
    value = (bits % 2).bool().view(shape) if dtype == torch.bool else bits.view(dtype).view(shape)
    arrived = through(Envelope("task", {"it": value}))
    assert arrived.kind == "task" and same(arrived.values["it"], value)


def test_large_tensors_travel_by_themselves() -> None:
    values: dict[str, Plain] = {
        "large": torch.randn(LARGE),
        "small": torch.randn(3),
        "text": "it",
        "same": torch.ones(2),
    }
    records = packed(Envelope("task", values))
    assert list(records["arrays"]) == ["large"]  # type: ignore[arg-type]
    arrived = through(Envelope("task", values)).values
    assert arrived.keys() == values.keys() and all(same(arrived[name], value) for name, value in values.items())


def test_tensors_that_lie_in_pieces_arrive_whole() -> None:
    whole = torch.arange(12.0).view(3, 4)
    for value in (whole.T, whole[:, 1], whole[::2], whole.expand(2, 3, 4)):
        assert same(through(Envelope("task", {"it": value})).values["it"], value.contiguous())


NAMES = st.text(st.characters(codec="utf-8"), max_size=20)
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats() | st.booleans()


@settings(max_examples=60, deadline=None)
@given(kind=NAMES, values=st.dictionaries(NAMES, NUMBERS | NAMES, max_size=5))
def test_plain_values_arrive_with_their_types(kind: str, values: dict[str, Plain]) -> None:
    arrived = through(Envelope(kind, values))
    assert arrived.kind == kind and arrived.values.keys() == values.keys()
    assert all(same(arrived.values[name], value) for name, value in values.items())


# ---- what is no envelope ---------------------------------------------------------------------------


def holding(data: bytes) -> list[RecordDict]:
    """Envelopes with one array of these bytes, with the plain values or by itself."""
    array = Array(dtype="float32", shape=(1,), stype="numpy.ndarray", data=data)
    inside = ConfigRecord({"kind": "task", "@it": data})
    return [RecordDict({"envelope": inside}), RecordDict({"envelope": KIND, "arrays": ArrayRecord({"it": array})})]


def npy(header: str, data: bytes = b"\0\0\0\0", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode("latin1") + b"\n"
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text + data


def saved(value: Any, **how: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, value, **how)
    return stream.getvalue()


def zipped() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, it=np.zeros(1, np.float32))
    return stream.getvalue()


def header(**other: Any) -> str:
    return repr({"descr": "<f4", "fortran_order": False, "shape": (1,)} | other)


HOSTILE = {
    "nothing": b"",
    "a pickle": saved(np.array([{}], object), allow_pickle=True),
    "a pickle by its header": npy(header(descr="|O")),
    "npz": zipped(),
    "cut short": npy(HEADER, b"\0\0\0"),
    "too long": npy(HEADER, b"\0" * 5),
    "cut in its header": npy(HEADER)[:20],
    "another version": npy(HEADER, version=b"\x02\x00"),
    "Fortran order": saved(np.asfortranarray(np.ones((2, 2), np.float32))),
    "more than there is": npy(header(shape=(10**12,))),
    "more than can be": npy(header(shape=(10**30, 0)), b""),
    "negative": npy(header(shape=(-1, -1))),
    "negative and empty": npy(header(shape=(-1, 0)), b""),
    "no shape": npy(header(shape="a")),
    "other byte order": npy(header(descr=">f4")),
    "text": npy(header(descr="<U1")),
    "dates": npy(header(descr="<M8[s]"), b"\0" * 8),
    "records": npy(header(descr=[("a", "<f4")])),
    "nothing in each": npy(header(descr="|V0", shape=(3,)), b""),
    "half precision": saved(np.ones(2, np.float16)),
    "bytes": saved(np.ones(4, np.uint8)),
    "complex": saved(np.ones(1, np.complex64)),
    "an open bracket": npy("{'descr': '<f4', ("),
    "an open string": npy("'''"),
    "odd indents": npy("\n  x\n y"),
    "of Python 2": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1L,), }"),
    "a call": npy("__import__('os').getcwd()"),
    "deep": npy("(" * 3000),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_arrays_that_are_not_plain_numbers_are_refused(what: str) -> None:
    for records in holding(HOSTILE[what]):
        with pytest.raises(Malformed, match="array 'it'"):
            unpacked(records)


def test_an_array_of_another_library_is_refused() -> None:
    array = Array(dtype="float32", shape=(1,), stype="torch.Tensor", data=npy(HEADER))
    with pytest.raises(Malformed, match="cannot be read"):
        unpacked(RecordDict({"envelope": KIND, "arrays": ArrayRecord({"it": array})}))


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=60), at=st.integers(0, 80), cut=st.integers(0, 40))
def test_no_bytes_whatever_do_more_than_be_refused(data: bytes, at: int, cut: int) -> None:
    """Nor those of an array with some of them overwritten."""
    whole = npy(HEADER)
    for hostile in (data, whole[:at] + data + whole[at + cut :]):
        for records in holding(hostile):
            try:
                arrived = unpacked(records).values["it"]
            except Malformed:
                continue
            assert isinstance(arrived, torch.Tensor) and arrived.dtype in DTYPES and arrived.nbytes <= len(hostile)


NO_ENVELOPES = {
    "empty": {},
    "a record more": {"envelope": KIND, "arrays": ArrayRecord({}), "more": ConfigRecord({})},
    "a record less": {"arrays": ArrayRecord({})},
    "metrics for plain values": {"envelope": MetricRecord({"kind": 1.0})},
    "values for arrays": {"envelope": KIND, "arrays": ConfigRecord({})},
    "no word": {"envelope": ConfigRecord({})},
    "a number for a word": {"envelope": ConfigRecord({"kind": 3})},
    "bytes for a value": {"envelope": ConfigRecord({"kind": "task", "=it": b"x"})},
    "a value for bytes": {"envelope": ConfigRecord({"kind": "task", "@it": 1})},
    "a list": {"envelope": ConfigRecord({"kind": "task", "=it": [1.0]})},
    "no mark": {"envelope": ConfigRecord({"kind": "task", "it": 1})},
    "no name": {"envelope": ConfigRecord({"kind": "task", "": 1})},
}


@pytest.mark.parametrize("what", NO_ENVELOPES)
def test_what_is_no_envelope_is_refused(what: str) -> None:
    with pytest.raises(Malformed):
        unpacked(RecordDict(NO_ENVELOPES[what]))


def test_one_name_for_two_things_is_refused() -> None:
    small, large = (packed(Envelope("task", {"it": torch.zeros(n)})) for n in (1, LARGE))
    plain = ConfigRecord({**small["envelope"], "=it": 1})  # type: ignore[dict-item]
    for records in ({"envelope": plain}, {"envelope": small["envelope"], "arrays": large["arrays"]}):
        with pytest.raises(Malformed):
            unpacked(RecordDict(records))


def test_a_message_that_is_too_large_is_refused_before_it_is_read() -> None:
    records = packed(Envelope("task", {"it": torch.zeros(1000)}))
    assert unpacked(records, largest=5000).values["it"].shape == (1000,)  # type: ignore[union-attr]
    with pytest.raises(Malformed, match="larger than 3,000"):
        unpacked(records, largest=3000)


def test_an_answer_of_which_parts_never_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is killed while it sends: Flower would wait for two hours, and the run with it."""
    usual = dict(parts.pull_objects.__kwdefaults__)
    monkeypatch.setattr(parts.pull_objects, "__kwdefaults__", usual | {"initial_backoff": 0.05})

    def never(number: str) -> bytes:
        raise parts.ObjectUnavailableError(number)

    assert list(Roll(SimpleNamespace(get_nodes=list)).ask({}, Patience(0.4, 1, 1))) == []  # type: ignore
    started = time.monotonic()
    with pytest.raises(parts.ObjectPullError):
        parts.pull_objects(["a part"], never)
    assert 0.3 < time.monotonic() - started < 5
