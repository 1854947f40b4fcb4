"""From what the user typed to a checked model, or an error that says what to type."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from fairveil.errors import UserError, nearest

M = TypeVar("M", bound=BaseModel)


def shown(value: Any) -> str:
    """A value as it would be typed in the config."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {shown(inner)}" for key, inner in value.items()) + " }" if value else "{}"
    return json.dumps(value, ensure_ascii=False, default=str)


def flattened(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """A nested table as one level, its keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flattened(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return flat


def parse(model: type[M], values: Any, key: str = "") -> M:
    """The model of these values.

    Args:
        model: what the values must fit.
        values: as typed.
        key: where they stand in the config ("data.options"), for the error; empty at its root.

    Raises:
        UserError: naming the first value that does not fit. (A UserError raised in a validator comes through.)
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _explained(model, error.errors()[0], key) from None


def _explained(model: type[BaseModel], error: ErrorDetails, key: str) -> UserError:
    """The first thing that pydantic found wrong, as a user's error."""
    owner, field, names, rest = _locate(model, error)
    if field and get_origin(field.annotation) in (Union, UnionType):
        several = len(set(get_args(field.annotation)) - {NoneType}) > 1
        rest = rest[1:] if several else rest  # the first part names the member that did not fit, in pydantic's words
    prefix = ".".join([*filter(None, [key]), *names[:-1]])
    place = ".".join(filter(None, [prefix, *names[-1:]])) or "the config"
    where = place + "".join(f"[{part}]" for part in rest)
    typed = f"{where} = {shown(error['input'])}"
    if error["type"] == "extra_forbidden":
        known = sorted(owner.model_fields)
        near = nearest(names[-1], known)
        return UserError(
            f"{typed} is not a known key.",
            f"Known here: {', '.join(known) or 'none'}.\nA misspelt key would leave its default in force, unseen.",
            f"{'.'.join(filter(None, [prefix, near]))} = {shown(error['input'])}" if near else f"leave out {where}",
        )
    example = _example(field, error) if field else "{}"
    fix = f"{place} = {example}" if example != "null" else f"leave out {place}"  # TOML has no null
    if error["type"] == "missing":
        return UserError(f"{where} is missing.", "It has no default. Nothing was run.", fix)
    return UserError(f"{typed} is not valid.", f"{error['msg']}. Nothing was run.", fix)


def _locate(
    model: type[BaseModel], error: ErrorDetails
) -> tuple[type[BaseModel], FieldInfo | None, list[str], list[str | int]]:
    """The model and field that an error is about, the keys that lead there, and what is left of its path."""
    names: list[str] = []
    field = None
    for at, part in enumerate(error["loc"]):
        names.append(str(part))
        field = model.model_fields.get(names[-1])
        types = [field.annotation, *get_args(field.annotation)] if field else []
        inner = next((t for t in types if isinstance(t, type) and issubclass(t, BaseModel)), None)
        if inner is None or at == len(error["loc"]) - 1:
            return model, field, names, list(error["loc"][at + 1 :])
        model = inner
    return model, field, names, []


def _example(field: FieldInfo, error: ErrorDetails) -> str:
    """A value that would have been right: the nearest choice, else an example, else the default."""
    if error["type"] == "literal_error":
        choices = re.findall("'([^']+)'", error["ctx"]["expected"])
        if choices:
            return shown(nearest(str(error["input"]), choices) or choices[0])
    if field.examples:
        return shown(field.examples[0])
    return "..." if field.is_required() else shown(field.get_default(call_default_factory=True))
