"""``sweep(config, grid)``: a run for every combination of some fields, in as few programs as their shapes allow.

Runs that differ in nothing but their seed and in numbers that no shape depends on become rows of one program, compiled
once: on a CPU every core takes its share of them, on an accelerator they run side by side.
"""

import csv
import io
import itertools
import json
import math
import os
import time
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jaxtyping import Array, Float, UInt32

from fedjax_pfl.build import divide, make_engine, prepare_devices
from fedjax_pfl.checkpoint import check_alike
from fedjax_pfl.config import Config, load_config
from fedjax_pfl.data.federated import Clients, Federation
from fedjax_pfl.data.sources import Dataset, from_arrays, load
from fedjax_pfl.engine import Engine, Placement, Run, map_clients
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.evaluate import Scores
from fedjax_pfl.memory import available, estimate, exchange
from fedjax_pfl.method import Static
from fedjax_pfl.methods import METHODS
from fedjax_pfl.record import RunDirectory, write_atomically
from fedjax_pfl.report import NONE, figures_of, mean_and_spread, paired_p
from fedjax_pfl.report import grid as markdown_table
from fedjax_pfl.simulation import client_table, environment, line_scores, summary_of, traffic_summary

SEED = "run.seed"
_TRAINING_NUMBERS = ("lr", "lr_decay", "momentum", "weight_decay", "clip_norm")
# A value of one of these brings a table of options of its own.
_SELECTORS = ("method.name", "model.name", "data.partition.kind")
_COLUMNS = {
    "headline": "judged by",
    "pre": "PRE",
    "post": "POST",
    "best": "best",
    "worst_10_percent": "worst 10 %",
    "global": "global",
}


class Cell(NamedTuple):
    """One run of a sweep.

    Attributes:
      values: field -> value, of the fields in the grid.
      config: its config.
      summary: what ``summary.json`` says; None where the run failed.
      error: why it failed.
    """

    values: dict[str, Any]
    config: Config
    summary: dict[str, Any] | None = None
    error: str | None = None


