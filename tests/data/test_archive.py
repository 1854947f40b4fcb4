"""Published files: the order of places, checksums, and what the commands ask."""

from __future__ import annotations

import gzip
import hashlib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from fairveil.data.archive import Archive, Asset, Stored, archive_of, check_all, stored
from fairveil.data.datasets import DATASETS, Digits
from fairveil.data.federation import Pool
from fairveil.data.images import Cifar10, Cifar10Subset, FashionMnist, Mnist, Usps
from fairveil.data.natural import OfficeCaltech, QmnistWriters, Vehicle
from fairveil.errors import UserError

CONTENT = np.random.default_rng(0).bytes(300_000)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def asset(content: bytes = CONTENT, name: str = "set.bin", urls: tuple[str, ...] = (), packed: bool = False) -> Asset:
    return Asset(name, sha256(content), len(content), urls, packed)


def archive(*assets: Asset, elsewhere: tuple[Path, ...] = (), unpacked: tuple[Asset, ...] = ()) -> Archive:
    return Archive("things", "things_v1", assets, 3, "CC0", "Ask the authors.", elsewhere, unpacked)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own, and no shared data."""
    monkeypatch.setenv("FAIRVEIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FAIRVEIL_DATA", raising=False)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "data" / "things_v1"


def put(path: Path, content: bytes = CONTENT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_places_in_order(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = tmp_path / "system"
    things = archive(asset(), elsewhere=(system,))
    monkeypatch.setenv("FAIRVEIL_DATA", str(tmp_path / "shared"))
    assert things.find(things.assets[0]) is None
    for place in (cache, system, tmp_path / "shared" / "things_v1"):  # each goes before those that are there already
        at = put(place / "set.bin")
        assert things.find(things.assets[0]) == at and things.read("set.bin") == CONTENT
    for folder in (tmp_path / "root" / "things_v1", tmp_path / "own"):
        at = put(folder / "set.bin")
        given = folder.parent if folder.name == "things_v1" else folder
        assert things.find(things.assets[0], given) == at and things.read("set.bin", given) == CONTENT


def test_a_folder_that_is_named_is_the_only_place(tmp_path: Path, cache: Path) -> None:
    things = archive(asset())
    put(cache / "set.bin")
    for folder in (tmp_path, tmp_path / "no-such-folder", cache / "set.bin"):
        assert things.find(things.assets[0], folder) is None
        with pytest.raises(UserError) as error:
            things.read("set.bin", folder)
        assert error.value.what == f'data.options.folder = "{folder}" does not hold set.bin.'
        assert "nowhere else" in error.value.why and "Ask the authors" in error.value.fix
    with pytest.raises(UserError) as error:
        archive(asset(urls=("http://127.0.0.1/",))).read("set.bin", tmp_path)
    assert error.value.fix.startswith(f"fairveil data get things --folder {tmp_path}")


def test_a_file_without_a_download_says_how_it_can_be_had(cache: Path) -> None:
    with pytest.raises(UserError) as error:
        archive(asset()).read("set.bin")
    assert "set.bin" in error.value.what and error.value.why == "Ask the authors." and str(cache) in error.value.fix


@pytest.mark.parametrize("change", [lambda data: data[:-1] + b"?", lambda data: data[:-1], lambda data: data + b"?"])
def test_a_wrong_file_is_never_passed_over(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, change: object
) -> None:
    wrong = change(CONTENT)  # type: ignore[operator]
    monkeypatch.setenv("FAIRVEIL_DATA", str(tmp_path / "shared"))
    system = tmp_path / "system"
    things = archive(asset(urls=("http://127.0.0.1:1/",)), elsewhere=(system,))
    put(cache / "set.bin")
    for place, folder in ((system, None), (tmp_path / "shared" / "things_v1", None), (tmp_path / "own",) * 2):
        at = put(place / "set.bin", wrong)
        with pytest.raises(UserError) as error:
            things.read("set.bin", folder)
        assert str(at) in error.value.what and sha256(CONTENT) in error.value.why
        assert sha256(wrong) in error.value.why
        assert at.read_bytes() == wrong
        with pytest.raises(UserError):
            things.fetch(folder)
        assert [row["state"] for row in things.check(folder)] == ["wrong"]


def test_gzip_is_checked_by_what_is_in_it(cache: Path) -> None:
    things = archive(asset(name="set.gz", packed=True))
    for level in (1, 9):  # the same data, compressed in two ways
        put(cache / "set.gz", gzip.compress(CONTENT, level))
        assert things.read("set.gz") == CONTENT
    good = gzip.compress(CONTENT)
    for bad in (CONTENT, good[:-9], good[:-4] + b"????", good + b"?", b""):
        put(cache / "set.gz", bad)
        with pytest.raises(UserError, match=r"set\.gz is not the file of things"):
            things.read("set.gz")


def test_a_gzip_bomb_is_not_unpacked(cache: Path) -> None:
    at = put(cache / "set.gz", gzip.compress(bytes(1 << 26)))  # 64 MB of zeros
    tracemalloc.start()
    data, wrong = asset(name="set.gz", packed=True).read(at)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert data == b"" and "more than 300,000" in wrong and peak < 2_000_000


def test_what_was_unpacked_does_as_well(tmp_path: Path) -> None:
    packed, parts = asset(name="set.tar.gz"), tuple(asset(bytes([n]), f"inside/part_{n}") for n in (1, 2))
    things = archive(packed, unpacked=parts)
    assert things.files(tmp_path) == (packed,)
    put(tmp_path / "inside/part_1", b"\x01")
    assert things.files(tmp_path) == (packed,)  # not all of it
    put(tmp_path / "inside/part_2", b"\x02")
    for folder in (tmp_path, tmp_path / "inside"):  # the folder above it, or itself
        assert things.files(folder) == parts and things.read("inside/part_2", folder) == b"\x02"
    put(tmp_path / "set.tar.gz")
    assert things.files(tmp_path) == (packed,)


def test_a_corrupt_file_in_the_cache_without_a_download(cache: Path) -> None:
    put(cache / "set.bin", b"rot")
    with pytest.raises(UserError, match="is not the file of things"):
        archive(asset()).read("set.bin")


def test_check_and_summary(tmp_path: Path, cache: Path) -> None:
    good, bad, gone = asset(), asset(b"b", "bad.bin"), asset(b"c", "gone.bin", urls=("http://127.0.0.1:1/",))
    things = archive(good, bad, gone)
    put(cache / "set.bin")
    put(cache / "bad.bin", b"x")
    rows = check_all([things, things])
    assert [(row["file"], row["state"]) for row in rows] == [
        ("set.bin", "ok"),
        ("bad.bin", "wrong"),
        ("gone.bin", "missing"),
    ]
    assert rows[0]["where"] == str(cache / "set.bin") and sha256(b"x") in rows[1]["note"]
    assert rows[2]["note"] == "fairveil data get things"
    assert things.summary() == {"records": 3, "licence": "CC0", "where": "missing; fairveil data get things"}
    assert archive(asset(b"d", "d.bin")).summary()["where"] == "missing; by hand: Ask the authors."
    assert archive(good).summary()["where"] == str(cache)
    above = Archive("more", "more", (), 1, "CC0", "Theirs.", also=(things,))
    assert above.summary()["where"] == "missing; fairveil data get more"
    assert check_all([above, things]) == rows  # each archive once


class Things(Stored):
    """Things."""

    archive = archive(asset())

    def load(self, seed: int) -> Pool:
        raise NotImplementedError


def test_which_datasets_are_files() -> None:
    assert list(stored({"things": Things, "digits": Digits})) == ["things"]
    assert archive_of("things", Things) is Things.archive
    with pytest.raises(UserError, match="digits is not a set of published files"):
        archive_of("digits", Digits)


def test_every_archive_is_well_formed() -> None:
    here = (Mnist, FashionMnist, Cifar10, Cifar10Subset, Usps, QmnistWriters, Vehicle, OfficeCaltech)
    known = {cls.archive.name: cls for cls in here} | stored(DATASETS)
    for name, cls in known.items():
        assert cls.archive.name == name and cls.archive.source.endswith(".") and cls.archive.licence
        for one in (*cls.archive.assets, *cls.archive.unpacked):
            assert len(bytes.fromhex(one.sha256)) == 32 and one.size > 0
            assert one.name.endswith(".gz") or not one.packed
            assert all(url.startswith(("https://", "http://")) and url.endswith(one.name) for url in one.urls)
