"""The command line: ``fedjax-pfl run | compare | sweep | partition | methods | models | datasets | describe``.

Heavy modules are imported inside the commands, so that ``--help`` answers at once.
"""

import inspect
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedjax_pfl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fedjax_pfl.experiment.config import Config
    from fedjax_pfl.experiment.driver import Progress

app = typer.Typer(
    help="Simulate personalized federated learning.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_CAPTION = (
    "Accuracy in %. PRE: after aggregation; POST: after local training; *: what the method is judged by.\n"
    "best is selected on {evaluated_on} data."
)
ConfigFile = Annotated[Path, typer.Argument(help="A TOML config.", metavar="CONFIG.toml", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Fields to change, e.g. training.lr=0.01", metavar="[SECTION.KEY=VALUE]...")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run's files in the directory.")]


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
    """Ends an interrupted process at once: threads of XLA's, still compiling, crash where the interpreter closes first.

    A process among several goes the long way, on which it takes leave of the others.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        os._exit(code)
    sys.exit(code)


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
    """Run an experiment and write its run directory, or go on with one (CONFIG.toml is then that of the directory)."""
    if resume is not None:
        if out is not None:
            raise ConfigError("--out", out, f"leave it out: the run in {resume} goes on there")
        if config is not None and "=" in config.name:  # no config, but an override
            config, overrides = None, [str(config), *(overrides or [])]
        if config is None and not (resume / "config.toml").exists():
            raise ConfigError("--resume", str(resume), "a run directory: it holds config.toml and checkpoints")
        config, out = config or resume / "config.toml", str(resume)
    if config is None:
        raise ConfigError("CONFIG.toml", "(missing)", "a config file, or --resume with a run directory")
    loaded = _load(config, overrides, out)
    if loaded.run.out is None:
        name = f"{config.stem}-{loaded.method['name']}-{time.strftime('%Y%m%d-%H%M%S')}"
        loaded = _with_out(loaded, str(Path("runs") / name))
    _use_compilation_cache(loaded)
    from fedjax_pfl.experiment.distributed import is_first, start
    from fedjax_pfl.experiment.driver import simulate

    if distributed:
        start(loaded.run.placement)
        quiet = quiet or not is_first()
    try:
        with _progress(loaded, quiet) as report:
            result = simulate(loaded, overwrite=overwrite, resume=resume, progress=report)
    except (KeyboardInterrupt, SystemExit) as interrupt:
        print(f"interrupted; if it had begun: fedjax-pfl run --resume {loaded.run.out}", file=sys.stderr)
        sys.exit(interrupt.code if isinstance(interrupt, SystemExit) else _INTERRUPTED)
    if not quiet:
        _print_summary(result.summary)
        if not math.isfinite(result.history["train_loss"][-1]):
            print("the training loss is not a number: the run diverged; try a smaller training.lr")
        print(f"written to {loaded.run.out}")


@app.command()
def compare(
    config: ConfigFile,
    overrides: Overrides = None,
    methods: Annotated[str, typer.Option(help="Names, separated by commas.")] = "local,fedavg_ft,fedrep",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    baseline: Annotated[str | None, typer.Option(help="What the t-test compares with; else the first method.")] = None,
    out: Annotated[str | None, typer.Option(help="Where runs and table go; by default a folder under runs/.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but the table and errors.")] = False,
) -> None:
    """Run methods side by side, all else equal, and print the table that papers print.

    A call with the same --out goes on where the last one stopped.
    """
    loaded = _load(config, overrides, None)
    out = out or str(Path("runs") / f"compare-{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    names = [name.strip() for name in methods.split(",")]
    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise ConfigError("--seeds", seeds, "whole numbers, separated by commas") from None
    _use_compilation_cache(loaded)
    from fedjax_pfl.experiment.comparison import compare

    def report(method: str, seed: int, now: "Progress") -> None:
        if now.round == now.rounds and not quiet:
            print(f"{method}, seed {seed}: {_numbers(now)}", flush=True)

    try:
        comparison = compare(loaded, names, seeds=numbers, baseline=baseline, out=out, progress=report)
    except (KeyboardInterrupt, SystemExit) as interrupt:
        print(f"interrupted; the same command with --out {out} goes on", file=sys.stderr)
        sys.exit(interrupt.code if isinstance(interrupt, SystemExit) else _INTERRUPTED)
    _print_markdown(comparison.markdown())
    print(f"written to {out}")
    if comparison.failed:
        sys.exit(1)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="A TOML file with config and grid.", metavar="SWEEP.toml")],
    out: Annotated[str | None, typer.Option(help="Where runs and tables go; by default a folder under runs/.")] = None,
    executor: Annotated[str, typer.Option(help="Where programs run: local, or ray, as tasks of a cluster.")] = "local",
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but the table and errors.")] = False,
) -> None:
    """Run every combination of the values in a grid, as few programs as possible.

    A call with the same --out repeats no run that is complete.
    """
    from fedjax_pfl.experiment.sweep import load_sweep, sweep

    config, grid, baseline = load_sweep(file)
    out = out or str(Path("runs") / f"sweep-{file.stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    _use_compilation_cache(config)
    try:
        report = None if quiet else print
        result = sweep(config, grid, baseline=baseline, out=out, progress=report, executor=executor)
    except KeyboardInterrupt:
        print(f"interrupted; the same command with --out {out} goes on", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    _print_markdown(result.markdown())
    print(f"written to {out}")
    if result.failed:
        sys.exit(1)


@app.command()
def partition(
    config: ConfigFile,
    overrides: Overrides = None,
    out: Annotated[str | None, typer.Option(help="Where partition.json goes; not written unless given.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Show who holds what, without training."""
    from fedjax_pfl.data.sources import load
    from fedjax_pfl.experiment.build import divide
    from fedjax_pfl.experiment.record import RunDirectory

    loaded = _load(config, overrides, out)
    _, shares = divide(loaded, load(loaded.data.source))
    if loaded.run.out:
        RunDirectory(loaded.run.out, overwrite=overwrite).begin(loaded.to_toml(), shares)
    _print_partition(shares)
    if loaded.run.out:
        print(f"written to {Path(loaded.run.out) / 'partition.json'}")


