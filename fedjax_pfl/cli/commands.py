"""The command line: ``fedjax-pfl run | compare | sweep | tune | partition | plot | report``, and what looks things up.

Heavy modules are imported inside the commands, so that ``--help`` answers at once.
"""

import importlib.metadata
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from fedjax_pfl.cli.given import check_in_use, compared, executor_of, folder_for, read_config
from fedjax_pfl.errors import ConfigError

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
ConfigFile = Annotated[Path, typer.Argument(help="A TOML config.", metavar="CONFIG.toml", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Fields to change, e.g. training.lr=0.01", metavar="SECTION.KEY=VALUE")
]
Point = Annotated[str, typer.Option(help="Where all are compared: pre or post, before or after local training.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run's files in the directory.")]
ExecutorName = Annotated[
    str, typer.Option(help="Where programs run: local; ray, as tasks of a cluster; submitit, as jobs of SLURM.")
]
JobOptions = Annotated[
    list[str] | None,
    typer.Option(
        help="What submitit asks of SLURM, e.g. slurm_partition=gpu, timeout_min=240; may be given again.",
        metavar="KEY=VALUE",
    ),
]


# What Typer raises for a command line that it cannot read; it exports this class's children alone.
_UsageError: Any = typer.BadParameter.__base__


_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Entry point: bad input is one line on stderr and exit code 2."""
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], prog_name="fedjax-pfl", standalone_mode=False))
    except (KeyboardInterrupt, typer.Abort):
        _leave(_INTERRUPTED)
    except SystemExit as end:
        if end.code in (_INTERRUPTED, 128 + signal.SIGTERM):
            _leave(end.code)
        raise
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx else "fedjax-pfl"
        print(f"error: {error.format_message().rstrip('.')} (see {command} --help)", file=sys.stderr)
    sys.exit(2)


def _leave(code: int) -> None:
    """Ends an interrupted process at once: XLA's threads crash if they still compile while the interpreter shuts down.

    A process among several exits normally, which signs off from the others.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        os._exit(code)
    sys.exit(code)


def _say_version(asked: bool) -> None:
    if asked:
        print(importlib.metadata.version("fedjax_pfl"))
        raise typer.Exit


@app.callback(help="Simulate personalized federated learning.")
def before_any_command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    """Reads the options that stand before a command."""


@app.command()
def run(
    config: Annotated[Path | None, typer.Argument(help="A TOML config.", metavar="CONFIG.toml")] = None,
    overrides: Overrides = None,
    out: Annotated[str | None, typer.Option(help="The run directory; by default one under runs/.")] = None,
    overwrite: Overwrite = False,
    resume: Annotated[Path | None, typer.Option(help="Go on with the interrupted run in this directory.")] = None,
    distributed: Annotated[
        bool, typer.Option("--distributed", help="Run with the other processes of the job, which JAX finds by itself.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Run an experiment and write its folder, or go on with one.

    With --resume, CONFIG.toml is by default the one in the run directory.
    """
    if resume is not None:
        from fedjax_pfl.experiment.saved import config_in

        resume = Path(os.path.expanduser(resume))  # which a shell leaves as it is in --resume=~/a
        if out is not None:
            raise ConfigError("--out", out, f"leave it out: the run in {resume} goes on there")
        if config is not None and "=" in str(config) and not os.path.exists(config):  # no config, but an override
            config, overrides = None, [str(config), *(overrides or [])]
        if config is None and not (resume / "config.toml").exists():
            raise ConfigError("--resume", str(resume), "a run directory: it holds config.toml and checkpoints")
        if config is None:
            config_in(resume)  # where a part of it is not registered here, this error says what to do
        config, out = config or resume / "config.toml", str(resume)
    if config is None:
        raise ConfigError("CONFIG.toml", "(missing)", "a config file, or --resume with a run directory")
    if out is not None:
        check_in_use(overrides, {"run.out": f"leave it out: the run goes to {out}"})
    loaded = read_config(config, overrides, out)
    from fedjax_pfl.cli.printing import print_summary
    from fedjax_pfl.experiment.distributed import is_first, start
    from fedjax_pfl.experiment.driver import simulate
    from fedjax_pfl.experiment.progress import lines

    if distributed:
        start(loaded.run)
        quiet = quiet or not is_first()
    with folder_for(loaded.run.out, f"{config.stem}-{loaded.method['name']}", "run.out") as folder:
        config_file, summary = Path(folder, "config.toml"), Path(folder, "summary.json")
        earlier = _written(config_file), _written(summary)  # of a run that is replaced

        def how_to_go_on() -> str:
            if _written(summary) not in (None, earlier[1]):
                return f"the run is complete: written to {folder}"
            # Before this run's own config is written, the checkpoints are those of the run that it replaces.
            begun = not overwrite or _written(config_file) != earlier[0]
            if begun and any(Path(folder, "checkpoints").glob("*")):
                return f"goes on with fedjax-pfl run --resume {shlex.quote(folder)}"
            return "there is no checkpoint to go on from"

        with _interruptible(how_to_go_on):
            loaded = loaded.replace({"run.out": folder})
            progress: Any = None if quiet else "auto" if sys.stdout.isatty() else lines(loaded)
            result = simulate(loaded, overwrite=overwrite, resume=resume, progress=progress)
    if not quiet:
        print_summary(result.summary)
        print(f"written to {folder}")


@app.command()
def compare(
    config: ConfigFile,
    overrides: Overrides = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Names, separated by commas, or all: those that can run on the config's model and data. A variant has "
            "a name of its own: fedprox,strong=fedprox with --set strong.mu=1."
        ),
    ] = "local,fedavg_ft,fedrep",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A hyperparameter of one method, or of its training (fedrep.training.lr=0.1); may be given again.",
            metavar="METHOD.KEY=VALUE",
        ),
    ] = None,
    baseline: Annotated[str | None, typer.Option(help="What others are compared with; else the first method.")] = None,
    point: Point = "pre",
    out: Annotated[str | None, typer.Option(help="Where runs and table go; by default a folder under runs/.")] = None,
    executor: ExecutorName = "local",
    job: JobOptions = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but the table and errors.")] = False,
) -> None:
    """Run methods side by side and print the table of a paper.

    All else is equal. A call with the same --out goes on where the last one stopped.
    """
    check_in_use(overrides, {"run.seed": "--seeds instead", "run.out": "--out instead"})
    loaded = read_config(config, overrides, None)
    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise ConfigError("--seeds", seeds, "whole numbers, separated by commas") from None
    from fedjax_pfl.experiment.comparison import compare, refusals

    options = compared(methods, change)
    if loaded.method["name"] not in {of.get("method", name) for name, of in options.items()}:
        instead = "that of a method that is compared: name it in --methods, or give it to one by --set METHOD.KEY=VALUE"
        check_in_use(overrides, {f"method.{key}": instead for key in loaded.method})
    report = None if quiet else _say
    with folder_for(out, f"compare-{config.stem}") as folder, _interruptible(lambda: _goes_on_in(folder)):
        if methods == "all":
            # A method with a hyperparameter of its own is meant to run.
            for name, why in refusals(loaded, [name for name, changed in options.items() if not changed]).items():
                del options[name]
                if report:
                    report(f"{name} is left out: {why}")
        where = executor_of(executor, job)
        found = compare(
            loaded,
            options,
            seeds=numbers,
            baseline=baseline,
            point=point,
            out=folder,
            progress=report,
            executor=where,
        )
    _show_runs(found, folder)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="A TOML file with config and grid.", metavar="SWEEP.toml")],
    overrides: Overrides = None,
    out: Annotated[str | None, typer.Option(help="Where runs and tables go; by default a folder under runs/.")] = None,
    point: Point = "pre",
    executor: ExecutorName = "local",
    job: JobOptions = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but the table and errors.")] = False,
) -> None:
    """Run every combination of the values in a grid.

    What can run side by side does. A call with the same --out goes on where the last one stopped.
    """
    from fedjax_pfl.experiment.grid import load_sweep
    from fedjax_pfl.experiment.sweep import sweep

    check_in_use(overrides, {"run.out": "--out instead"})
    config, grid, baseline = load_sweep(file, overrides or [])
    where = executor_of(executor, job)
    with folder_for(out, f"sweep-{file.stem}") as folder, _interruptible(lambda: _goes_on_in(folder)):
        report = None if quiet else _say
        found = sweep(config, grid, baseline=baseline, point=point, out=folder, progress=report, executor=where)
    _show_runs(found, folder)


@app.command()
def tune(
    file: Annotated[Path, typer.Argument(help="A TOML file with config and space.", metavar="TUNE.toml")],
    overrides: Overrides = None,
    trials: Annotated[int, typer.Option(help="How many the study is to have in the end.")] = 50,
    storage: Annotated[
        str | None, typer.Option(help="Where the study is kept, e.g. sqlite:///tune.db, for the same command to go on.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What it is called there; by default as the file is.")] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Trials that run side by side; by default 8, or the next multiple of the number of devices."),
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of the sampler.")] = 0,
    metric: Annotated[str, typer.Option(help="What trials are judged by, on validation samples.")] = "accuracy",
    point: Annotated[
        str | None, typer.Option(help="The evaluation point: pre or post; by default the method's headline.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but the outcome and errors.")] = False,
) -> None:
    """Search for hyperparameters, judged on validation samples.

    Test samples are never looked at.
    """
    from fedjax_pfl.experiment.space import load_tune
    from fedjax_pfl.experiment.tuning import in_short, tune

    check_in_use(overrides, {"run.out": "leave it out: trials are recorded in their study, which --storage keeps"})
    config, space = load_tune(file, overrides or [])
    how = "the same command goes on" if storage else "the study is lost: --storage keeps one"
    with _interruptible(lambda: how):
        study = tune(
            config,
            space,
            n_trials=trials,
            batch=batch,
            seed=seed,
            metric=metric,
            point=point,
            storage=storage,
            study_name=name or file.stem,
            progress=None if quiet else _say,
        )
    print(f"{metric} on validation samples: {in_short(study)}")


@app.command()
def partition(
    config: ConfigFile,
    overrides: Overrides = None,
    out: Annotated[
        str | None, typer.Option(help="Where partition.json and partition.npz go; not written unless given.")
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace an earlier partition in the directory, but no run that has begun."),
    ] = False,
    pfllib: Annotated[str | None, typer.Option(help="A new folder for the samples, as PFLlib reads them.")] = None,
) -> None:
    """Show who holds what, without training."""
    from fedjax_pfl.cli.printing import print_partition
    from fedjax_pfl.data.pfllib import export
    from fedjax_pfl.data.sources import load
    from fedjax_pfl.experiment.build import deal
    from fedjax_pfl.experiment.record import RunDirectory

    loaded = read_config(config, overrides, out)
    dataset = load(loaded.data.source)
    holdings, manifest = deal(loaded, dataset)
    if out and RunDirectory(out, resume=True).begun:
        raise ConfigError("--out", out, "a directory without a run: what it has learnt would be lost")
    directory = RunDirectory(out, overwrite=overwrite) if out else None  # that of the config is where its run is
    if pfllib:
        pixels = {"mean": loaded.data.mean, "std": loaded.data.std}
        batch_size = loaded.training.batch_size
        export(pfllib, dataset, holdings, partition=loaded.data.partition, batch_size=batch_size, **pixels)
    if directory is not None:
        directory.take()
        directory.begin(loaded.to_toml(), manifest, holdings)
        directory.leave()
    print_partition(manifest)
    if out:
        print(f"written to {Path(out) / 'partition.json'}")
    if pfllib:
        print(f"written to {pfllib}, for PFLlib")


@app.command()
def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run directories, or folders of comparisons and sweeps.", metavar="RUN", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file: a .pdf, .png or .svg.", show_default=False)],
    kind: Annotated[
        str, typer.Option(help="curves, clients (how they fare) or partition (who holds what).")
    ] = "curves",
    metric: Annotated[
        str | None,
        typer.Option(
            help="A metric as in metrics.jsonl, e.g. post.accuracy, global; by default pre.accuracy. For --kind "
            "clients, pre.accuracy or post.accuracy."
        ),
    ] = None,
    x: Annotated[
        str | None, typer.Option(help="The x axis of curves: round, which is the default, seconds or megabytes.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that exists.")] = False,
) -> None:
    """Draw runs: curves, how clients fare, or who holds what.

    Curves have a line per method or combination: the mean over seeds, and a standard deviation around it.
    """
    if kind == "partition" and metric is not None:
        raise ConfigError("--metric", metric, "leave it out for --kind partition: no metric is drawn")
    if kind in ("clients", "partition") and x is not None:
        raise ConfigError("--x", x, f"leave it out for --kind {kind}: no curves are drawn")
    from fedjax_pfl.experiment.plots.files import write_plot

    out = Path(os.path.expanduser(out))
    drawn = {"kind": kind, "metric": metric or "pre.accuracy", "x": x or "round"}
    for left_out in write_plot([Path(os.path.expanduser(run)) for run in runs], out, **drawn, overwrite=overwrite):
        print(f"left out, because it has not ended: {left_out}")
    print(f"written to {out}")


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories, or folders of comparisons and sweeps.", metavar="RUN")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file.")] = Path("report.html"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a report of runs, as one HTML file.

    Also of runs that go on. The file opens in any browser without a network.
    """
    from fedjax_pfl.experiment.report import report

    report(runs, out, overwrite=overwrite)
    print(f"written to {out}")


@app.command()
def methods() -> None:
    """List the methods."""
    from fedjax_pfl.cli.printing import print_table
    from fedjax_pfl.experiment.registry import load_entry_points
    from fedjax_pfl.methods import METHODS

    load_entry_points()
    print_table(METHODS)


@app.command()
def models() -> None:
    """List the models."""
    from fedjax_pfl.cli.printing import print_table
    from fedjax_pfl.experiment.registry import load_entry_points
    from fedjax_pfl.models import MODELS

    load_entry_points()
    print_table(MODELS)


@app.command()
def partitions() -> None:
    """List the kinds of partition."""
    from fedjax_pfl.cli.printing import print_table
    from fedjax_pfl.data.partition import PARTITIONS
    from fedjax_pfl.experiment.registry import load_entry_points

    load_entry_points()
    print_table(PARTITIONS)


@app.command()
def datasets() -> None:
    """List the data sources."""
    from fedjax_pfl.data.sources import SOURCES
    from fedjax_pfl.experiment.registry import load_entry_points

    load_entry_points()
    for name, (_, description) in SOURCES.items():
        print(f"{name:12} {description}")


@app.command()
def describe(name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Show all about a method, model, field of a config ...

    NAME is that of a method, model, partition, data source, protocol, or of a section or field of a config.
    """
    from fedjax_pfl.cli.describing import described

    print(described(name))


@app.command("ls")
def list_runs(
    folder: Annotated[
        Path, typer.Argument(help="Where to look; by default runs.", metavar="FOLDER", show_default=False)
    ] = Path("runs"),
) -> None:
    """List the runs in a folder, and in those below it.

    Each with how far it is, and what it came to.
    """
    from fedjax_pfl.cli.printing import print_runs
    from fedjax_pfl.experiment.saved import runs_in

    folder = Path(os.path.expanduser(folder))
    print_runs(runs_in(folder), folder)


@app.command()
def init(
    file: Annotated[
        Path, typer.Argument(help="The new file; by default config.toml.", metavar="FILE", show_default=False)
    ] = Path("config.toml"),
) -> None:
    """Write a config with every field and its description.

    Where a field has a default, it stands in a comment.
    """
    from fedjax_pfl.cli.describing import template

    file = Path(os.path.expanduser(file))
    if file.exists():
        raise ConfigError("FILE", str(file), "a file that does not exist: nothing is overwritten")
    try:
        file.write_text(template(), encoding="utf-8")
    except OSError as error:
        raise ConfigError("FILE", str(file), f"a file that can be written ({error.strerror})") from None
    print(f"written to {file}; fedjax-pfl run {shlex.quote(str(file))}")


@app.command()
def schema() -> None:
    """Print the JSON schema of a config file, for editors of TOML."""
    from fedjax_pfl.experiment.schema import config_schema

    print(json.dumps(config_schema(), indent=2))


def _written(file: Path) -> int | None:
    """When a file was last written, in nanoseconds; None if there is none."""
    return file.stat().st_mtime_ns if file.exists() else None


def _say(line: str) -> None:
    print(line, flush=True)


def _goes_on_in(out: str) -> str:
    return f"the same command with --out {shlex.quote(out)} goes on"


@contextmanager
def _interruptible(how_to_go_on: Callable[[], str]) -> Iterator[None]:
    """Says on an interrupt how to go on."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as interrupt:
        print(f"interrupted; {how_to_go_on()}", file=sys.stderr)
        sys.exit(interrupt.code if isinstance(interrupt, SystemExit) else _INTERRUPTED)


def _show_runs(found: Any, out: str) -> None:
    """Prints the table of many runs; exit code 1 if one of them failed."""
    from fedjax_pfl.cli.printing import print_markdown

    print_markdown(found.markdown())
    print(f"written to {out}")
    if found.failed:
        sys.exit(1)
