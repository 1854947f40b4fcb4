"""The config of a run: TOML in, a checked and frozen model out, and back."""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fairveil.algorithms import find_algorithm
from fairveil.algorithms.base import Algorithm, Unit
from fairveil.data.datasets import build_federation, check_dataset
from fairveil.data.federation import Federation
from fairveil.data.server import check_server, with_server
from fairveil.errors import UserError
from fairveil.models import ModelSpec, check_model
from fairveil.options import parse, shown
from fairveil.plugins import source_digest
from fairveil.privacy.accounting import Accountant, Adjacency

SCHEMA_VERSION = 1


def no_probability(delta: float) -> UserError:
    """The error of a delta outside (0, 1)."""
    return UserError(
        f"privacy.delta = {delta:g} is not a probability.",
        "It must lie above 0 and below 1, and below 1/n for n protected records. Nothing was run.",
        "privacy.delta = 1e-4",
    )


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class DataConfig(Section):
    dataset: str = Field(examples=["digits"])
    options: dict[str, Any] = {}
    split: dict[str, Any] | None = Field(None, examples=[{"kind": "iid", "clients": 10}])
    sizes: Literal["rounded", "public"] = "rounded"


class ServerConfig(Section):
    """Public records, which the server holds and algorithms see without labels."""

    dataset: str = Field(examples=["usps"])
    options: dict[str, Any] = {}
    rows: Literal["train", "test"] = "train"  # which of its rows; of the test rows those left over judge
    records: int | None = Field(None, ge=1, examples=[1000])  # drawn by the seed; None: all, or half of the test rows
    judge: bool = True  # models are tested on its test records; false: on the clients' own


class RunDataConfig(DataConfig):
    """The records of a run: the clients', and the server's if it has any."""

    server: ServerConfig | None = None


class NamedConfig(Section):
    """A name and the options that belong to it, which are checked by whoever answers to the name."""

    model_config = ConfigDict(extra="allow")
    name: str

    @property
    def options(self) -> dict[str, Any]:
        return self.model_extra or {}


class ModelConfig(NamedConfig):
    name: str = Field(examples=["logistic"])


class AlgorithmConfig(NamedConfig):
    name: str = Field(examples=["global"])


class PrivacyConfig(Section):
    unit: Unit | None = None  # None: what the algorithm protects
    adjacency: Adjacency = "add-remove"
    epsilon: float | None = Field(None, examples=[5.0])
    noise_multiplier: float | None = Field(None, ge=0, allow_inf_nan=False, examples=[1.0])
    delta: float = Field(0.0, examples=[1e-4])  # 0: there is none, which metric privacy alone can do without
    clip_norm: float = Field(1.0, gt=0)
    accountant: Accountant = "tightest"
    noise: Literal["reproducible", "secret"] = "reproducible"
    trust: Literal["server", "secure-sum"] | None = None  # with what clients contribute to a sum; None: the server

    @field_validator("epsilon")
    @classmethod
    def _positive(cls, epsilon: float | None) -> float | None:
        if epsilon is not None and not 0 < epsilon < math.inf:
            raise UserError(
                f"privacy.epsilon = {epsilon:g} is not a budget.",
                "It must be positive and finite: at 0 nothing could be learned from any record,\n"
                "and without a bound nothing would be promised. Nothing was run.",
                "privacy.epsilon = 5.0 (or privacy.noise_multiplier = 0 for a run without privacy)",
            )
        return epsilon

    @field_validator("delta")
    @classmethod
    def _probability(cls, delta: float) -> float:
        if not 0 <= delta < 1:
            raise no_probability(delta)
        return delta

    @model_validator(mode="after")
    def _consistent(self) -> PrivacyConfig:
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise UserError(
                f"privacy.epsilon = {self.epsilon:g} and privacy.noise_multiplier = {self.noise_multiplier:g} "
                "are both given.",
                "One follows from the other; two would promise two different things. Nothing was run.",
                "keep privacy.epsilon and remove privacy.noise_multiplier",
            )
        if self.epsilon is None and self.noise_multiplier is None:
            raise UserError(
                "privacy.epsilon is missing.",
                "A run needs a budget (epsilon), or the noise whose price is to be told (noise_multiplier).\n"
                "Nothing was run.",
                "privacy.epsilon = 5.0",
            )
        if not math.isfinite(self.clip_norm) and self.noise_multiplier != 0:
            raise UserError(
                "privacy.clip_norm = inf cannot be noised.",
                "Without a bound one record can move the sum by any amount, and no noise covers that.",
                "privacy.clip_norm = 1.0 (or privacy.noise_multiplier = 0 for a run without privacy)",
            )
        return self