@app.command()
def methods() -> None:
    """List the methods."""
    from fedjax_pfl.methods import METHODS

    _print_table(METHODS)


@app.command()
def models() -> None:
    """List the models."""
    from fedjax_pfl.models import MODELS

    _print_table(MODELS)


@app.command()
def datasets() -> None:
    """List the data sources."""
    from fedjax_pfl.data.sources import SOURCES

    for name, (_, description) in SOURCES.items():
        print(f"{name:12} {description}")


@app.command()
def describe(method: Annotated[str, typer.Argument(metavar="METHOD")]) -> None:
    """Show a method's docstring, hyperparameters with defaults, and reference."""
    from fedjax_pfl.experiment.config import hyperparameters
    from fedjax_pfl.methods import METHODS

    if method not in METHODS:
        raise ConfigError("METHOD", method, f"allowed: {', '.join(METHODS)}")
    print(inspect.getdoc(METHODS[method]))
    given = hyperparameters(METHODS[method])
    print("\nHyperparameters ([method] in the config):" if given else "\nNo hyperparameters of its own.")
    for name, parameter in given.items():
        print(f"  {name} = {json.dumps(parameter.default)}")


def _load(path: Path, overrides: list[str] | None, out: str | None) -> "Config":
    from fedjax_pfl.experiment.config import load_config

    loaded = load_config(path, overrides or [])
    return _with_out(loaded, out) if out else loaded


def _with_out(config: "Config", out: str) -> "Config":
    return config.model_copy(update={"run": config.run.model_copy(update={"out": out})})


def _use_compilation_cache(config: "Config") -> None:
    """Keeps compiled programs on disk, so that the next run with the same shapes starts at once."""
    import jax

    folder = config.run.compilation_cache or jax.config.values["jax_compilation_cache_dir"]
    if folder == "off":
        return
    if folder and Path(folder).is_file():
        raise ConfigError("run.compilation_cache", folder, 'a folder, or "off"; it is a file')
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", folder or str(caches / "fedjax_pfl"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@contextmanager
def _progress(config: "Config", quiet: bool) -> "Iterator[Callable[[Progress], None] | None]":
    """A progress bar on a terminal, plain lines elsewhere."""
    if quiet:
        yield None
    elif sys.stdout.isatty():
        with _bar(config) as report:
            yield report
    else:
        yield lambda now: print(_line(config, now), flush=True)


