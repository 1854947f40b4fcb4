"""The reader of CIFAR-10's pickles: it reads what Python 2 and 3 wrote, and obeys nothing."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairveil.data.pickles import read_batch
from fairveil.errors import UserError

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)
LABELS = [6, 9, 0]


def python2(
    shape: bytes = b"K\x03M\x00\x0c\x86",
    dtype: bytes = b"U\x02u1",
    data: bytes = IMAGES.tobytes(),
    labels: bytes = b"(K\x06K\x09K\x00e",
    order: bytes = b"\x89",
) -> bytes:
    """A batch as cPickle of Python 2 wrote it, protocol 2; parts of it to be replaced."""
    return b"".join(
        [
            b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03U\x06labelsq\x04]q\x05",
            labels,
            b"U\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09",
            b"(K\x01" + shape + b"cnumpy\ndtype\nq\x0a" + dtype + b"K\x00K\x01\x87Rq\x0b",
            b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb" + order,
            b"T" + struct.pack("<i", len(data)) + data + b"tb",
            b"U\x09filenamesr\x0c\x00\x00\x00]q\x0d(U\x05a.pngq\x0eU\x05b.pngq\x0fh\x0eeu.",
        ]
    )


def refused(data: bytes) -> str:
    with pytest.raises(UserError) as error:
        read_batch(data, "data_batch_1")
    assert error.value.what == "data_batch_1 is not a batch of CIFAR-10."
    return error.value.why


def test_as_python_2_wrote_it() -> None:
    images, labels = read_batch(python2(), "data_batch_1")
    assert images.dtype == np.uint8 and images.shape == (3, 3, 32, 32) and labels.tolist() == LABELS
    assert np.array_equal(images, IMAGES.reshape(3, 3, 32, 32))
    before = pickle.loads(python2(), encoding="latin1")  # what everybody reads it with
    assert np.array_equal(before["data"], IMAGES) and before["labels"] == LABELS
    by_column = python2(data=IMAGES.tobytes(order="F"), order=b"\x88")
    assert np.array_equal(pickle.loads(by_column, encoding="latin1")["data"], IMAGES)
    assert np.array_equal(read_batch(by_column, "data_batch_1")[0], images)


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("key", [str, str.encode])
def test_as_python_3_writes_it(protocol: int, key: Any) -> None:
    batch = {key("batch_label"): key("b"), key("labels"): LABELS, key("data"): IMAGES, key("filenames"): [key("a.png")]}
    images, labels = read_batch(pickle.dumps(batch, protocol), "data_batch_1")
    assert np.array_equal(images.reshape(3, 3072), IMAGES) and labels.tolist() == LABELS


class Evil:
    """Pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "executed"


@pytest.mark.parametrize("protocol", range(6))
def test_a_call_is_refused_and_not_made(protocol: int, canary: Path) -> None:
    evil = Evil(os.system, f"touch {canary}")
    for batch in (evil, {"data": evil}, [1, (evil,)]):
        assert "It asks for" in refused(pickle.dumps(batch, protocol))
    assert not canary.exists()