class FairnessConfig(Section):
    """How a run is judged. Nothing here changes what is sent: the same noise, the same models.

    What is typed makes it another config, for its result is another one; what is left out leaves the hash alone.
    """

    groups: str = "cluster"  # the groups of the clients; or a sensitive attribute of the records
    positive: int | None = Field(None, ge=0, examples=[1])  # the class that is an advantage; None: 1 of two, else none
    reference: Literal["central"] | None = None  # a model trained on each group's pooled records, without privacy
    explain: bool | None = None  # why a client is worse off, of one more round (client level, simulation)

    @field_validator("explain")
    @classmethod
    def _asked(cls, explain: bool | None) -> bool | None:
        return explain or None  # false says no more than leaving it out, and is the same config


class FinetuneConfig(Section):
    """Fine-tuning after the last round: each client for itself, on its own training records. Nothing is sent.

    Like `FairnessConfig` it changes no release: the same noise, the same released models.
    """

    steps: int = Field(20, ge=1)  # full-batch gradient steps, from the model that serves the client
    learning_rate: float = Field(0.5, gt=0, allow_inf_nan=False)
    local_steps: int = Field(200, ge=1)  # of the model that a client trains alone, shown beside the other


class EngineConfig(Section):
    kind: Literal["local", "ray", "flower"] = "local"  # ray: a simulation over a cluster; flower: `deploy submit`
    workers: int | None = Field(None, ge=1, examples=[2])  # None: one for each core
    block: int | None = Field(None, ge=1, examples=[8])  # clients that share a call; None: as many as are fastest
    address: str | None = Field(None, examples=["auto"])  # of a Ray cluster; None: one on this machine
    # of a federation on many machines
    minimum_clients: int | None = Field(None, ge=1, examples=[2])  # that must answer for a run to go on; None: all
    timeout: float = Field(60.0, gt=0)  # seconds until a request is sent once more
    retries: int = Field(9, ge=0)  # how often


class MetricsConfig(Section):
    every: int = Field(1, ge=1)  # rounds between evaluations; the last round is always evaluated


