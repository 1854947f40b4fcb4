"""The command line. No logic: it reads arguments, calls the library, and prints."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.table import Table

from fairveil.terminal import (
    ByteBar,
    CountBar,
    RoundBar,
    err,
    first_line,
    out,
    print_attacked,
    print_deployment,
    print_json,
    print_result,
    print_rows,
    print_statement,
    print_submitted,
    protected,
)

if TYPE_CHECKING:
    from fairveil.config import RunConfig
    from fairveil.errors import UserError

app = typer.Typer(
    name="fairveil",
    help="Federated learning that is private, fair and personal: every release priced and stated.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML config; see `fairveil new`.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Lay a value over the config.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


def main() -> NoReturn:
    """Entry point: a user's mistake exits with 2, a fault with 1, each without a traceback."""
    from fairveil.errors import PrivacyError, RunFault, UserError

    try:
        app(standalone_mode=True)
    except UserError as error:
        err.print(str(error), markup=False, soft_wrap=True)
        sys.exit(2)
    except (PrivacyError, RunFault) as error:
        err.print(str(error), markup=False, soft_wrap=True)
        sys.exit(1)
    finally:  # the process ends here: one more Ctrl-C would only show the insides of leaving
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(0)


@app.command()
def new(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("fairveil.toml"),
    example: Annotated[str, typer.Option(help="The algorithm to start from.")] = "global",
) -> None:
    """Write a commented config to start from."""
    from fairveil.errors import UserError
    from fairveil.template import template

    text = template(example, str(path))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} exists.", "It was left as it is.", "another name: fairveil new my-run.toml") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written.", f"{error.strerror}.", "a folder you may write to") from None
    out.print(f"Wrote {path}. Price it: fairveil plan {path}. Run it: fairveil run {path}.", soft_wrap=True)


@app.command()
def plan(config: Config, settings: Settings = None, as_json: AsJson = False) -> None:
    """Price and check everything; train nothing."""
    from fairveil.config import load_config
    from fairveil.plan import make_plan

    planned = make_plan(_with_data(load_config(config, settings or ())))
    if as_json:
        print_json(planned.to_json())
        return
    statement, size = planned.statement(), planned.facts.size
    out.print(
        f"{len(size)} clients of {size.min():,} to {size.max():,} records (as declared), records of shape "
        f"{planned.facts.features}, {planned.facts.parameters:,} parameters."
    )
    table = Table(title=f"{planned.config.name}: what will be sent", title_justify="left")
    for column in ("release", "times", "each"):
        table.add_column(column)
    for release in statement.releases:
        fewest, most = release.planned_per_unit
        table.add_row(release.kind, str(most) if fewest == most else f"{fewest} to {most}", release.what)
    out.print(table)
    noise = planned.to_json()["noise_multiplier"]
    if noise["smallest"] != noise["largest"]:
        out.print(f"Noise multipliers from {noise['smallest']:.4f} to {noise['largest']:.4f}, by declared size.")
    for key, value in planned.settled.items():
        out.print(f"Settled by the planner: algorithm.{key} = {json.dumps(value)}")
    print_statement(statement)
    if planned.note:
        out.print(f"Note: {planned.note}", soft_wrap=True)


def _with_data(config: RunConfig) -> RunConfig:
    """The config, once the files of its dataset are here: they are downloaded under a bar of their own."""
    from fairveil.data.archive import Stored
    from fairveil.data.datasets import find_dataset

    dataset = find_dataset(config.data.dataset)
    if issubclass(dataset, Stored) and "folder" not in config.data.options and dataset.archive.missing():
        with ByteBar() as bar:
            dataset.archive.fetch(tell=bar.show)
    return config