@contextmanager
def _bar(config: "Config") -> "Iterator[Callable[[Progress], None]]":
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}")
    with Bar(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task(config.method["name"], total=config.training.rounds, numbers="")
        yield lambda now: bar.update(task, completed=now.round, numbers=_numbers(now))


def _line(config: "Config", now: "Progress") -> str:
    if now.round == 0:
        return f"{config.method['name']} on {config.data.source}: {config.data.clients} clients; {_numbers(now)}"
    return f"round {now.round}/{now.rounds}  {_numbers(now)}  {now.seconds_left:.0f} s left"


def _numbers(now: "Progress") -> str:
    if now.round == 0:
        return f"about {now.memory / 1e9:.2g} GB of memory; compiling"
    shown = f"loss {now.loss:.4f}"
    if now.last is not None:
        for point in ("pre", "post"):
            shown += f"  {point} {100 * now.last[point]['accuracy']:.2f}%"
    return shown


def _print_markdown(text: str) -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    # Not cut to the width of a terminal where there is none.
    Console(width=None if sys.stdout.isatty() else 140).print(Markdown(text))


def _print_summary(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{summary['method']} on {summary['dataset']}, {summary['clients']} clients, {summary['rounds']} rounds"
    table = Table(
        title=title,
        caption=_CAPTION.format(**summary),
        caption_justify="left",
        title_justify="left",
    )
    columns = {
        "last": "last",
        "best": "best",
        "mean_last_10": "mean of last 10",
        "weighted_last": "weighted",
        "std_clients": "std of clients",
        "worst_10_percent": "worst 10 %",
    }
    table.add_column("")
    for heading in columns.values():
        table.add_column(heading, justify="right")
    for point in ("pre", "post"):
        scores = summary["personal"][point]
        mark = " *" if point == summary["headline"] else ""
        table.add_row(point.upper() + mark, *(f"{100 * scores[column]:.2f}" for column in columns))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    if summary["new_clients"] is not None:
        new = summary["new_clients"]
        scored = ", ".join(f"{point.upper()} {100 * new[point]['last']:.2f}" for point in ("pre", "post"))
        console.print(f"new clients, which never trained: {scored}", highlight=False)
    if summary["global"] is not None:
        scored = f"{100 * summary['global']:.2f} %"
        hm = ", ".join(
            f"{point.upper()} {100 * summary['personal'][point]['hm_last']:.2f}" for point in ("pre", "post")
        )
        console.print(
            f"global model on the pooled {summary['evaluated_on']} set: {scored}\n"
            f"harmonic mean of it and I_local (accuracy and macro-F1 of the clients): {hm}",
            highlight=False,
        )
    timing, traffic = summary["timing"], summary["traffic"]
    console.print(
        f"{timing['seconds_per_round']:.3f} s per round, {timing['compile_seconds']:.1f} s compilation, "
        f"{timing['total_seconds']:.1f} s in all; {traffic['megabytes_total']:.1f} MB exchanged",
        highlight=False,
    )


def _print_partition(shares: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="samples per client and class", title_justify="left")
    classes = len(shares["class_counts"][0])
    for heading in ("client", "size", "train", "test", *map(str, range(classes))):
        table.add_column(heading, justify="right")
    rows = zip(shares["sizes"], shares["n_train"], shares["n_test"], shares["class_counts"], strict=True)
    for client, (size, n_train, n_test, counts) in enumerate(rows):
        table.add_row(str(client), str(size), str(n_train), str(n_test), *(str(n) if n else "·" for n in counts))
    console = Console(width=None if sys.stdout.isatty() else 40 + 8 * classes)
    console.print(table)
    for note in shares["notes"]:
        console.print(f"note: {note}", highlight=False)
    console.print(f"hash {shares['hash']}", highlight=False)


def _print_table(table: dict[str, Callable[..., Any]]) -> None:
    for name, factory in table.items():
        print(f"{name:12} {(inspect.getdoc(factory) or '').splitlines()[0]}")
