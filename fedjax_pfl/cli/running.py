"""The commands that run experiments: run, compare, sweep, tune.

Heavy modules are imported inside the functions, so that ``--help`` answers at once.
"""

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from fedjax_pfl.cli.given import (
    ConfigFile,
    Overrides,
    check_in_use,
    compared,
    executor_of,
    folder_for,
    read_config,
)
from fedjax_pfl.errors import ConfigError

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

INTERRUPTED = 128 + signal.SIGINT
"""The exit code of a command that SIGINT has ended."""


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
        resume = Path(os.path.expanduser(resume))  # which a shell leaves as it is in --resume=~/a
        if out is not None:
            raise ConfigError("--out", out, f"leave it out: the run in {resume} goes on there")
        config, overrides = _to_resume(resume, config, overrides)
        out = str(resume)
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
    name = f"{config.stem}-{loaded.method['name']}"
    with folder_for(loaded.run.out, name, "run.out") as folder, _interruptible(_after(folder, overwrite)):
        loaded = loaded.replace({"run.out": folder})
        progress: Any = None if quiet else "auto" if sys.stdout.isatty() else lines(loaded)
        result = simulate(loaded, overwrite=overwrite, resume=resume, progress=progress)
    if not quiet:
        print_summary(result.summary)
        print(f"written to {folder}")


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
    try:
        loaded = read_config(config, overrides, None)
    except ConfigError as error:
        if not error.field.startswith("method.") or error.field == "method.name":
            raise
        hint = "of a method that is compared: --set METHOD.KEY=VALUE"
        raise ConfigError(error.field, error.value, f"{error.allowed}; {hint}") from None
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


def _to_resume(folder: Path, config: Path | None, overrides: list[str] | None) -> tuple[Path, list[str] | None]:
    """The config and the overrides with which a run goes on; the config is by default that in its directory.

    Raises:
      ConfigError: the directory has none, or this process does not know a part that it names.
    """
    from fedjax_pfl.experiment.saved import config_in

    if config is not None and "=" in str(config) and not os.path.exists(config):  # no config, but an override
        config, overrides = None, [str(config), *(overrides or [])]
    if config is not None:
        return config, overrides
    if not (folder / "config.toml").exists():
        raise ConfigError("--resume", str(folder), "a run directory: it holds config.toml and checkpoints")
    config_in(folder)  # where a part of it is not registered here, this error says what to do
    return folder / "config.toml", overrides


def _after(folder: str, overwrite: bool) -> Callable[[], str]:
    """How to go on after an interruption of a run that is about to begin in this folder."""
    config, summary = Path(folder, "config.toml"), Path(folder, "summary.json")
    earlier = _written(config), _written(summary)  # of a run that is replaced

    def how_to_go_on() -> str:
        if _written(summary) not in (None, earlier[1]):
            return f"the run is complete: written to {folder}"
        # Before this run's own config is written, the checkpoints are those of the run that it replaces.
        begun = not overwrite or _written(config) != earlier[0]
        if begun and any(Path(folder, "checkpoints").glob("*")):
            return f"goes on with fedjax-pfl run --resume {shlex.quote(folder)}"
        return "there is no checkpoint to go on from"

    return how_to_go_on


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
        sys.exit(interrupt.code if isinstance(interrupt, SystemExit) else INTERRUPTED)


def _show_runs(found: Any, out: str) -> None:
    """Prints the table of many runs; exit code 1 if one of them failed."""
    from fedjax_pfl.cli.printing import print_markdown

    print_markdown(found.markdown())
    print(f"written to {out}")
    if found.failed:
        sys.exit(1)