class RunConfig(Section):
    """Everything that a run is made of."""

    schema_version: Literal[1] = 1
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(0, ge=0, lt=2**63)
    data: RunDataConfig
    model: ModelConfig
    algorithm: AlgorithmConfig
    privacy: PrivacyConfig
    fairness: FairnessConfig = FairnessConfig()
    finetune: FinetuneConfig | None = None  # None: clients use the models as they are released
    engine: EngineConfig = EngineConfig()
    metrics: MetricsConfig = MetricsConfig()

    def build_algorithm(self) -> Algorithm[Any]:
        """The algorithm with its hyper-parameters.

        Raises:
            UserError: unknown, a wrong hyper-parameter, or another unit of privacy than the config asks for.
        """
        cls = find_algorithm(self.algorithm.name)
        algorithm = parse(cls, self.algorithm.options, "algorithm")
        if self.unit not in (cls.unit, *cls.other_units):
            known = " or ".join(f"each {unit}" for unit in (cls.unit, *cls.other_units))
            raise UserError(
                f"privacy.unit = {shown(self.privacy.unit)} is not what {self.algorithm.name} protects.",
                f"It protects {known}; the statement would promise something else than was done.",
                f"privacy.unit = {shown(cls.unit)}, or another algorithm (fairveil list algorithms)",
            )
        if not self.privacy.delta and self.unit != "metric":
            if "delta" in self.privacy.model_fields_set:
                raise no_probability(0.0)
            raise UserError(
                "privacy.delta is missing.",
                f"What {self.algorithm.name} guarantees may fail with this chance. Nothing was run.",
                "privacy.delta = 0.0001",
            )
        if self.privacy.trust is not None and not (self.unit == "client" or cls.pooled):
            raise UserError(
                f"privacy.trust = {shown(self.privacy.trust)} makes no sense with {self.algorithm.name}.",
                "Its clients add the noise themselves, and need to trust nobody.",
                "leave out privacy.trust",
            )
        return algorithm

    @property
    def unit(self) -> Unit:
        """What is protected: as the config says, or what the algorithm protects by itself."""
        return self.privacy.unit or find_algorithm(self.algorithm.name).unit

    def build_federation(self) -> Federation:
        """The clients and their data, and the server's if it has any."""
        data, server = self.data, self.data.server
        federation = build_federation(data.dataset, data.options, data.split, self.seed)
        if server is None:
            return federation
        clients, _ = check_dataset(data.dataset, data.options, data.split)
        held = check_server(server.dataset, server.options, clients, server.rows)
        return with_server(
            federation, clients, held, rows=server.rows, records=server.records, judge=server.judge, seed=self.seed
        )

    def model_spec(self, federation: Federation) -> ModelSpec:
        """How to build the model for this federation's records."""
        name, options, tokens = self.model.name, dict(self.model.options), federation.tokens
        reads_words = name == "lstm" and len(federation.features) == 1
        if tokens is not None and not reads_words and ":" not in name:
            raise UserError(
                f"model.name = {shown(name)} does not fit {federation.name}.",
                "Its records hold the numbers of words, which are names and not amounts.",
                'model.name = "lstm"',
            )
        if tokens is not None and reads_words and options.setdefault("vocabulary", tokens) != tokens:
            raise UserError(
                f"model.vocabulary = {shown(options['vocabulary'])} is not that of the data.",
                f"The words are numbered below {tokens:,}; other numbers would run together, or never come.",
                "leave out model.vocabulary",
            )
        if reads_words and "vocabulary" not in options:
            raise UserError(
                f"model.name = {shown(name)} does not fit {federation.name}.",
                "It reads numbers of words, and nothing says that the records hold any: amounts would pass for words.",
                'model.name = "mlp"; or, if they do, model.vocabulary = how many words there are',
            )
        return ModelSpec(name, federation.features, federation.classes, options, federation.several)

    def resolved(self) -> dict[str, Any]:
        """The config with every default written out, hyper-parameters of the algorithm included."""
        plain: dict[str, Any] = _without_none(self.model_dump())
        plain["algorithm"] = {
            "name": self.algorithm.name,
            **_without_none(self.build_algorithm().model_dump()),
        }
        return plain

    def to_toml(self) -> str:
        """The resolved config as TOML; reading it gives the same run."""
        return tomli_w.dumps(self.resolved())

    def digest(self) -> str:
        """A short hash of what decides the result: everything but the name and the engine."""
        decisive = {k: v for k, v in self.resolved().items() if k not in ("name", "engine")}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:12]

    def code(self) -> str:
        """A short hash of the code that decides the result: this version, and the files of the user's own classes."""
        named = [self.data.dataset, self.model.name, self.algorithm.name]
        named += [self.data.server.dataset] if self.data.server else []
        names = [name for name in named if ":" in name]
        text = " ".join([version("fairveil"), *map(source_digest, names)])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def load_config(path: Path, settings: Sequence[str] = ()) -> RunConfig:
    """Read a config file, with `--set` settings ("privacy.epsilon=3") laid over it.

    Raises:
        UserError: a missing or malformed file, an unknown key, a wrong value.
    """
    return make_config(read_toml(path, "fairveil new, which writes one to start from"), settings)


