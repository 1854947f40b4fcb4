"""The user's own classes, named "package.module:Name" in a config."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from fairveil.errors import UserError, nearest


def load_object(key: str, path: str) -> Any:
    """Import `path` = "package.module:Name"; the current folder counts, as with `python -m`.

    Args:
        key: the config key that named it, for the error.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f"{key} = {path!r} cannot be imported.",
            f"Importing {module_name!r} failed: {error}.\nThe current folder is searched first.",
            f'{key} = "package.module:Name", run from the folder that holds the package',
        ) from error
    if not hasattr(module, name):
        near = nearest(name, vars(module))
        raise UserError(
            f"{key} = {path!r} names nothing.",
            f"The module {module_name!r} has no {name!r}.",
            f"{key} = {f'{module_name}:{near}'!r}" if near else f"define {name} in {module_name}",
        )
    return getattr(module, name)
