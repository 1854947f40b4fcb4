"""The config of a sweep: variants, a grid and seeds over a base, and the runs that they make."""

from __future__ import annotations

import copy
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import Field, field_validator, model_validator

from fairveil.config import RunConfig, Section, key_path, lay_over, make_config, read_toml
from fairveil.errors import UserError, nearest
from fairveil.options import parse, shown

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
LABEL_LENGTH = 80  # a file name holds 255 bytes; the digest tells apart what was cut
NOTHING = "Nothing was run."


class Variant(Section):
    """A named set of settings, laid over the base."""

    name: str = Field(pattern=NAME, examples=["oracle"])
    set: dict[str, Any] = Field({}, examples=[{"algorithm.name": "oracle"}])


class SweepConfig(Section):
    """A sweep as it was typed, with the base read in."""

    name: str = Field(pattern=NAME, examples=["epsilons"])
    base: dict[str, Any] = Field(examples=["run.toml"])
    seeds: list[Annotated[int, Field(ge=0, lt=2**63)]] = Field(examples=[[0, 1, 2]])
    baseline: str | None = None
    grid: dict[str, Any] = Field({}, examples=[{"privacy.epsilon": [2.0, 8.0]}])
    variants: list[Variant] = Field([], examples=[[{"name": "oracle"}]])

    @field_validator("variants", mode="before")
    @classmethod
    def _each(cls, variants: Any) -> Any:
        """One by one, so that an error names the variant."""
        if not isinstance(variants, list):
            return variants
        return [parse(Variant, values, f"variants[{number}]") for number, values in enumerate(variants)]

    @field_validator("seeds")
    @classmethod
    def _some_seeds(cls, seeds: list[int]) -> list[int]:
        twice = _twice(seeds)
        if twice is not None or not seeds:
            what = "seeds = [] is empty." if twice is None else f"seeds = {shown(seeds)} has {twice} twice."
            raise UserError(what, f"Each seed is one run of every setting. {NOTHING}", "seeds = [0, 1, 2]")
        return seeds

    @field_validator("grid")
    @classmethod
    def _lists(cls, grid: dict[str, Any]) -> dict[str, Any]:
        for key, values in grid.items():
            _check_key(f"grid.{key}", key)
            if isinstance(values, dict):
                inner = next(iter(values), "key")
                raise UserError(
                    f"grid.{key} = {shown(values)} is a table.",
                    f"A key with dots stands in quotes; without them TOML makes tables of it. {NOTHING}",
                    f'"{key}.{inner}" = {shown(values.get(inner, []))}',
                )
            if "." not in key:
                raise UserError(
                    f"grid.{key} is a whole section.",
                    f"The grid takes single keys; a section of its own belongs to a named variant. {NOTHING}",
                    f'[[variants]] with set = {{ "{key}" = ... }}, or "{key}.<key>" = [...] in the grid',
                )
            if not isinstance(values, list) or not values:
                raise UserError(
                    f"grid.{key} = {shown(values)} is not a list of values.",
                    f"Every value is tried with every other setting; without one there is nothing to run. {NOTHING}",
                    f'"{key}" = [{"..." if isinstance(values, list) else shown(values)}]',
                )
        _check_within("grid", grid)
        return grid

    @model_validator(mode="after")
    def _consistent(self) -> SweepConfig:
        names = [variant.name for variant in self.variants]
        if (twice := _twice(names)) is not None:
            raise UserError(
                f'two variants are named "{twice}".',
                f"Results are told apart by the name. {NOTHING}",
                "another name for one of them",
            )
        for variant in self.variants:
            where = f'set of variant "{variant.name}"'
            for key in variant.set:
                _check_key(f'{where}: "{key}"', key)
            _check_within(where, variant.set)
            for key in self.grid:
                if (other := _setter(variant.set, key)) is not None:
                    raise UserError(
                        f'"{key}" is set by the grid and by variant "{variant.name}" (set."{other}").',
                        f"One would silently undo the other. {NOTHING}",
                        f'take "{key}" out of one of them',
                    )
        if self.baseline is not None and self.baseline not in names:
            raise UserError(
                f"baseline = {shown(self.baseline)} is not a variant.",
                f"It is the one that the others are compared with; there are: {', '.join(names) or 'none'}. {NOTHING}",
                f"baseline = {shown(nearest(self.baseline, names) or next(iter(names), None))}"
                if names
                else "leave out baseline, or name some [[variants]]",
            )
        return self

    def to_toml(self) -> str:
        """All of it in one file; reading it gives the same sweep."""
        plain = self.model_dump(exclude_none=True)
        return tomli_w.dumps({key: plain.pop(key) for key in ("name", "seeds", "baseline") if key in plain} | plain)


@dataclass(frozen=True, eq=False)
class Cell:
    """One run of a sweep."""

    variant: str
    point: Mapping[str, Any]  # the keys of the grid, with their values here
    seed: int
    label: str  # readable, and good for a file name
    config: RunConfig
    digest: str

    @property
    def setting(self) -> str:
        """All but the seed, in words."""
        return _in_words(self.variant, self.point)

    def __str__(self) -> str:
        return f"{self.setting}, seed {self.seed}"