def read_toml(path: Path, fix: str) -> dict[str, Any]:
    """The plain values of a TOML file.

    Args:
        fix: what to do if it cannot be read, for the error.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"{path} cannot be read.", f"A config is a TOML file, in UTF-8: {why}. Nothing was run.", fix
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML.", f"{error}. Nothing was run.", "mend that line") from error


def make_config(values: Mapping[str, Any], settings: Sequence[str] = ()) -> RunConfig:
    """A checked config from plain values, as `load_config` does from a file."""
    plain = _plain(values)
    for setting in settings:
        _lay_over(plain, setting)
    if plain.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise UserError(
            f"schema_version = {shown(plain['schema_version'])} is not known.",
            f"This version of fairveil reads version {SCHEMA_VERSION}; it would misread another.",
            f"schema_version = {SCHEMA_VERSION}",
        )
    config = parse(RunConfig, plain)
    # what can be checked without the data is checked here, not when the run is under way
    config.build_algorithm()
    clients, _ = check_dataset(config.data.dataset, config.data.options, config.data.split)
    if config.data.server is not None:
        check_server(config.data.server.dataset, config.data.server.options, clients, config.data.server.rows)
    check_model(config.model.name, config.model.options)
    if config.data.dataset == "clients":
        _check_elsewhere(config)
    elif config.engine.kind == "flower":
        raise UserError(
            f'engine.kind = "flower" does not go with data.dataset = {shown(config.data.dataset)}.',
            "On a federation the clients hold the data, each on its own machine, and a run is submitted to its server\n"
            "(docs/deployment.md). Nothing was run.",
            'engine.kind = "local"; or data.dataset = "clients", and fairveil deploy submit',
        )
    return config


def _check_elsewhere(config: RunConfig) -> None:
    """What a simulation can do, and a federation cannot."""
    if config.privacy.trust == "secure-sum":
        raise UserError(
            'privacy.trust = "secure-sum" is not for a federation.',
            "A secure sum is only simulated: on a federation the server would see what each client contributes.\n"
            "Nothing was run.",
            'privacy.trust = "server", if the clients trust it that far',
        )
    if config.fairness.reference is not None:
        raise UserError(
            f"fairness.reference = {shown(config.fairness.reference)} is not for a federation.",
            "Reference models are trained on the pooled records of several clients, and these never leave them.\n"
            "Nothing was run.",
            "leave out fairness.reference",
        )
    if config.finetune is not None:
        raise UserError(
            "[finetune] is not for a federation yet.",
            "There a client's own machine scores the model that it is given, and does not train it further.\n"
            "Nothing was run.",
            "leave out [finetune]; each client finds its model in its own folder, and may train it there for itself",
        )
    if config.fairness.explain:
        raise UserError(
            "fairness.explain = true is not for a federation.",
            "Why a client is worse off is read from its update before any noise, and that never leaves it.\n"
            "Nothing was run.",
            "leave out fairness.explain",
        )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy, of plain values only."""
    try:
        copied: dict[str, Any] = json.loads(json.dumps(values))
    except TypeError as error:  # TOML knows dates
        raise UserError(
            f"the config holds a value that no key takes: {error}.",
            "Values are numbers, texts, true and false, lists and tables of them. Nothing was run.",
            "put a date in quotes",
        ) from None
    return copied


def key_path(key: str) -> list[str]:
    """The parts of a key with dots, as TOML reads it: a part in quotes may hold a dot itself."""
    try:
        values, path = tomllib.loads(f"{key} = 0"), []
        while isinstance(values, dict):
            ((name, values),) = values.items()
            path.append(name)
        return path
    except (tomllib.TOMLDecodeError, ValueError):
        return [part.strip() for part in key.split(".")]


def _lay_over(values: dict[str, Any], setting: str) -> None:
    key, found, text = setting.partition("=")
    *sections, name = key_path(key)
    if not found or not all([*sections, name]):
        raise UserError(
            f"--set {setting} is not a setting.",
            "It must read key=value. Nothing was run.",
            "--set privacy.epsilon=3",
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string
    lay_over(values, [*sections, name], value, f"--set {setting}")


def lay_over(values: dict[str, Any], path: Sequence[str], value: Any, what: str) -> None:
    """Set one value of a nested table, in place; `what` names the setting for the error."""
    *sections, name = path
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise UserError(
                f"{what} reaches into {section!r}, which is not a section.",
                "The keys before the last must name sections. Nothing was run.",
                "a key such as privacy.epsilon",
            )
    values[name] = value


def _without_none(values: Any) -> Any:
    """TOML has no null: a key that is None is left out, which means the same."""
    if isinstance(values, dict):
        return {key: _without_none(value) for key, value in values.items() if value is not None}
    return values
