"""The commands that run no experiment: they show partitions and runs, and look things up.

Heavy modules are imported inside the functions, so that ``--help`` answers at once.
"""

import json
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedjax_pfl.cli.given import ConfigFile, Overrides, read_config
from fedjax_pfl.errors import ConfigError


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


def methods() -> None:
    """List the methods."""
    from fedjax_pfl.cli.printing import print_table
    from fedjax_pfl.experiment.registry import load_entry_points
    from fedjax_pfl.methods import METHODS

    load_entry_points()
    print_table(METHODS)


def models() -> None:
    """List the models."""
    from fedjax_pfl.cli.printing import print_table
    from fedjax_pfl.experiment.registry import load_entry_points
    from fedjax_pfl.models import MODELS

    load_entry_points()
    print_table(MODELS)


def partitions() -> None:
    """List the kinds of partition."""
    from fedjax_pfl.cli.printing import print_table
    from fedjax_pfl.data.partition import PARTITIONS
    from fedjax_pfl.experiment.registry import load_entry_points

    load_entry_points()
    print_table(PARTITIONS)


def datasets() -> None:
    """List the data sources."""
    from fedjax_pfl.data.sources import SOURCES
    from fedjax_pfl.experiment.registry import load_entry_points

    load_entry_points()
    for name, (_, description) in SOURCES.items():
        print(f"{name:12} {description}")


def describe(name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Describe a method, model, config field or other name.

    NAME is that of a method, model, partition, data source, protocol, or of a section or field of a config.
    """
    from fedjax_pfl.cli.describing import described

    print(described(name))


def ls(
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


def schema() -> None:
    """Print the JSON schema of a config file, for editors of TOML."""
    from fedjax_pfl.experiment.schema import config_schema

    print(json.dumps(config_schema(), indent=2))