@pytest.mark.parametrize(
    ("program", "named"),
    [
        (b"cos\nsystem\n(U\x04touchtR.", "os.system"),  # without a protocol
        (b"\x80\x02cos\nsystem\nU\x04touch\x85R.", "os.system"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04touch\x85R.", "os.system"),  # STACK_GLOBAL
        (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.", "builtins.eval"),
        (b"\x80\x02c__builtin__\neval\nU\x011\x85R.", "__builtin__.eval"),
        (b"\x80\x02cbuiltins\ngetattr\n(cnumpy\nndarray\nU\x01ttR.", "builtins.getattr"),
        (b"\x80\x02cnumpy\nload\nU\x01x\x85R.", "numpy.load"),
        (b"\x80\x02cnumpy.core.multiarray\nscalar\nU\x01x\x85R.", "numpy.core.multiarray.scalar"),
        (b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__init__\x93.", "numpy.ndarray.__init__"),  # a dotted name
        (b"\x80\x04\x8c\x05numpy\x8c\x0fdtype.__class__\x93.", "numpy.dtype.__class__"),
        (b"\x80\x02c_codecs\ndecode\n.", "_codecs.decode"),
        (b"(ios\nsystem\n.", "INST 'os system'"),
        (b"(U\x04touchcos\nsystem\no.", "OBJ"),
        (b"\x80\x02cnumpy\nndarray\n)\x81.", "NEWOBJ"),
        (b"\x80\x04cnumpy\nndarray\n)}\x92.", "NEWOBJ_EX"),
        (b"\x80\x02\x82\x01.", "EXT1 1"),
        (b"Pos.system\n.", "PERSID 'os.system'"),
        (b"\x80\x02NQ.", "BINPERSID"),
        (b"\x80\x05\x97.", "NEXT_BUFFER"),
        (b"\x80\x05\x96\x01\x00\x00\x00\x00\x00\x00\x00?.", "BYTEARRAY8"),
    ],
)
def test_whatever_a_batch_has_no_need_of_is_refused_by_name(program: bytes, named: str) -> None:
    assert f"asks for {named}" in refused(program)


ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n"
CALL = ARRAY + b"cnumpy\nndarray\nK\x00\x85U\x01b\x87R"


@pytest.mark.parametrize(
    "program",
    [
        CALL + b"}U\x01aK\x01sb",  # a dict as state
        CALL + b"N}U\x05stateK\x01s\x86b",  # attributes to be set
        ARRAY + b"}U\x08__code__K\x01sb",  # a state for the name itself
        ARRAY + b"N}U\x0c__defaults__K\x01s\x86b",
        b"cnumpy\nndarray\nK\x01\x85b",
        b"cnumpy\nndarray\n)R",
        b"cnumpy\ndtype\n)R",
        CALL + CALL + b"\x85R",  # calls what a call gave
        b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R",
        b"c_codecs\nencode\ncnumpy\nndarray\nX\x06\x00\x00\x00latin1\x86R",
        b"c_codecs\nencode\nX\x03\x00\x00\x00\xe2\x82\xacX\x06\x00\x00\x00latin1\x86R",  # not latin-1
        CALL + b"K\x01a",  # appends to a stand-in
        CALL + b"K\x01K\x01s",
        b"K\x01K\x02\x85R",  # calls a number
        b"K\x01K\x02b",
        ARRAY + b"K\x02R",  # arguments that are no tuple
        b"}]K\x01s",  # a list as key
        b"h\x05",  # never put there
        b"0",
        b"e",
        b"R",
        b"",
    ],
)
def test_stand_ins_do_nothing_that_is_asked_of_them(program: bytes) -> None:
    for proto in (b"\x80\x02", b"\x80\x04"):
        refused(proto + program + b".")
        refused(proto + b"}U\x04data" + program + b"s.")
    assert read_batch(python2(), "data_batch_1")[1].tolist() == LABELS  # nothing was changed for the next one


@pytest.mark.parametrize(
    "batch",
    [
        python2(shape=b"K\x02M\x00\x0c\x86"),  # too few rows for the bytes
        python2(shape=b"K\x04M\x00\x0c\x86"),
        python2(shape=b"M\x00\x0cK\x03\x86"),
        python2(shape=b"J\xfd\xff\xff\xffM\x00\x0c\x86"),
        python2(shape=b"K\x03M\x00\x06K\x02\x87"),
        python2(shape=b"K\x00M\x00\x0c\x86", data=b"", labels=b""),
        python2(shape=b"J\xff\xff\xff\x7fM\x00\x0c\x86"),  # 6 TB
        python2(shape=b"\x8a\xff" + b"\x7f" * 255 + b"M\x00\x0c\x86"),
        python2(shape=b"N"),
        python2(dtype=b"U\x02O8"),  # objects
        python2(dtype=b"U\x02u2"),
        python2(dtype=b"K\x01"),
        python2(data=IMAGES.tobytes()[:-1]),
        python2(order=b"N"),
        python2(labels=b"(K\x06K\x09e"),
        python2(labels=b"(K\x06K\x09K\x0ae"),
        python2(labels=b"(K\x06K\x09J\xff\xff\xff\xffe"),
        python2(labels=b"(K\x06K\x09\x88e"),
        python2(labels=b"(K\x06K\x09]e"),
        pickle.dumps({"data": IMAGES.astype(object), "labels": LABELS}, 2),
        pickle.dumps({"data": IMAGES.astype(np.float32), "labels": LABELS}, 4),
        pickle.dumps({"data": IMAGES.tolist(), "labels": LABELS}, 4),
        pickle.dumps({"data": IMAGES}, 4),
        pickle.dumps([IMAGES, LABELS], 4),
        pickle.dumps(IMAGES, 4),
        b"",
        b"not a pickle",
        b"\x80\x63.",
    ],
)
def test_what_is_no_batch(batch: bytes) -> None:
    refused(batch)


def test_every_truncation_is_refused() -> None:
    whole = python2()
    at = whole.index(b"T" + struct.pack("<i", IMAGES.size))
    for end in [*range(at + 20), *range(len(whole) - 60, len(whole))]:
        refused(whole[:end])


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02T\xff\xff\xff\x7fx.",  # texts and bytes of 2 GB and more that are not there
        b"\x80\x02T\xff\xff\xff\xffx.",
        b"\x80\x03B\xff\xff\xff\xffx.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx.",
        b"\x80\x02X\xff\xff\xff\xffx.",
        b"\x80\x02Nr\xff\xff\xff\xff.",  # a place in a table of 32 GB
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",  # a frame of 8 EB
        b"\x80\x02}" + b"K\x00" + b"\x85" * 200_000 + b"K\x00s.",  # a key nested so deeply that hashing it would crash
        b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    ],
)
def test_sizes_that_are_only_claimed(program: bytes) -> None:
    refused(program)


def test_random_damage_is_refused_or_harmless() -> None:
    """A thousand damaged batches: each is either refused or still a batch."""
    random = np.random.default_rng(1)
    whole = python2()
    pixels = range(whole.index(IMAGES.tobytes()), whole.index(IMAGES.tobytes()) + IMAGES.size)
    structure = [at for at in range(len(whole)) if at not in pixels]
    for _ in range(1000):
        damaged = bytearray(whole)
        for at in random.choice(structure, size=3):
            damaged[at] = random.integers(256)
        try:
            images, labels = read_batch(bytes(damaged), "data_batch_1")
        except UserError:
            continue
        assert images.shape == (3, 3, 32, 32) and len(labels) == 3