@dataclass(frozen=True)
class Sweep:
    """A sweep and all of its runs, each of them checked; variant by variant, point by point, seed by seed."""

    config: SweepConfig
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def keys(self) -> list[str]:
        """The keys of the grid."""
        return list(self.config.grid)

    @property
    def short(self) -> dict[str, str]:
        """The keys of the grid, each with a name for people: its last part, where that tells them apart."""
        return _short(self.config.grid)


def load_sweep(path: Path) -> Sweep:
    """Read the config of a sweep; a base that is a file is looked for beside it.

    Raises:
        UserError: a mistake in the sweep, or in any run that it makes. Nothing is run.
    """
    return make_sweep(read_toml(path, "fairveil sweep takes a file with name, base, seeds, [grid]"), path.parent)


def make_sweep(values: Mapping[str, Any], where: Path = Path()) -> Sweep:
    """A checked sweep from plain values, as `load_sweep` does from a file in the folder `where`."""
    plain = dict(values)
    if isinstance(plain.get("base"), str):
        plain["base"] = read_toml(where / plain["base"], 'base = "run.toml", relative to the config of the sweep')
    config = parse(SweepConfig, plain)
    cells = tuple(_cells(config))
    seen: dict[str, Cell] = {}
    for cell in cells:
        other = seen.setdefault(cell.digest, cell)
        if other is not cell:
            raise UserError(
                f"({other}) and ({cell}) are the same run.",
                "They have the same settings (names and [engine] do not count), so they would give the same result\n"
                f"twice, which looks like more evidence than it is. {NOTHING}",
                "take one of them out, or change something in it",
            )
    return Sweep(config, cells)


def _cells(config: SweepConfig) -> Iterator[Cell]:
    short = _short(config.grid)
    for variant in config.variants or [Variant(name="base")]:
        for chosen in itertools.product(*config.grid.values()):
            point = dict(zip(config.grid, chosen, strict=True))
            for seed in config.seeds:
                named = [variant.name] if config.variants else []
                values = (f"{_slug(short[key])}-{_slug(value)}" for key, value in point.items())
                parts = [*named, *values, f"seed-{seed}"]
                label = "_".join(parts)[:LABEL_LENGTH]
                plain = copy.deepcopy(config.base)
                try:
                    for key, value in {**variant.set, **point, "seed": seed, "name": label}.items():
                        lay_over(plain, key_path(key), copy.deepcopy(value), f'"{key}"')
                    made = make_config(plain)
                except UserError as error:
                    where = f"{_in_words(variant.name, point)}, seed {seed}"
                    raise UserError(f"({where}): {error.what}", error.why, error.fix) from None
                yield Cell(variant.name, point, seed, label, made, made.digest())


def _short(keys: Iterable[str]) -> dict[str, str]:
    last = {key: key.rpartition(".")[2] for key in keys}
    count = Counter(last.values())
    return {key: name if count[name] == 1 else key for key, name in last.items()}


def _in_words(variant: str, point: Mapping[str, Any]) -> str:
    return ", ".join([variant, *(f"{key} = {shown(value)}" for key, value in point.items())])


def _check_key(where: str, key: str) -> None:
    if key in ("seed", "name"):
        raise UserError(
            f"{where} cannot be set here.",
            f"A sweep gives each run its seed (from seeds) and its name. {NOTHING}",
            "seeds = [0, 1, 2]" if key == "seed" else f"leave out {key}",
        )
    if not all(key.split(".")):
        raise UserError(f"{where} is not a key.", f"A key reads section.key. {NOTHING}", '"privacy.epsilon"')


def _check_within(where: str, keys: Mapping[str, Any]) -> None:
    """No two keys of which one holds the other."""
    for outer, inner in itertools.permutations(keys, 2):
        if inner.startswith(f"{outer}."):
            raise UserError(
                f'{where} has "{outer}" and "{inner}".',
                f"The one replaces all of the other's section, so their order would decide. {NOTHING}",
                f'"{inner}" as part of "{outer}"',
            )


def _setter(settings: Mapping[str, Any], key: str) -> str | None:
    """Which of the settings gives this key a value, or takes away the section that it is in."""
    for name, value in settings.items():
        if name == key or name.startswith(f"{key}."):
            return name
        if key.startswith(f"{name}."):
            inner = value
            for part in key.removeprefix(f"{name}.").split("."):
                if not isinstance(inner, dict) or part not in inner:
                    break
                inner = inner[part]
            else:
                return name
    return None


def _twice(values: Sequence[Any]) -> Any:
    """The first value that stands there more than once, or None."""
    return next((value for number, value in enumerate(values) if value in values[:number]), None)


def _slug(value: Any) -> str:
    """A value as part of a file name."""
    text = value if isinstance(value, str) else shown(value)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-" if isinstance(value, str | dict | list) else "") or "empty"
