"""Reading a user's file into named columns: CSV, parquet, npz. Nothing is guessed, nothing unpickled."""

from __future__ import annotations

import warnings
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from fairveil.errors import UserError, nearest
from fairveil.options import shown

if TYPE_CHECKING:
    import pandas as pd

Column: TypeAlias = "pd.Series | np.ndarray"  # a Series from a table, an array from npz

EXTENSIONS = (".csv", ".parquet", ".npz")
UNREADABLE = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)  # what readers raise
# What an empty cell may look like among numbers. In a column of names only an empty cell is missing: "NA" may
# be Namibia, and "None" an answer.
MISSING_NUMBER = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "#N/A")


def read_columns(path: Path, names: Collection[str], as_text: Collection[str] = ()) -> dict[str, Column]:
    """The columns of a file.

    Args:
        path: .csv, .parquet or .npz.
        names: columns that hold names, not numbers (clients, labels, groups).
        as_text: columns of a CSV whose cells are left as they stand there: a type found from all cells of a column
            would let one record change how the others are read.

    Returns:
        Series by name for a table; arrays by name for npz.
    """
    at = path.expanduser()
    extension = at.suffix.lower()
    if not at.is_file():
        raise UserError(
            f"data.options.path = {shown(path)} {'is not a file' if at.exists() else 'does not exist'}.",
            f"It was looked for at {at.absolute()}. Nothing was loaded.",
            'data.options.path = "the path of a .csv, .parquet or .npz file"',
        )
    if extension not in EXTENSIONS:
        raise UserError(
            f"data.options.path = {shown(path)} has an unknown extension.",
            f"The extension tells the format; known are: {', '.join(EXTENSIONS)}.\nNothing was loaded.",
            f"convert the file, and data.options.path = {shown(path.with_suffix('.csv'))}",
        )
    try:
        if extension == ".npz":
            return _read_npz(at)
        frame = _read_csv(at, names, as_text) if extension == ".csv" else _read_parquet(at)
    except UNREADABLE as error:
        raise UserError(
            f"data.options.path = {shown(path)} cannot be read.",
            f"{type(error).__name__}: {str(error).strip() or 'the file ends too early'}",
            "write the file again as csv, in UTF-8, with another name for each column"
            if extension == ".csv"
            else f"write the file again as {extension[1:]}, without Python objects (they are never unpickled)",
        ) from error
    return {str(name): frame[name] for name in frame.columns}


def _read_npz(path: Path) -> dict[str, Column]:
    with path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise ValueError("one array without a name, not an archive of named ones as np.savez writes it")
        return {name: archive[name] for name in archive.files}


def _read_csv(path: Path, names: Collection[str], as_text: Collection[str]) -> pd.DataFrame:
    import pandas as pd  # slow to import

    header = pd.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False).iloc[0].tolist()
    twice = next((name for at, name in enumerate(header) if name and name in header[:at]), None)
    if twice:  # pandas would rename the second, and it might be the target, taken for a feature
        raise ValueError(f"two columns are called {shown(twice)}")
    plain = {*names, *as_text}
    missing = {name: [""] if name in plain else list(MISSING_NUMBER) for name in header if name}
    with warnings.catch_warnings():
        # Rows longer than the header would be cut off, or shifted by one column, with no more than a warning.
        warnings.simplefilter("error", pd.errors.ParserWarning)
        try:
            frame = pd.read_csv(
                path,
                index_col=False,
                na_values=missing,
                keep_default_na=False,
                dtype=dict.fromkeys(as_text, str),
                low_memory=False,  # types by whole column, not by chunk
            )
        except pd.errors.ParserWarning as warning:
            raise ValueError(str(warning)) from warning
    return frame.loc[:, [name != "" for name in header]]  # row numbers, written without being asked for


def _read_parquet(path: Path) -> pd.DataFrame:
    import pandas as pd

    return pd.read_parquet(path)


def pick(columns: dict[str, Column], path: Path, option: str, name: str) -> Column:
    """The column that an option names."""
    if name in columns:
        return columns[name]
    near = nearest(name, columns)
    known = ", ".join(list(columns)[:20]) + (" ..." if len(columns) > 20 else "")
    several = option in ("features", "sensitive")
    given = f"{option} holds {shown(name)}, which" if several else f"{option} = {shown(name)}"
    raise UserError(
        f"data.options.{given} is not a column of {path.name}.",
        f"Its columns are: {known or 'none'}. Nothing was loaded.",
        f"data.options.{option} = {shown([near] if several else near)}" if near else "one of these columns",
    )


def numeric(column: Column) -> bool:
    """Whether the column holds real numbers (or truth values)."""
    from pandas.api import types

    return types.is_numeric_dtype(column.dtype) and not types.is_complex_dtype(column.dtype)