@app.command()
def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG|RUN", help="A config; with --resume also a run folder.")],
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    runs: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    track: Annotated[
        list[str] | None, typer.Option(metavar="KIND", help="Follow it in tensorboard, or mlflow; or both.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train, privately. Ctrl-C stops after saving; --resume goes on to the same result."""
    from fairveil.config import load_config
    from fairveil.errors import UserError
    from fairveil.plan import make_plan
    from fairveil.run import Interrupted, RoundReport, resume_run, run_plan
    from fairveil.tracking import trackers

    if resume and settings:
        raise _unchangeable(settings[0])
    if not resume and config.is_dir():
        raise UserError(f"{config} is a folder.", "A new run starts from a config.", f"fairveil run {config} --resume")
    tracking = trackers(track or (), tell=lambda text: err.print(f"Warning: {text}", markup=False, soft_wrap=True))
    try:
        wanted = None if resume else _with_data(load_config(config, settings or ()))
        with RoundBar() as bar, tracking:

            def show(report: RoundReport) -> None:
                bar.show(report)
                tracking.show(report)

            if wanted is None:
                result = resume_run(config, runs=runs, progress=show)
            else:
                planned = make_plan(wanted)
                if planned.note:
                    err.print(f"Note: {planned.note}", soft_wrap=True)
                result = run_plan(planned, runs=runs, progress=show)
    except (Interrupted, KeyboardInterrupt) as stopped:
        err.print(str(stopped) or "Stopped. `fairveil list runs` shows what was begun.", markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    if as_json:
        print_json(result.to_json())
    else:
        print_result(result)


def _unchangeable(setting: str) -> UserError:
    from fairveil.errors import UserError

    return UserError(
        f"--set {setting} cannot change a run that is under way.",
        "A resumed run keeps what was planned and promised.",
        "start a new run, without --resume",
    )


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    folder: Annotated[Path | None, typer.Option("--out", help="Where to write; RUN/export if left out.")] = None,
    client: Annotated[str | None, typer.Option(metavar="NAME", help="Only the model that serves this client.")] = None,
    finetuned: Annotated[
        bool, typer.Option("--finetuned", help="With --client: what it has fine-tuned for itself, its owner's alone.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the models as safetensors and ONNX, with a model card."""
    from fairveil.export import export_run
    from fairveil.reading import load_run

    exported = export_run(load_run(run), folder, client, finetuned=finetuned)
    for warning in exported.warnings:
        err.print(f"Warning: {warning}", markup=False, soft_wrap=True)
    if as_json:
        print_json(exported.to_json())
        return
    for path in exported.files:
        out.print(f"Wrote {path}", markup=False, soft_wrap=True)


@app.command()
def sweep(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The TOML config of a sweep; see docs/sweeps.md.")],
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; one for each core if left out.")] = None,
    sweeps: Annotated[Path, typer.Option(help="Where sweep folders are made.")] = Path("sweeps"),
    as_json: AsJson = False,
) -> None:
    """Run variants x grid x seeds. What is finished is kept: the same command goes on after any interruption."""
    from fairveil.errors import RunFault, UserError
    from fairveil.run import Interrupted
    from fairveil.sweep import load_sweep, run_sweep
    from fairveil.sweep.display import Display, print_sweep

    try:
        loaded = load_sweep(config)
        for one in {cell.config.data.dataset: cell.config for cell in loaded.cells}.values():
            with suppress(UserError, RunFault):  # those runs will say so, and others go on
                _with_data(one)
        with Display(loaded, err) as display:
            result = run_sweep(loaded, sweeps / loaded.name, jobs, display)
    except (Interrupted, KeyboardInterrupt) as stopped:
        again = f"{str(stopped) or 'Stopped.'} Go on with:\n  {shlex.join(['fairveil', *sys.argv[1:]])}"
        err.print(again, markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    if as_json:
        print_json(result.to_json())
    else:
        print_sweep(result, loaded, out)
    if result.failures:
        raise typer.Exit(1)


_training = partial(typer.Option, rich_help_panel="Training")
_votes = partial(typer.Option, rich_help_panel="Votes")


@app.command()
def account(
    delta: Annotated[float, typer.Option(help="delta")],
    epsilon: Annotated[float | None, typer.Option(help="the budget; the noise is solved")] = None,
    adjacency: Annotated[str, typer.Option(help="add-remove or replace")] = "add-remove",
    accountant: Annotated[str, typer.Option(help="rdp, pld or tightest")] = "tightest",
    as_json: AsJson = False,
    records: Annotated[int | None, _training(min=1, help="N, records of one client")] = None,
    batch: Annotated[int | None, _training(min=1, help="b, expected batch")] = None,
    rounds: Annotated[int | None, _training(min=1, help="E, rounds")] = None,
    noise_multiplier: Annotated[float | None, _training(help="the noise; its price is told")] = None,
    local_epochs: Annotated[int | None, _training(min=1, help="K, passes in a round; else 1")] = None,
    full_first_round: Annotated[bool, _training("--full-first-round", help="round 1 uses all records")] = False,
    first_round_factor: Annotated[float | None, _training(help="round 1 has this many times the noise; else 1")] = None,
    select_rounds: Annotated[int | None, _training(min=0, help="T, private choices; else none")] = None,
    select_epsilon: Annotated[float | None, _training(help="epsilon of each choice")] = None,
    vote: Annotated[bool, _votes("--vote", help="votes, not training")] = False,
    queries: Annotated[int | None, _votes(help="Q, public records that are voted on")] = None,
    sigma: Annotated[float | None, _votes(help="the noise, in votes; its price is told")] = None,
    unit: Annotated[str | None, _votes(help="agent (client) or instance (record)")] = None,
    neighbours: Annotated[int | None, _votes(help="k, nearest records by which a client votes; else a model")] = None,
    answers: Annotated[int | None, _votes(help="A, the most queries answered; else all")] = None,
    threshold_noise: Annotated[float | None, _votes(help="noise of the count that decides on an answer")] = None,
    labels: Annotated[int | None, _votes(help="tau, classes that one vote names; else one")] = None,
    classes: Annotated[int | None, _votes(help="C, classes; else however many")] = None,
) -> None:
    """The noise for a budget, or the price of a noise, without a config."""
    from fairveil.schedule import account_options

    training = {
        "records": records, "batch": batch, "rounds": rounds, "noise_multiplier": noise_multiplier,
        "local_epochs": local_epochs, "full_first_round": full_first_round, "first_round_factor": first_round_factor,
        "select_rounds": select_rounds, "select_epsilon": select_epsilon,
    }  # fmt: skip
    votes = {
        "queries": queries, "sigma": sigma, "unit": unit, "neighbours": neighbours, "answers": answers,
        "threshold_noise": threshold_noise, "labels": labels, "classes": classes,
    }  # fmt: skip
    answer = account_options(
        vote, training, votes, epsilon=epsilon, delta=delta, adjacency=adjacency, accountant=accountant
    )
    if as_json:
        print_json(answer)
    else:
        for key, value in answer.items():
            out.print(f"{key:18}{value}", markup=False)


Seen = Annotated[Path, typer.Argument(metavar="RUN|SWEEP", help="A run folder, or the folder of a sweep.")]


@app.command()
def report(
    folder: Seen,
    to: Annotated[Path | None, typer.Option("--out", help="The file; report.html in the folder if left out.")] = None,
) -> None:
    """One HTML file that shows what happened: it opens offline, on a phone too, and can be printed."""
    from fairveil.report import write_report

    path = write_report(folder, to)
    out.print(f"Wrote {path} ({path.stat().st_size / 1e6:.1f} MB).", markup=False, soft_wrap=True)


@app.command()
def watch(
    folder: Seen,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 0,
) -> None:
    """The same page on this machine's own address while the run goes on, until Ctrl-C."""
    from fairveil.watch import Watch

    with Watch(folder, port) as server, suppress(KeyboardInterrupt):
        out.print(f"Watching {folder} at {server.address} (Ctrl-C ends it).", markup=False, soft_wrap=True)
        server.serve_forever()


@app.command()
def audit(
    path: Annotated[Path, typer.Argument(metavar="CONFIG|RUN", help="A config, or the folder of a run.")],
    settings: Settings = None,
    canaries: Annotated[int, typer.Option(min=2, help="In all rehearsals together.")] = 1000,
    rehearsals: Annotated[int | None, typer.Option(min=1, help="Of the run; else as many as it takes.")] = None,
    guesses: Annotated[int | None, typer.Option(min=1, help="Fixed beforehand; else what promises most.")] = None,
    significance: Annotated[float, typer.Option(help="The chance of a bound that is too large.")] = 1e-3,
    members: Annotated[bool, typer.Option("--members", help="Membership inference, by group, too.")] = False,
    shadows: Annotated[int, typer.Option(help="Models that it compares each one with.")] = 16,
    pictures: Annotated[bool, typer.Option("--pictures", help="Reconstruct a record from an update, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Try to refute the guarantee: carry the run out again with canaries, look on as the server, and guess."""
    from fairveil.attacks.attack import attack
    from fairveil.config import load_config

    if not path.is_dir():
        _with_data(load_config(path, settings or ()))
    with CountBar() as bar:
        found = attack(
            path, settings or (), canaries=canaries, rehearsals=rehearsals, guesses=guesses, significance=significance,
            members=members, shadows=shadows, pictures=pictures, tell=bar.show,
        )  # fmt: skip
    if as_json:
        print_json(found.to_json())
    else:
        print_attacked(found)
    if found.audit.alarm:
        raise typer.Exit(1)


data = typer.Typer(no_args_is_help=True, help="The files of published datasets: list, get and check them.")
app.add_typer(data, name="data")

Folder = Annotated[Path | None, typer.Option(help="Where the files are, or their folder. Else the usual places.")]


@data.command("list")
def list_data(as_json: AsJson = False) -> None:
    """The datasets that are files, and where they are or how they can be had."""
    from fairveil.data.archive import stored
    from fairveil.data.datasets import DATASETS

    found = stored(DATASETS).items()
    print_rows([{"name": name, "what": first_line(cls), **cls.archive.summary()} for name, cls in found], as_json)


@data.command("get")
def get_data(name: Annotated[str, typer.Argument(help="See `fairveil data list`.")], folder: Folder = None) -> None:
    """Download what is missing of a dataset, and check it."""
    from fairveil.data.archive import archive_of
    from fairveil.data.datasets import find_dataset

    with ByteBar() as bar:
        files = archive_of(name, find_dataset(name)).fetch(folder, bar.show)
    for path, downloaded in files.items():
        out.print(f"{'downloaded:' if downloaded else 'there already:':15}{path}", markup=False, soft_wrap=True)


@data.command("check")
def check_data(
    name: Annotated[str | None, typer.Argument(help="A dataset; all of them if left out.")] = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Whether the files that are found are the ones published, by their checksums."""
    from fairveil.data.archive import archive_of, check_all, stored
    from fairveil.data.datasets import DATASETS, find_dataset

    archives = [archive_of(name, find_dataset(name))] if name else [c.archive for c in stored(DATASETS).values()]
    rows = check_all(archives, folder)
    print_rows(rows, as_json)
    if any(row["state"] == "wrong" or (name and row["state"] == "missing") for row in rows):
        raise typer.Exit(1)


deploy = typer.Typer(no_args_is_help=True, help="A federation of several machines: see docs/deployment.md.")
app.add_typer(deploy, name="deploy")

Place = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the server, or of the client.")]


@deploy.command("init-server")
def init_server(
    folder: Place,
    hosts: Annotated[list[str], typer.Option("--host", help="A name or address by which clients reach this machine.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen at.")] = 9092,
) -> None:
    """Make the folder of a server: its certificate, and room for the keys of its clients."""
    from fairveil.deploy import folders

    _say(*folders.init_server(folder, hosts, port))


@deploy.command("init-client")
def init_client(
    folder: Place,
    name: Annotated[str, typer.Option(help="The client's name in the federation.")],
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the server is.")],
    authority: Annotated[Path, typer.Option("--ca", metavar="ca.crt", help="The file from the server's keeper.")],
) -> None:
    """Make the folder of a client: its keys, where its records are, what it allows."""
    from fairveil.deploy import folders

    _say(*folders.init_client(folder, name, server, authority))


@deploy.command("serve")
def serve(
    folder: Place,
    allow: Annotated[list[Path] | None, typer.Option(metavar="NAME.pub", help="Admit the client of this key.")] = None,
) -> None:
    """Run the server, until Ctrl-C. Keys that are put into DIR/clients meanwhile are admitted."""
    from fairveil.deploy.server import serve

    serve(folder, allow or (), _say)


@deploy.command("join")
def join(folder: Place) -> None:
    """Take part as a client, until Ctrl-C."""
    from fairveil.deploy.join import join

    join(folder, _say)


@deploy.command("submit")
def submit(
    config: Annotated[Path, typer.Argument(metavar="CONFIG|RUN", help="A config; with --resume a run folder.")],
    server: Annotated[Path, typer.Option(metavar="DIR", help="The folder of the server, on this machine.")],
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run, or follow it again.")] = False,
    runs: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Train with the clients of a server, and wait for the result. Ctrl-C stops waiting; the run goes on."""
    from fairveil.deploy.submit import follow, submit_again, submit_new

    if resume and settings:
        raise _unchangeable(settings[0])
    folder = config
    if resume:
        submit_again(folder, server)
    else:
        folder = submit_new(config, settings or (), server, runs)
    err.print(f"{'Following' if resume else 'Submitted'}: {folder}", markup=False, emoji=False, soft_wrap=True)
    try:
        with RoundBar() as bar:
            result = follow(folder, server, bar.count)
    except KeyboardInterrupt:
        again = f"The run goes on. Follow it again:\n  fairveil deploy submit {folder} --server {server} --resume"
        err.print(again, markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    if as_json:
        print_json(result)
    else:
        print_submitted(result)


@deploy.command("status")
def deploy_status(folder: Place, as_json: AsJson = False) -> None:
    """Of a server: who is there, and its runs. Of a client: what it has spent, and what it refused."""
    from fairveil.deploy.status import status

    if as_json:
        print_json(status(folder))
    else:
        print_deployment(status(folder))


def _say(*lines: str) -> None:
    for line in lines:
        out.print(line, markup=False, emoji=False, soft_wrap=True)  # ":cd:" is part of a fingerprint


listing = typer.Typer(no_args_is_help=True, help="What there is to choose from.")
app.add_typer(listing, name="list")


@listing.command("algorithms")
def list_algorithms(as_json: AsJson = False) -> None:
    """The algorithms, with what each protects and whom it trusts."""
    from fairveil.algorithms import ALGORITHMS

    rows = []
    for name, cls in sorted(ALGORITHMS.items()):
        what = first_line(sys.modules[cls.__module__])
        rows.append({"name": name, "what": what, "protects": protected(cls.unit), "trusts": cls.trust})
    print_rows(rows, as_json)


@listing.command("models")
def list_models(as_json: AsJson = False) -> None:
    """The models."""
    from fairveil.models import MODELS

    print_rows([{"name": name, "what": first_line(f)} for name, f in sorted(MODELS.items())], as_json)


@listing.command("datasets")
def list_datasets(as_json: AsJson = False) -> None:
    """The datasets."""
    from fairveil.data.datasets import DATASETS

    print_rows([{"name": name, "what": first_line(d)} for name, d in sorted(DATASETS.items())], as_json)


@listing.command("runs")
def list_runs(
    runs: Annotated[Path, typer.Option(help="Where run folders are.")] = Path("runs"), as_json: AsJson = False
) -> None:
    """The run folders, newest first, and whether they are finished."""
    from fairveil.provenance import resume_command

    begun = {path.parent: path for name in ("submission.json", "config.toml") for path in runs.glob(f"*/{name}")}
    rows = []
    for folder, _ in sorted(begun.items(), key=lambda item: item[1].stat().st_mtime, reverse=True):
        values = {}
        with suppress(OSError, ValueError):  # not finished, or damaged
            values = json.loads((folder / "result.json").read_text())
        rows.append(
            {
                "run": str(folder),
                "algorithm": values.get("algorithm", ""),
                "epsilon": values.get("epsilon", ""),
                "state": "finished" if values else f"unfinished: {resume_command(folder)}",
            }
        )
    print_rows(rows, as_json)


@app.command()
def check(
    name: Annotated[str, typer.Argument(metavar="package.module:Name", help="Your algorithm.")],
    as_json: AsJson = False,
) -> None:
    """Run the contract suite on an algorithm."""
    from fairveil.contract import check_algorithm

    results = check_algorithm(name, tell=lambda text: err.print(text, markup=False))
    if as_json:
        print_json(
            {
                "algorithm": name,
                "passed": all(r.passed for r in results),
                "checks": [vars(r) for r in results],
            }
        )
    else:
        print_rows(
            [{"": "ok" if r.passed else "FAILED", "check": r.what, "detail": r.detail} for r in results],
            False,
        )
    if not all(r.passed for r in results):
        raise typer.Exit(1)
