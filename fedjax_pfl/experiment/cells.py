"""Runs the runs of a comparison or sweep, in as few programs as their shapes allow."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedjax_pfl.data.dataset import Dataset, fingerprint
from fedjax_pfl.data.dealing import counted
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.build import dataset_of, deal
from fedjax_pfl.experiment.config import Config, check_config
from fedjax_pfl.experiment.executors import Executor, check_executor, name_and_options, run_programs
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.experiment.loggers import check_tensorboard
from fedjax_pfl.experiment.process import prepare
from fedjax_pfl.experiment.programs import alike
from fedjax_pfl.experiment.record import RunDirectory
from fedjax_pfl.experiment.resume import RunPlace
from fedjax_pfl.experiment.saved import check_same_data, check_same_rows, complete_run
from fedjax_pfl.experiment.summary import POINTS
from fedjax_pfl.experiment.tables import Cell
from fedjax_pfl.experiment.worker import Outcome


def run_cells(
    cells: Sequence[Cell],
    data: Any,
    write: Callable[[list[Cell]], None],
    progress: Callable[[str], None] | None,
    executor: Executor,
) -> list[Cell]:
    """Runs the cells that are not complete yet; returns all cells with their results.

    Args:
      cells: the runs, before any of them is run.
      data: as in `simulate`.
      write: called after each program with all runs that are done, in the order of the cells.
      progress: called with a line of text from time to time.
      executor: where programs run, as in `sweep`.

    Raises:
      ConfigError: the directory of a cell holds another run, or no run is possible, all for the same reason.
    """
    done: dict[int, Cell] = {}
    for number, cell in enumerate(cells):
        complete = complete_run(cell.config)
        if complete is not None:
            summary, history, clients = complete
            done[number] = cell._replace(summary=summary, history=history, clients=clients)

    def in_order() -> list[Cell]:
        return [done[number] for number in sorted(done)]

    if done and progress:
        progress(f"{len(done)} of {len(cells)} runs are complete: they are read, not run again")
    missing = [number for number in range(len(cells)) if number not in done]
    if data is not None or missing:  # else nothing is loaded
        _check_done_have_this_data([cell.config for cell in done.values()], data)
    if not missing:
        write(in_order())
    elif not done and name_and_options(executor)[0] == "local":
        _check_not_all_are_refused([cell.config for cell in cells], data)
    for places, outcome in run_configs([cells[number].config for number in missing], data, progress, executor):
        for place, ended in zip(places, outcome, strict=True):
            found = {"error": ended} if isinstance(ended, str) else ended._asdict()
            done[missing[place]] = cells[missing[place]]._replace(**found)
        write(in_order())
    return in_order()


def _check_done_have_this_data(configs: Sequence[Config], data: Any) -> None:
    """Checks that the complete runs had the same samples, and rows of a file, as the other runs would have."""
    loaded: dict[str, tuple[Dataset, str]] = {}
    dealt: dict[str, str] = {}
    for config in configs:
        source, partition, folder = config.data.source, config.data.partition, Path(str(config.run.out))
        if source not in loaded:
            dataset = dataset_of(config, data)
            loaded[source] = dataset, fingerprint(dataset)
        dataset, samples = loaded[source]
        check_same_data(folder, samples, "out")
        if partition["kind"] == "indices":
            asked = str((config.data, config.partition_seed))
            if asked not in dealt:
                dealt[asked] = deal(config, dataset)[1]["hash"]
            check_same_rows(folder, dealt[asked], partition["file"])


def _check_not_all_are_refused(configs: Sequence[Config], data: Any) -> None:
    """Raises an error that concerns all of these configs, such as missing data, before any is run."""
    refused: dict[str, ConfigError] = {}
    for config in configs:
        try:
            prepare(config.run)
            dataset = dataset_of(config, data)
            RunPlace(config, go_on=True)
            lay_out([config], dataset)
        except ConfigError as error:
            refused[str(error)] = error
        except Warning:  # which the caller's filters make an error
            raise
        except Exception:  # whatever a user's part does is reported with its run
            return
        else:
            return
        if len(refused) > 1:
            return
    raise next(iter(refused.values()))


def run_configs(
    configs: Sequence[Config],
    data: Any = None,
    progress: Callable[[str], None] | None = None,
    executor: Executor = "local",
) -> Iterator[tuple[list[int], Outcome]]:
    """Runs configs in as few programs as shapes allow; yields the indices of a program's configs, and its outcome."""
    indices = _programs(configs)

    def report(program: int, line: str) -> None:
        if progress:
            of = [configs[index] for index in indices[program]]
            runs = counted(len(of), "run")
            progress(f"program {program + 1} of {len(indices)} ({of[0].method['name']}, {runs}): {line}")

    if indices:
        to_run = [[configs[index] for index in of] for of in indices]
        for program, outcome in run_programs(executor, to_run, data, report):
            yield indices[program], outcome


def _programs(configs: Sequence[Config]) -> list[list[int]]:
    """The indices of the configs of each program.

    The runs of a program begin in the same round, so a run without a checkpoint of that round is in another one.
    """
    programs: dict[str, list[tuple[set[int], list[int]]]] = {}
    for index, config in enumerate(configs):
        beginnings = RunPlace(config, go_on=True).beginnings()
        of_shape = programs.setdefault(alike(config), [])
        for number, (shared, indices) in enumerate(of_shape):
            if shared & beginnings:
                of_shape[number] = shared & beginnings, [*indices, index]
                break
        else:
            of_shape.append((beginnings, [index]))
    return [indices for of_shape in programs.values() for _, indices in of_shape]


def check_point(point: str) -> str:
    """The name of an evaluation point, checked.

    Raises:
      ConfigError: there is no such point.
    """
    if point not in POINTS:
        raise ConfigError("point", point, "pre (after aggregation) or post (after local training)")
    return point


def check_lines(progress: Any) -> None:
    """Checks what is to report the progress of several runs.

    Raises:
      ConfigError: it cannot be called.
    """
    if progress is not None and not callable(progress):
        raise ConfigError("progress", progress, "None or a function of a line of text, such as print")


def folder_of(config: Config, out: str | os.PathLike[str] | None, executor: Executor) -> Path | None:
    """The folder of a sweep's or comparison's runs, with the checks that are possible before any run.

    Raises:
      ConfigError: this is no config, the executor cannot be used, ``out`` is a file or the directory of a single run,
        or the config asks for files without ``out``.
    """
    check_config(config)
    out = None if out is None else os.path.expanduser(out)
    if out == "":
        raise ConfigError("out", out, "a folder; . is the working directory")
    check_executor(executor, out)
    if out is None and config.run.out is not None:
        raise ConfigError("run.out", config.run.out, 'leave it out, and give out="...", a folder for all runs')
    if config.run.tensorboard:
        check_tensorboard(out, "out")
    if out is None:
        for field in ("checkpoint_every", "export", "client_history"):
            if asked := getattr(config.run, field):
                raise ConfigError(f"run.{field}", asked, "nothing without out, a folder for what each run leaves")
        return None
    of_one = RunDirectory(out, resume=True)  # raises where it is a file
    if of_one.started and of_one.begun:
        raise ConfigError("out", str(out), "a folder for many runs: this is the run directory of a single one")
    # Elsewhere, the working directory may be another one.
    return Path(out) if name_and_options(executor)[0] == "local" else Path(out).absolute()
