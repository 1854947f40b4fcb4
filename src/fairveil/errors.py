"""The user's mistakes. Each says what was given, which rule it breaks, what would happen, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake the user can mend: printed without a traceback, exit code 2.

    Args:
        what: key and value with what is wrong, one line ("privacy.delta = 0.01 is too large.").
        why: the rule and the consequence of breaking it.
        fix: what to type instead.
    """

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(what)
        self.what, self.why, self.fix = what, why, fix

    def __str__(self) -> str:
        why = "\n".join(f"  {line}" for line in self.why.splitlines())
        return f"{self.what}\n{why}\n  Try: {self.fix}"

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, str]]:
        return type(self), (self.what, self.why, self.fix)  # it may travel from a worker process


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, or None if nothing is near."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), None)


def unknown(key: str, value: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not in a registry, naming the nearest one and all the others."""
    names = sorted(known)
    near = nearest(value, names)
    return UserError(
        f'{key} = "{value}" is not known.',
        f"It must be one of: {', '.join(names)},\nor package.module:Name for your own. Nothing was run.",
        f'{key} = "{near or names[0]}"',
    )


class PrivacyError(Exception):
    """An algorithm tried to send what was not planned. Nothing was released; printed without a traceback."""


class RunFault(Exception):
    """The run stopped through no mistake of the user (a worker died, the disk is full) and can be resumed."""
