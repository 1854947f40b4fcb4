"""From what the user typed to a checked model, or an error that says what to type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from fairveil.errors import UserError, nearest

M = TypeVar("M", bound=BaseModel)


def shown(value: Any) -> str:
    """A value as it would be typed in the config."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    return json.dumps(value, ensure_ascii=False, default=str)


def parse(model: type[M], values: Any, key: str = "") -> M:
    """The model of these values.

    Args:
        key: where they stand in the config ("data.options"), for the error.

    Raises:
        UserError: naming the first value that does not fit.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _explained(model, error.errors()[0], key) from None


def _explained(model: type[BaseModel], error: ErrorDetails, key: str) -> UserError:
    """The first thing that pydantic found wrong, as a user's error."""
    if error["type"] == "value_error" and isinstance(cause := error["ctx"]["error"], Refused):
        return cause.error
    path = [part for part in error["loc"] if isinstance(part, str)]
    owner, field = _walk(model, path)
    where = ".".join([*([key] if key else []), *map(str, error["loc"])]) or "the config"
    parent = where.rpartition(".")[0]
    typed = f"{where} = {shown(error['input'])}"
    if error["type"] == "extra_forbidden":
        known = sorted(owner.model_fields)
        near = nearest(path[-1], known)
        return UserError(
            f"{typed} is not a known key.",
            f"Known here: {', '.join(known) or 'none'}.\nA misspelt key would leave its default in force unseen.",
            f"{parent + '.' if parent else ''}{near} = ..." if near else f"leave out {where}",
        )
    example = _example(field)
    fix = f"{where} = {shown(example)}" if example is not None else "see `fairveil new` for a commented config"
    if error["type"] == "missing":
        return UserError(f"{where} is missing.", "It has no default. Nothing was run.", fix)
    return UserError(f"{typed} is not valid.", f"{error['msg']}. Nothing was run.", fix)


class Refused(ValueError):
    """Raised inside a pydantic validator to give the user this very error."""

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(what)
        self.error = UserError(what, why, fix)


def _walk(model: type[BaseModel], path: list[str]) -> tuple[type[BaseModel], FieldInfo | None]:
    """The model that owns the last key of a path, and the field behind it if there is one."""
    field = None
    for number, name in enumerate(path):
        field = model.model_fields.get(name)
        if field is None or number == len(path) - 1:
            break
        inner = [t for t in (field.annotation, *get_args(field.annotation)) if isinstance(t, type)]
        model = next((t for t in inner if issubclass(t, BaseModel)), model)
    return model, field


def _example(field: FieldInfo | None) -> Any:
    if field is None:
        return None
    if field.examples:
        return field.examples[0]
    default = field.get_default(call_default_factory=False)
    return None if default is PydanticUndefined or isinstance(default, Mapping) else default
