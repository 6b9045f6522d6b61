"""The command line, ``fedjax-pfl``: its commands, in the order of its help, and how it ends."""

import importlib.metadata
import os
import signal
import sys
from typing import Annotated, Any

import typer

from fedjax_pfl.cli import looking, running
from fedjax_pfl.cli.running import INTERRUPTED
from fedjax_pfl.errors import ConfigError

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
for command in (
    running.run,
    running.compare,
    running.sweep,
    running.tune,
    looking.partition,
    looking.plot,
    looking.report,
    looking.methods,
    looking.models,
    looking.partitions,
    looking.datasets,
    looking.describe,
    looking.ls,
    looking.init,
    looking.schema,
):
    app.command()(command)


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


# What Typer raises for a command line that it cannot read; it exports this class's children alone.
_UsageError: Any = typer.BadParameter.__base__


def main() -> None:
    """Entry point: bad input is one line on stderr and exit code 2."""
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], prog_name="fedjax-pfl", standalone_mode=False))
    except (KeyboardInterrupt, typer.Abort):
        _leave(INTERRUPTED)
    except SystemExit as end:
        if end.code in (INTERRUPTED, 128 + signal.SIGTERM):
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
