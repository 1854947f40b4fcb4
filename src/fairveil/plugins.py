"""The user's own classes, named "package.module:Name" in a config."""

from __future__ import annotations

import hashlib
import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

from fairveil.errors import UserError, nearest


def source_digest(path: str) -> str:
    """sha256 of the file that holds a class "package.module:Name" (not of what it imports); empty if there is none."""
    module = sys.modules.get(path.partition(":")[0])
    file = getattr(module, "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file and Path(file).is_file() else ""


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
        return getattr(module, name)
    except Exception as error:  # a user's module can fail in any way
        if not isinstance(error, AttributeError) or module_name not in sys.modules:
            where = traceback.extract_tb(error.__traceback__)[-1]
            at = "" if isinstance(error, ImportError) else f" ({Path(where.filename).name}, line {where.lineno})"
            why = f"{type(error).__name__}: {error}{at}.\nThe current folder is searched first."
            fix = f'{key} = "package.module:Name", run from the folder that holds the package'
            raise UserError(f'{key} = "{path}" cannot be imported.', f"{why} Nothing was run.", fix) from error
        near = nearest(name, vars(module))
        why = f"The module {module_name!r} has no {name!r}."
        fix = f'{key} = "{module_name}:{near}"' if near else f"define {name or 'Name'} in {module_name}"
        raise UserError(f'{key} = "{path}" cannot be imported.', f"{why} Nothing was run.", fix) from None
