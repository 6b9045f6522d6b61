"""What commands are given: config, overrides, options, and the folder that they write to.

Heavy modules are imported inside the functions, so that ``--help`` answers at once.
"""

import itertools
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedjax_pfl.errors import ConfigError

if TYPE_CHECKING:
    from fedjax_pfl.experiment.config import Config

ConfigFile = Annotated[Path, typer.Argument(help="A TOML config.", metavar="CONFIG.toml", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Fields to change, e.g. training.lr=0.01", metavar="SECTION.KEY=VALUE")
]


def read_config(path: Path, overrides: list[str] | None, out: str | None) -> "Config":
    """The config in a file, with overrides; ``out`` becomes its ``run.out`` if it is given."""
    from fedjax_pfl.experiment.reading import load_config

    loaded = load_config(path, overrides or [])
    return loaded if out is None else loaded.replace({"run.out": out})


@contextmanager
def folder_for(given: str | None, name: str, field: str = "--out") -> Iterator[str]:
    """Where a command writes: the given folder, or a new one under runs/, which goes again if it stays empty.

    Args:
      given: the folder that the user has named, if any.
      name: how the name of a new one begins; time and, where others start in the same second, a number follow.
      field: the field of errors.

    Raises:
      ConfigError: the given folder is a file, or a new one cannot be created.
    """
    from fedjax_pfl.experiment.distributed import is_first
    from fedjax_pfl.experiment.folders import check_folder, writable

    if given == "":
        raise ConfigError(field, given, "a folder, or leave it out")
    if given is not None:
        given = os.path.expanduser(given)  # which a shell leaves as it is in --out=~/a
        check_folder(Path(given), field)
        yield given
        return
    folder = wanted = Path("runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    with writable(folder, field):
        folder.parent.mkdir(exist_ok=True)
        for number in itertools.count(2):
            with suppress(FileExistsError):
                if is_first():  # of the processes of a run, the others write nothing
                    folder.mkdir()
                break
            folder = Path(f"{wanted}-{number}")
    try:
        yield str(folder)
    finally:
        with suppress(OSError):  # it holds something
            os.removedirs(folder)


def check_in_use(overrides: list[str] | None, instead: Mapping[str, str]) -> None:
    """Checks that no override is of a field that this command does not read.

    Args:
      overrides: ``section.key=value`` strings.
      instead: field -> what is to be given in its place.

    Raises:
      ConfigError: one is.
    """
    for override in overrides or ():
        if (field := override.partition("=")[0].strip()) in instead:
            raise ConfigError("override", override, instead[field])


def compared(methods: str, change: list[str] | None) -> dict[str, dict[str, Any]]:
    """The methods to compare, with what `compare` takes of each.

    Args:
      methods: names, separated by commas; ``name=method`` for a variant; ``all`` for all methods.
      change: ``method.key=value`` strings.

    Raises:
      ConfigError: a name is there twice, or a change is of none of them.
    """
    from fedjax_pfl.experiment.registry import load_entry_points
    from fedjax_pfl.methods import METHODS

    if methods == "all":
        load_entry_points()
    given = list(METHODS) if methods == "all" else methods.split(",")
    options: dict[str, dict[str, Any]] = {}
    for name, equals, of in (each.partition("=") for each in given):
        options[name.strip()] = {"method": of.strip()} if equals else {}
    if len(options) < len(given):
        names = [each.partition("=")[0].strip() for each in given]
        raise ConfigError("methods", names, "one or more, each of them once")
    for each in change or ():
        method, key, value = _setting(each, list(options))
        options[method][key] = value
    return options


def _setting(given: str, methods: list[str]) -> tuple[str, str, Any]:
    """Method, hyperparameter and value of ``method.key=value``."""
    from fedjax_pfl.experiment.reading import parse_field

    field, equals, text = given.partition("=")
    field = field.strip()
    # The longest one: a variant's name may have a dot, and begin as another's does.
    method = max((name for name in methods if field.startswith(f"{name}.")), key=len, default=None)
    key = field.partition(".")[2] if method is None else field.removeprefix(f"{method}.")
    if not (equals and key):
        raise ConfigError("--set", given, "expected method.key=value, e.g. fedprox.mu=0.1")
    if method is None:
        raise ConfigError("--set", given, f"one of the methods compared: {', '.join(methods)}")
    return method, key, parse_field(field, text.strip())


def executor_of(name: str, job: list[str] | None) -> dict[str, Any]:
    """Where programs run, as `sweep` takes it."""
    return {"name": name, **dict(_job_option(given) for given in job or ())}


def _job_option(given: str) -> tuple[str, Any]:
    """Key and value of ``key=value``."""
    from fedjax_pfl.experiment.reading import parse_value

    key, equals, text = given.partition("=")
    if not (equals and key.strip()) or key.strip() == "name":
        raise ConfigError("--job", given, "expected key=value, e.g. timeout_min=240")
    return key.strip(), parse_value(text.strip())