class Sweep(NamedTuple):
    """All runs of a sweep, in the order of the grid.

    Attributes:
      cells: one per combination.
      baseline: the values, without the seed, of the runs that the t-test compares with.
    """

    cells: list[Cell]
    baseline: dict[str, Any]

    @property
    def failed(self) -> list[Cell]:
        """The runs that failed."""
        return [cell for cell in self.cells if cell.summary is None]

    def rows(self) -> list[dict[str, Any]]:
        """The tidy table: a row per run with the fields of the grid, the figures of `report.figures_of`, any error."""
        return [
            {**cell.values, **(figures_of(cell.summary) if cell.summary else {}), "error": cell.error}
            for cell in self.cells
        ]

    def csv(self) -> str:
        """The tidy table; what a run does not have stays empty."""
        rows = [{name: "" if _is_nan(value) else value for name, value in row.items()} for row in self.rows()]
        text = io.StringIO()
        writer = csv.DictWriter(text, list(dict.fromkeys(itertools.chain(*rows))), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def markdown(self) -> str:
        """Mean and sample standard deviation over seeds of each combination, the best headline in bold."""
        combinations: dict[str, dict[int, Cell]] = {}
        for cell in self.cells:
            seeds = combinations.setdefault(_show(_without_seed(cell.values)), {})
            if cell.summary:
                seeds[cell.config.run.seed] = cell
        judged = {name: _by_seed(cells, "headline") for name, cells in combinations.items()}
        means = {name: np.mean(list(values.values())) for name, values in judged.items() if values}
        best = max(means, key=lambda name: means[name], default=None)
        base = _show(self.baseline)
        rows = []
        for name, cells in combinations.items():
            p = None if name == base else paired_p(judged[name], judged.get(base, {}))
            percents = {
                figure: mean_and_spread([100 * value for value in _by_seed(cells, figure).values() if value == value])
                for figure in _COLUMNS
            }
            if name == best:
                percents["headline"] = f"**{percents['headline']}**"
            rows.append([name or "all", str(len(cells)), *percents.values(), NONE if p is None else f"{p:.3g}"])
        legend = (
            "Accuracy in %, unweighted mean over clients, after the last round; mean over seeds ± sample standard "
            "deviation. Judged by: PRE, after aggregation, or POST, after local training, as the method has it; best "
            "(of the evaluated rounds) and worst 10 % likewise. p: two-sided paired t-test over seeds against "
            f"{base or 'all'}."
        )
        failed = [f"**Failed**: {_show(cell.values)}: {cell.error}" for cell in self.failed]
        return "\n\n".join([legend, markdown_table(["run", "seeds", *_COLUMNS.values(), "p"], rows), *failed]) + "\n"


def sweep(
    config: Config,
    grid: Mapping[str, Sequence[Any]],
    *,
    baseline: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | None = None,
    data: Sequence[np.ndarray] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Sweep:
    """Runs every combination of the values in a grid.

    Runs that differ in the seed, in numbers of ``training`` (``lr``, ``lr_decay``, ``momentum``, ``weight_decay``,
    ``clip_norm``) and in the method's real-valued hyperparameters share a program; each gives what `simulate` would
    give on its own, up to float rounding. Other fields make programs of their own.

    Args:
      config: what all runs share.
      grid: dotted field -> values, e.g. ``{"training.lr": [0.01, 0.1], "run.seed": [0, 1, 2]}``.
      baseline: the values, without the seed, of the runs that the t-test compares with; the first combination unless
        given.
      out: a folder for run directories, ``sweep.csv`` (and ``sweep.parquet`` where pyarrow is installed) and
        ``sweep.md``. Complete runs that are found there are not run again. Nothing is written unless given.
      data: as in `simulate`.
      progress: called with a line of text when a program starts, has evaluated a round, and ends.

    Returns:
      The runs; one that failed is reported among them and does not stop the others.

    Raises:
      ConfigError: a field or value that no config can have, or a run directory holds another run; raised before
        anything is run.
    """
    prepare_devices(config.run.placement)
    cells = [Cell(values, _configure(config, values, out)) for values in _combinations(grid)]
    chosen = dict(baseline) if baseline is not None else _without_seed(cells[0].values)
    if all(_without_seed(cell.values) != chosen for cell in cells):
        raise ConfigError("baseline", _show(chosen), "one of the combinations in the grid, without the seed")
    done = {number: found for number, cell in enumerate(cells) if (found := _found(cell)) is not None}

    def result() -> Sweep:
        return Sweep([done[number] for number in sorted(done)], chosen)

    def write() -> None:
        if out is not None:
            write_atomically(Path(out) / "sweep.csv", result().csv())
            write_atomically(Path(out) / "sweep.md", result().markdown())

    for numbers in _programs(cells, set(done)):
        try:
            dataset = load(cells[numbers[0]].config.data.source) if data is None else from_arrays(*data)
            summaries = _run_together([cells[number].config for number in numbers], dataset, progress)
            done |= {number: cells[number]._replace(summary=s) for number, s in zip(numbers, summaries, strict=True)}
        except ConfigError as error:
            done |= {number: cells[number]._replace(error=str(error)) for number in numbers}
        write()
    write()
    if out is not None:
        _write_parquet(Path(out) / "sweep.parquet", result().rows())
    return result()


def load_sweep(
    path: str | os.PathLike[str],
) -> tuple[Config, dict[str, list[Any]], dict[str, Any] | None]:
    """Reads a sweep file: ``config``, a path beside it; ``overrides``; tables ``grid`` and, if wanted, ``baseline``.

    Returns:
      Config, grid and baseline, as `sweep` takes them.

    Raises:
      ConfigError: the file is missing or no TOML, or what it says cannot be used.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("sweep file", str(path), f"cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("sweep file", str(path), f"not valid TOML: {error}") from None
    unknown = sorted(tables.keys() - {"config", "overrides", "grid", "baseline"})
    if unknown or not isinstance(tables.get("config"), str) or not isinstance(tables.get("grid"), dict):
        given = ", ".join(unknown or tables)
        raise ConfigError("sweep file", given, "config (a path) and a table grid; optional: overrides, baseline")
    config = load_config(Path(path).parent / tables["config"], tables.get("overrides", []))
    chosen = tables.get("baseline")
    return config, _dotted(tables["grid"]), None if chosen is None else _dotted(chosen)


def _dotted(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in tables.items():
        fields |= _dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return fields


def _combinations(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    if not grid:
        raise ConfigError("grid", {}, "one field or more, each with a list of values")
    for field, values in grid.items():
        listed = isinstance(values, Sequence) and not isinstance(values, str)
        if not listed or not values or any(value in values[:at] for at, value in enumerate(values)):
            raise ConfigError(f"grid.{field}", values, "a list of one value or more, each of them once")
        if field.startswith("run.") and field != SEED:
            raise ConfigError(f"grid.{field}", values, f"of the run table, {SEED} alone changes numbers")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _configure(config: Config, values: Mapping[str, Any], out: str | os.PathLike[str] | None) -> Config:
    """The config of a combination."""
    tables = config.model_dump()
    for field in sorted(values, key=lambda field: field not in _SELECTORS):  # these first: they bring their defaults
        *sections, key = field.split(".")
        if not sections:
            raise ConfigError(f"grid.{field}", values[field], "a dotted field such as training.lr")
        table: dict[str, Any] = tables
        for section in sections:
            if not isinstance(table.get(section), dict):
                allowed = f"a field of the config; {section} is none of its tables"
                raise ConfigError(f"grid.{field}", values[field], allowed)
            table = table[section]
        if field in _SELECTORS and table[key] != values[field]:
            table.clear()
        table[key] = values[field]
    tables["run"]["out"] = None if out is None else str(Path(out) / _folder(values))
    return Config(**tables)


def _found(cell: Cell) -> Cell | None:
    """The cell with the summary of the complete run in its directory, if there is one."""
    folder = cell.config.run.out
    if folder is None or not (Path(folder) / "config.toml").exists():
        return None
    check_alike(load_config(Path(folder) / "config.toml"), cell.config, folder)
    path = Path(folder) / "summary.json"
    if not path.exists():
        return None
    summary = json.loads(path.read_text(encoding="utf-8"))
    if summary["rounds"] != cell.config.training.rounds:
        allowed = f"{summary['rounds']}, as in the complete run in {folder}"
        raise ConfigError("training.rounds", cell.config.training.rounds, allowed)
    return cell._replace(summary=summary)


def _programs(cells: Sequence[Cell], done: set[int]) -> list[list[int]]:
    """The numbers of the cells that are still to be run, by the program that they are rows of."""
    programs: dict[str, list[int]] = {}
    for number, cell in enumerate(cells):
        if number not in done:
            tables = cell.config.model_dump(mode="json")
            tables["run"] |= {"seed": None, "out": None}
            for field in _numbers(cell.config):
                section, _, key = field.partition(".")
                tables[section][key] = None
            programs.setdefault(json.dumps(tables, sort_keys=True), []).append(number)
    return list(programs.values())


def _numbers(config: Config) -> dict[str, float]:
    """The numbers of a config that a program can take as input."""
    numbers: dict[str, Any] = {f"training.{name}": getattr(config.training, name) for name in _TRAINING_NUMBERS}
    hints = typing.get_type_hints(METHODS[config.method["name"]], include_extras=True)
    numbers |= {f"method.{name}": value for name, value in config.method.items() if _is_number(hints.get(name))}
    return {field: value for field, value in numbers.items() if value is not None}


def _is_number(hint: Any) -> bool:
    """Whether a hyperparameter of this type is a real number that no shape depends on."""
    if typing.get_origin(hint) is Annotated:
        return Static not in hint.__metadata__ and _is_number(hint.__origin__)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
        return all(map(_is_number, kinds))
    return hint is float


class _Row(NamedTuple):
    """One run in a program of several.

    Attributes:
      keys: of the initial state and of the rounds, as raw data.
      values: the numbers in which it differs from the others.
      clients: who trains on, validates on and is tested on what; and the pooled test set.
    """

    keys: UInt32[Array, "*runs 2 words"]
    values: dict[str, Float[Array, "*runs"]]
    clients: tuple[Clients | None, ...]


def _run_together(
    configs: Sequence[Config], dataset: Dataset, progress: Callable[[str], None] | None
) -> list[dict[str, Any]]:
    """Runs configs that differ in seed and numbers only, as rows of one program, and gives their summaries."""
    began = time.perf_counter()
    first, rounds = configs[0], configs[0].training.rounds
    numbers = [_numbers(config) for config in configs]
    swept = {field: [found[field] for found in numbers] for field in numbers[0]}
    swept = {field: values for field, values in swept.items() if len(set(values)) > 1}
    federations, shares = zip(*_divisions(configs, dataset), strict=True)
    x, y = federations[0].x, federations[0].y
    keys = [jax.random.key_data(jax.random.split(jax.random.key(config.run.seed))) for config in configs]
    rows = _Row(
        jnp.stack(keys),
        {field: jnp.asarray(values, jnp.float32) for field, values in swept.items()},
        _stack([federation[2:] for federation in federations]),
    )
    engine = make_engine(first, dataset)
    key = jax.random.key(first.run.seed)
    memory = estimate(engine, key, federations[0])
    exchanged = exchange(engine, key, federations[0])
    placement = _place(len(configs), memory.resident + memory.per_client)
    fill = placement.padded(len(configs)) - len(configs)  # the last one once more
    rows = jax.tree.map(lambda leaf: jnp.concatenate([leaf, *[leaf[-1:]] * fill]), rows)

    def one(row: _Row, x: Array, y: Array) -> tuple[Engine, Array, Array, Federation]:
        key_init, key_rounds = jax.random.wrap_key_data(row.keys)
        federation = Federation(x, y, *row.clients)  # type: ignore[arg-type]  # the fields after x and y, in order
        return make_engine(first, dataset, row.values), key_init, key_rounds, federation

    def init(shared: tuple, row: _Row) -> Run:
        engine, key_init, _, federation = one(row, *shared)
        return engine.init(key_init, federation)

    def some_rounds(shared: tuple, row: tuple[_Row, Run]) -> Run:
        x, y, start, stop = shared
        engine, _, key_rounds, federation = one(row[0], x, y)
        return engine.rounds(key_rounds, row[1], start, stop, jnp.array(True), federation)

    def scores(shared: tuple, row: tuple[_Row, Run]) -> tuple[tuple[Scores, Scores], Scores | None]:
        x, y, t = shared
        engine, _, key_rounds, federation = one(row[0], x, y)
        run = row[1]
        shared_model = engine.global_scores(run.state, federation) if engine.method.global_predict else None
        points = engine.pre(key_rounds, t, run.state, federation), engine.post(key_rounds, t, run, federation)
        return points, shared_model

    def program(fn: Callable) -> Any:
        return jax.jit(lambda rows, shared: map_clients(fn, shared, rows, placement))

    records = [
        RunDirectory(config.run.out, overwrite=_begun(config.run.out)) if config.run.out else None for config in configs
    ]
    for record, config, share in zip(records, configs, shares, strict=True):
        if record:
            record.begin(config.to_toml(), share)
    say = progress or (lambda line: None)
    say(f"{len(configs)} runs in one program: compiling")
    run = jax.block_until_ready(program(init)(rows, (x, y)))
    step, score = program(some_rounds), program(scores)
    lines: list[list[dict[str, Any]]] = [[] for _ in configs]
    t, round_seconds, compile_seconds = 0, 0.0, time.perf_counter() - began
    while t < rounds:
        stop = min(rounds, t + first.run.eval_every)
        started = time.perf_counter()
        if t == 0:
            step = step.lower((rows, run), (x, y, jnp.int32(0), jnp.int32(stop))).compile()
            compile_seconds += time.perf_counter() - started
            started = time.perf_counter()
        run = jax.block_until_ready(step((rows, run), (x, y, jnp.int32(t), jnp.int32(stop))))
        round_seconds += time.perf_counter() - started
        t = stop
        points, shared_model = score((rows, run), (x, y, jnp.int32(t)))
        for number, share in enumerate(shares):
            found = jax.tree.map(lambda leaf, number=number: np.asarray(leaf[number]), (points, shared_model, run))
            (pre, post), of_all, now = found
            of_all = (None, None) if of_all is None else (float(of_all.accuracy), float(of_all.macro_f1))
            n_test = np.asarray(share[f"n_{first.data.evaluate_on}"])
            lines[number].append(
                {
                    "round": t,
                    "train_loss": float(now.loss),
                    **line_scores(pre, post, of_all, n_test, engine.new),
                    "megabytes": exchanged.sent_bytes(now.traffic) / 1e6,
                    "seconds": (time.perf_counter() - began) / len(configs),
                }
            )
            if (record := records[number]) is not None:
                record.append(lines[number][-1])
        say(f"round {t}/{rounds} of {len(configs)} runs, {time.perf_counter() - began:.0f} s")

    summaries = []
    for number, (config, share, record) in enumerate(zip(configs, shares, records, strict=True)):
        (pre, post), last = jax.tree.map(lambda leaf, number=number: np.asarray(leaf[number]), (points, run))
        timing = {
            "runs_in_the_program": len(configs),
            "compile_seconds": compile_seconds / len(configs),
            "seconds_per_round": round_seconds / rounds / len(configs),
            "total_seconds": (time.perf_counter() - began) / len(configs),
        }
        traffic = traffic_summary(exchanged, last.traffic)
        space = {"estimate_bytes": memory.resident + memory.per_client, **memory._asdict()}
        where = environment(placement)
        named = config, engine.method.headline, engine.new, dataset.name
        summary = summary_of(*named, share, lines[number], timing, traffic, space, where)
        if record:
            record.finish(client_table(share, config.data.evaluate_on, pre, post, engine.new), summary)
        summaries.append(summary)
    return summaries


def _divisions(configs: Sequence[Config], dataset: Dataset) -> list[tuple[Federation, dict[str, Any]]]:
    """Federation and manifest of each config; those with the same seed of the partition share one."""
    made: dict[int, tuple[Federation, dict[str, Any]]] = {}
    for config in configs:
        seed = config.run.seed if config.data.seed is None else config.data.seed
        if seed not in made:
            made[seed] = divide(config, dataset)
    return [made[config.run.seed if config.data.seed is None else config.data.seed] for config in configs]


def _stack(tables: Sequence[tuple[Clients | None, ...]]) -> tuple[Clients | None, ...]:
    """Index tables of several federations on one axis, padded to the largest; padding changes no number."""

    def stack(parts: Sequence[Clients]) -> Clients:
        rows = max(len(part.count) for part in parts)
        capacity = max(part.index.shape[1] for part in parts)
        padded = [
            Clients(
                jnp.pad(part.index, ((0, rows - len(part.count)), (0, capacity - part.index.shape[1]))),
                jnp.pad(part.count, (0, rows - len(part.count))),
                jnp.pad(part.class_counts, ((0, rows - len(part.count)), (0, 0))),
            )
            for part in parts
        ]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *padded)

    columns = zip(*tables, strict=True)
    return tuple(None if column[0] is None else stack([part for part in column if part]) for column in columns)


def _place(runs: int, bytes_per_run: int) -> Placement:
    """Where the runs of a program go: spread over cores one by one, or side by side on accelerators."""
    devices = min(jax.local_device_count(), runs)
    if available() * devices < runs * bytes_per_run:
        need, have = runs * bytes_per_run / 1e9, available() * devices / 1e9
        raise ConfigError(
            "grid", f"{runs} runs", f"fewer at once: they need about {need:.2f} GB, there are {have:.2f} GB"
        )
    chunk = 1 if jax.default_backend() == "cpu" else math.ceil(runs / devices)
    mesh = jax.make_mesh((devices,), ("clients",), (AxisType.Auto,), devices=jax.local_devices()[:devices])
    return Placement(mesh if devices > 1 else None, chunk)


def _begun(folder: str) -> bool:
    return (Path(folder) / "config.toml").exists()


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def _by_seed(cells: Mapping[int, Cell], figure: str) -> dict[int, float]:
    return {seed: figures_of(cell.summary)[figure] for seed, cell in cells.items() if cell.summary}


def _without_seed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in values.items() if field != SEED}


def _show(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{field}={value}" for field, value in values.items())


def _folder(values: Mapping[str, Any]) -> str:
    """A run directory's name, as readable as file systems allow."""
    name = ",".join(f"{field}={value}" for field, value in values.items())
    return "".join(letter if letter.isalnum() or letter in "=,._-+" else "_" for letter in name)


def _is_nan(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
