"""From what the user typed under [data] to a checked model, or an error that says what to type."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from fairveil.errors import UserError, nearest

Model = TypeVar("Model", bound=BaseModel)


def shown(value: Any) -> str:
    """A value as it would be typed in the config."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    return json.dumps(value, ensure_ascii=False, default=str)


def parse(model: type[Model], values: Mapping[str, Any], key: str) -> Model:
    """The model of these values.

    Args:
        model: what the values must fit.
        values: as typed.
        key: where they stand in the config ("data.options"), for the error.

    Raises:
        UserError: naming the first value that does not fit.
    """
    try:
        return model.model_validate(dict(values) if isinstance(values, Mapping) else values)
    except ValidationError as error:
        raise _explained(model, error.errors()[0], key) from None


def _explained(model: type[BaseModel], error: ErrorDetails, key: str) -> UserError:
    """The first thing that pydantic found wrong, as a user's error."""
    if not error["loc"]:
        what = f"{key} = {shown(error['input'])} is not valid."
        return UserError(what, f"{error['msg']}. Nothing was loaded.", f"{key} = {{}}")
    name = str(error["loc"][0])
    where = f"{key}.{name}" + "".join(f"[{part}]" for part in error["loc"][1:])
    if error["type"] == "extra_forbidden":
        known = sorted(set(model.model_fields))
        near = nearest(name, known)
        return UserError(
            f"{where} = {shown(error['input'])} is not an option here.",
            f"The options are: {', '.join(known) or 'none'}.\nA misspelt one would leave its default in force, unseen.",
            f"{key}.{near} = {shown(error['input'])}" if near else f"leave out {where}",
        )
    fix = f"{key}.{name} = {_example(model.model_fields[name], error)}"
    if error["type"] == "missing":
        return UserError(f"{where} is missing.", "It has no default. Nothing was loaded.", fix)
    what = f"{where} = {shown(error['input'])} is not valid."
    return UserError(what, f"{error['msg']}. Nothing was loaded.", fix)


def _example(field: FieldInfo, error: ErrorDetails) -> str:
    """A value that would have been right: the nearest choice, else an example, else the default."""
    if error["type"] == "literal_error":
        choices = re.findall("'([^']+)'", error["ctx"]["expected"])
        return shown(nearest(str(error["input"]), choices) or choices[0])
    if field.examples:
        return shown(field.examples[0])
    return "..." if field.is_required() else shown(field.get_default())
