"""Live tracking: what the progress bar is told of each round, in TensorBoard and MLflow.

Nothing but the config, the guarantee and the reports of rounds goes there. The metrics are evaluations without noise:
whoever sees the tracker sees them.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from typing import Any, Protocol

from fairveil.errors import UserError, nearest
from fairveil.options import flattened
from fairveil.reading import Run, load_run
from fairveil.run import Interrupted, RoundReport

LONGEST_NAME, LONGEST_VALUE = 60, 5000  # a file name holds 60 letters of any script; a server takes 5000 in a value
PARAMS, METRICS = 100, 1000  # in one request, at most
DEFAULTS = {  # unless the user says otherwise
    "MLFLOW_DISABLE_TELEMETRY": "true",  # nobody else is told
    "MLFLOW_ALLOW_FILE_STORE": "true",  # the only store that needs no server and no database driver
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # a server that is down holds up one round for seconds, not minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class Tracker(Protocol):
    """Where reports go."""

    def show(self, report: RoundReport) -> None:
        """Take the report of a round."""

    def close(self, status: str) -> None:
        """The run ends: FINISHED, KILLED or FAILED."""


class Trackers:
    """Several trackers as one. One that fails is dropped, with a word; the run goes on."""

    def __init__(self, those: dict[str, Tracker], tell: Callable[[str], None]) -> None:
        self._those, self._tell = those, tell

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        stopped = kind is not None and issubclass(kind, KeyboardInterrupt | Interrupted)
        status = "FINISHED" if kind is None else "KILLED" if stopped else "FAILED"
        self._each(lambda tracker: tracker.close(status))

    def show(self, report: RoundReport) -> None:
        """Take the report of a round."""
        self._each(lambda tracker: tracker.show(report))

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._those.items()):
            try:
                with _quiet():
                    act(tracker)
            except Exception as error:  # a disk, a network, a server: none of them may end a private run
                del self._those[name]
                why = (str(error).strip() or type(error).__name__).splitlines()[0]
                self._tell(f"{name} has failed and is given no more rounds; the run goes on. ({why})")


def trackers(kinds: Sequence[str], tell: Callable[[str], None]) -> Trackers:
    """Trackers of these kinds; nothing is written before the first round is done.

    Args:
        tell: takes a warning.

    Raises:
        UserError: a kind that is not known, or whose package is missing.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise UserError(
                f"--track {kind} is not known.",
                f"It must be one of: {', '.join(KINDS)}. Nothing was run.",
                f"--track {nearest(kind, KINDS) or next(iter(KINDS))}",
            )
        if find_spec(kind) is None:
            raise UserError(
                f"--track {kind} needs a package that is not there.",
                f"{kind} is not installed. Nothing was run.",
                "pip install 'fairveil[track]'",
            )
    return Trackers({kind: KINDS[kind]() for kind in kinds}, tell)


class TensorBoard:
    """Event files in the run folder, under tensorboard."""

    def __init__(self) -> None:
        self._writer: Any = None

    def show(self, report: RoundReport) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # what an earlier process wrote of this round and later ones is void
            self._writer = SummaryWriter(str(report.folder / "tensorboard"), purge_step=report.round)
        for name, value in measured(report).items():
            self._writer.add_scalar(name, value, report.round)
        self._writer.flush()

    def close(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()


class MLflow:
    """One run for each run folder, in MLFLOW_TRACKING_URI or beside the run folders, under mlruns."""

    def __init__(self) -> None:
        self._client: Any = None
        self._run = ""
        self._done: dict[str, int] = {}  # the last round that an earlier process logged, by metric
        self._continued = False

    def show(self, report: RoundReport) -> None:
        if self._client is None:
            self._begin(load_run(report.folder))
        from mlflow.entities import Metric

        now, values = int(time.time() * 1000), measured(report)
        fresh = [Metric(k, v, now, report.round) for k, v in values.items() if report.round > self._logged(k)]
        for start in range(0, len(fresh), METRICS):
            self._client.log_batch(self._run, metrics=fresh[start : start + METRICS])

    def close(self, status: str) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run, status)

    def _begin(self, run: Run) -> None:
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        beside = (run.folder.parent / "mlruns").resolve().as_uri()
        client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or beside)
        experiment = client.get_experiment_by_name("fairveil")
        where = experiment.experiment_id if experiment else client.create_experiment("fairveil")
        tags = {
            "fairveil.run": run.name,
            "fairveil.config_hash": run.provenance["config"],
            "fairveil.epsilon": str(run.statement["epsilon"]),
            "fairveil.guarantee": run.statement["sentence"][:LONGEST_VALUE],
            "fairveil.metric": run.main,
        }
        same = client.search_runs([where], f"tags.`fairveil.config_hash` = '{tags['fairveil.config_hash']}'")
        begun = next((one for one in same if one.data.tags.get("fairveil.run") == run.name), None)
        if begun is not None:
            self._run, self._continued = begun.info.run_id, True
            client.update_run(self._run, status="RUNNING")
        else:
            self._run = client.create_run(where, run_name=run.name, tags=tags).info.run_id
            config = flattened(run.config)
            names = plain_names(config)
            params = [Param(names[key], _text(value)) for key, value in config.items()]
            for start in range(0, len(params), PARAMS):
                client.log_batch(self._run, params=params[start : start + PARAMS])
        self._client = client  # all went well

    def _logged(self, metric: str) -> int:
        """The last round that the tracker has of a metric, from before this process."""
        if self._continued and metric not in self._done:
            history = self._client.get_metric_history(self._run, metric)
            self._done[metric] = max((entry.step for entry in history), default=0)
        return self._done.get(metric, 0)


KINDS: dict[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def measured(report: RoundReport) -> dict[str, float]:
    """The numbers of a report by name. An infinite one is left out: no chart shows it."""
    values = {"epsilon_spent": report.epsilon_spent, "epsilon_planned": report.epsilon}
    summary = report.summary
    if summary:
        values |= {"mean": summary.mean, "worst_group": summary.by_group[summary.worst_group]}
        values |= {"worst_10_percent": summary.worst_10_percent, "disparity": summary.disparity}
        names = plain_names(summary.by_group)
        values |= {f"group/{names[group]}": value for group, value in summary.by_group.items()}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Names that every tracker takes, no two the same: other signs than letters, digits, dots and dashes become _."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        cleaned = re.sub(r"[^\w.\- ]", "_", name)[:LONGEST_NAME].strip()
        cleaned = cleaned if cleaned.strip(". ") else "_" * max(1, len(cleaned))  # dots alone would be folders
        plain = cleaned
        for number in itertools.count(2):
            if plain.casefold() not in taken:  # a disk may not tell A from a
                break
            plain = f"{cleaned}-{number}"
        taken.add(plain.casefold())
        found[name] = plain
    return found


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))[:LONGEST_VALUE]


@contextmanager
def _quiet() -> Iterator[None]:
    """Standard output is the result's alone, and warnings about a tracker's insides are nobody's concern here."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
