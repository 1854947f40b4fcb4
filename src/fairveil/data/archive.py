"""Where the files of a published dataset come from, and that they are the right ones.

A file is known by its sha256, and what is used is what was hashed. Places are tried in a fixed order: the folder that
the user names, $FAIRVEIL_DATA, where the system keeps such files, the user's cache, and last the official download into
the cache. A file that is there but wrong is an error, never passed over in silence.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fairveil.data.download import NotHad, disk_faults, download
from fairveil.data.federation import Dataset
from fairveil.errors import RunFault, UserError
from fairveil.options import shown

Tell = Callable[[str, int, int | None], None]  # file, bytes there are, bytes there will be (None: unknown)


@dataclass(frozen=True)
class Asset:
    """A published file.

    Attributes:
        name: of the file.
        sha256, size: of its bytes.
        urls: official downloads, tried in order; none: it cannot be had so.
        packed: the file is a gzip, and sha256 and size are those of what is in it: the same data are found compressed
            in more than one way.
    """

    name: str
    sha256: str
    size: int
    urls: tuple[str, ...] = ()
    packed: bool = False

    def read(self, path: Path) -> tuple[bytes, str]:
        """The (uncompressed) bytes at a path, and what is wrong with them; empty: they are those published.

        Never more than one byte too many is read or unpacked.
        """
        try:
            with path.open("rb") as raw, gzip.GzipFile(fileobj=raw) if self.packed else raw as file:
                data = file.read(self.size + 1)
        except (OSError, EOFError, zlib.error) as error:
            return b"", f"it cannot be read: {error}; expected is sha256 {self.sha256}"
        found = hashlib.sha256(data).hexdigest()
        if found == self.sha256:
            return data, ""
        length = f"more than {self.size:,}" if len(data) > self.size else f"{len(data):,}"
        unpacked = "uncompressed " if self.packed else ""
        return b"", f"expected is sha256 {self.sha256} of {self.size:,} {unpacked}bytes, found {found} of {length}"


@dataclass(frozen=True)
class Archive:
    """The files of a dataset.

    Attributes:
        name: of the dataset.
        folder: that holds its files, under $FAIRVEIL_DATA, in the cache, or under a folder that the user names.
        assets: its files.
        records: how many there are in all.
        licence: what the publishers allow.
        source: where the data come from, and how to have them where there is no download; a sentence or two.
        elsewhere: folders where a system keeps these files.
        unpacked: what is in the one file of `assets`; found in its stead, it does as well.
        also: other archives without which this one is of no use.
    """

    name: str
    folder: str
    assets: tuple[Asset, ...]
    records: int
    licence: str
    source: str
    elsewhere: tuple[Path, ...] = ()
    unpacked: tuple[Asset, ...] = ()
    also: tuple[Archive, ...] = ()

    @property
    def cache(self) -> Path:
        """Where downloads are kept."""
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(os.environ.get("FAIRVEIL_CACHE") or Path(base, "fairveil")) / "data" / self.folder

    def find(self, asset: Asset, folder: Path | None = None) -> Path | None:
        """Where the file is; None if nowhere. A folder that is given is the only place to look."""
        if folder is not None:
            places = [folder.expanduser() / self.folder, folder.expanduser()]
        else:
            shared = os.environ.get("FAIRVEIL_DATA")
            places = [Path(shared).expanduser() / self.folder] if shared else []
            places += [*self.elsewhere, self.cache]
        names = dict.fromkeys((asset.name, Path(asset.name).name))  # the folder may be the one it was unpacked into
        return next((at for place in places for name in names if _is_file(at := place / name)), None)

    def files(self, folder: Path | None = None) -> tuple[Asset, ...]:
        """The files to read: the assets, or what was unpacked from them if only that is there."""
        if self.unpacked and not any(self.find(asset, folder) for asset in self.assets):
            return self.unpacked if all(self.find(asset, folder) for asset in self.unpacked) else self.assets
        return self.assets

    def missing(self, folder: Path | None = None) -> bool:
        """Whether a file of it, or of what it needs, is nowhere to be found."""
        return any(one.find(asset, folder) is None for one in (*self.also, self) for asset in one.files(folder))

    def read(self, name: str, folder: Path | None = None) -> bytes:
        """The checked, uncompressed bytes of a file; downloaded if it is missing, unless a folder was given.

        Raises:
            UserError: it is not in the folder given, or there is no download, or a wrong file stands in its place.
            RunFault: it could not be downloaded.
        """
        asset = next(asset for asset in (*self.assets, *self.unpacked) if asset.name == name)
        return self._obtain(asset, folder, self.cache if folder is None else None, None)[1]

    def fetch(self, folder: Path | None = None, tell: Tell | None = None) -> dict[Path, bool]:
        """Download what is missing, into the folder (under its own name there) or else the cache.

        Returns:
            The path of each file, and whether it had to be downloaded.
        """
        done = {path: new for archive in self.also for path, new in archive.fetch(folder, tell).items()}
        into = self.cache
        if folder is not None:
            into = folder.expanduser() if folder.name == self.folder else folder.expanduser() / self.folder
        for asset in self.files(folder):
            path, _, new = self._obtain(asset, folder, into, tell)
            done[path] = new
        return done

    def check(self, folder: Path | None = None) -> list[dict[str, str]]:
        """Of each file, whether it is "ok", "wrong" or "missing", with its place and what is the matter."""
        rows = []
        for asset in self.files(folder):
            path = self.find(asset, folder)
            wrong = asset.read(path)[1] if path else self._how(asset)
            state = "missing" if path is None else "wrong" if wrong else "ok"
            rows.append(
                {"dataset": self.name, "file": asset.name, "state": state, "where": str(path or ""), "note": wrong}
            )
        return rows

    def summary(self) -> dict[str, Any]:
        """How many records, the licence, and where the files are or how they can be had."""
        missing = where = None
        for archive in (self, *self.also):
            for asset in archive.files():
                path = archive.find(asset)
                where = where or (path and str(path.parent))
                missing = missing or (None if path else f"missing; {self._how(asset)}")
        return {"records": self.records, "licence": self.licence, "where": missing or where}

    def _how(self, asset: Asset) -> str:
        return f"fairveil data get {self.name}" if asset.urls else f"by hand: {self.source}"

    def _obtain(
        self, asset: Asset, folder: Path | None, into: Path | None, tell: Tell | None
    ) -> tuple[Path, bytes, bool]:
        """Path and checked bytes of a file, and whether it had to be downloaded; `into` None: it must not be."""
        path = self.find(asset, folder)
        if path is not None:
            data, wrong = asset.read(path)
            if not wrong:
                return path, data, False
            if path.parent != self.cache or not asset.urls:  # the cache is ours to mend, and nothing else
                raise UserError(
                    f"{path} is not the file of {self.name} that was published.",
                    f"{wrong[0].upper()}{wrong[1:]}.\nResults on other data would pass for results on {self.name}.",
                    f"move the file away, and get the right one: {self._how(asset)}",
                )
        if into is None:
            assert folder is not None
            raise UserError(
                f"data.options.folder = {shown(folder)} does not hold {asset.name}.",
                f"It was looked for at {folder.expanduser().absolute()} and in its sub-folder {self.folder}, and "
                "nowhere else,\nbecause a folder was named.",
                f"fairveil data get {self.name} --folder {folder}; or leave out data.options.folder"
                if asset.urls
                else f"put it there ({self.source}); or leave out data.options.folder",
            )
        if not asset.urls:
            raise UserError(
                f"{self.name} needs {asset.name}, which is not on this machine and has no download.",
                self.source,
                f"put the file into {into}; or name its folder: data.options.folder, or FAIRVEIL_DATA for the folder "
                f"that holds {self.folder}/",
            )
        return into / asset.name, self._download(asset, into, tell), True

    def _download(self, asset: Asset, into: Path, tell: Tell | None) -> bytes:
        """The checked bytes of a file that is put into a folder, whole or not at all, by one process at a time."""
        target, part = into / asset.name, into / f"{asset.name}.part"
        with disk_faults(into):
            into.mkdir(parents=True, exist_ok=True)
            lock = (into / f"{asset.name}.lock").open("w")
        with lock:
            with disk_faults(into):  # not every disk over a network has locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            data, wrong = asset.read(target)
            if not wrong:
                return data  # another process was first
            faults = []
            for url in asset.urls:
                try:
                    # Gzip adds less than a hundredth, however little there is to gain.
                    most = asset.size + (asset.size // 100 + 1024 if asset.packed else 0)
                    data = download(url, part, asset.read, most, lambda *at: tell(asset.name, *at) if tell else None)
                except NotHad as error:
                    faults.append(f"{url}: {error}")
                    continue
                with disk_faults(target):
                    with part.open("rb") as file:
                        os.fsync(file.fileno())
                    part.replace(target)
                return data
        raise RunFault(
            f"{self.name}: {asset.name} could not be downloaded.\n  "
            + "\n  ".join(faults)
            + f"\n  Try again later (it goes on where it broke off), or put the file into {into} by hand.\n"
            f"  {self.source}"
        )


class Stored(Dataset):
    """A dataset that is a set of published files.

    Attributes:
        archive: which files, and where they come from.
        folder: that holds the files, or holds the folder that does; nowhere else is looked, and nothing downloaded.
            None: $FAIRVEIL_DATA, the system, the cache, else the official download.
    """

    archive: ClassVar[Archive]
    folder: Path | None = None

    def file(self, name: str) -> bytes:
        """The checked, uncompressed bytes of a file of the archive."""
        return self.archive.read(name, self.folder)


def stored(datasets: Mapping[str, type[Dataset]]) -> dict[str, type[Stored]]:
    """Those of the datasets that are files, by name."""
    return {name: cls for name, cls in sorted(datasets.items()) if issubclass(cls, Stored)}


def archive_of(name: str, dataset: type[Dataset]) -> Archive:
    """The archive of a dataset; raises if it has none."""
    if issubclass(dataset, Stored):
        return dataset.archive
    raise UserError(
        f"{name} is not a set of published files.",
        "It is generated, comes with the program or is a file of your own: there is nothing to get or to check.",
        "fairveil data list",
    )


def check_all(archives: Iterable[Archive], folder: Path | None = None) -> list[dict[str, str]]:
    """What `check` finds in each archive and in those it needs, each once."""
    each = dict.fromkeys(one for archive in archives for one in (*archive.also, archive))
    return [row for archive in each for row in archive.check(folder)]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a folder that one may not look into
        return False
