"""Which code made a result: the commit it was run from, and the versions of what the numbers depend on."""

from __future__ import annotations

import hashlib
import shlex
import subprocess
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("fairveil", "torch", "numpy", "dp-accounting")


def versions() -> dict[str, str]:
    """The packages that decide a result."""
    return {package: version(package) for package in PACKAGES}


def published(fingerprint: str) -> str:
    """A mark by which equal data are known to be equal. The fingerprint itself is part of the key to the noise."""
    return hashlib.sha256(f"published {fingerprint}".encode()).hexdigest()[:16]


def commit(package: Path = Path(__file__).parent) -> str:
    """The commit of a checkout that tracks this package, "-dirty" if the package was changed since; else "none".

    An installed package may lie inside the checkout of some other project, whose commit would say nothing.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(package), *arguments], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return "none"
    changed = git("status", "--porcelain", "--", ".")
    return f"{git('rev-parse', 'HEAD')}{'-dirty' if changed else ''}"


def resume_command(folder: Path) -> str:
    """How to go on with a run: on this machine, or on the federation to which it was submitted."""
    quoted = shlex.quote(str(folder))
    if (folder / "submission.json").exists():
        return f"fairveil deploy submit {quoted} --server DIR --resume"
    return f"fairveil run {quoted} --resume"
