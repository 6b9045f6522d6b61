import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

from fedjax_pfl import METHODS
from fedjax_pfl.cli.commands import app
from fedjax_pfl.data.sources import SOURCES
from fedjax_pfl.models import MODELS

QUICK = """
[data]
source = "digits"
clients = 4
partition = { kind = "iid" }
[model]
name = "mlp"
hidden = 4
[method]
name = "fedavg"
[training]
rounds = 2
[run]
compilation_cache = "off"
"""


@pytest.fixture
def quick(tmp_path):
    path = tmp_path / "quick.toml"
    path.write_text(QUICK, encoding="utf-8")
    return path


def command(*arguments, first=""):
    """Runs the installed command, after a statement if there is one, in a process of its own, as a user does."""
    program = f"{first}\nfrom fedjax_pfl.cli.commands import main; main()"
    environment = {key: value for key, value in os.environ.items() if key != "FEDJAX_PFL_DATA"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(jax.config.values["jax_disable_most_optimizations"]))
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_run_prints_plain_lines_and_a_table_and_writes_the_run_directory(quick, tmp_path):
    done = command("run", quick, "method.name=local", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "local on digits: 4 clients" in done.stdout
    assert "round 2/2" in done.stdout
    assert "POST *" in done.stdout
    assert "\x1b" not in done.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["method"] == "local"
    assert summary["global"] is None
    assert "harmonic mean" not in done.stdout
    refused = command("run", quick, "--out", tmp_path / "out")
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert "--overwrite" in refused.stderr
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary


def test_a_global_models_accuracy_and_harmonic_means_stand_below_the_table(quick, tmp_path):
    result = invoke("run", quick, "--out", tmp_path / "out")
    assert result.exit_code == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    pre, post = (100 * summary["personal"][point]["hm_last"] for point in ("pre", "post"))
    assert f"pooled test set: {100 * summary['global']:.2f} %\n" in result.output
    assert f"PRE {pre:.2f}, POST {post:.2f}\n" in result.output


def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(quick):
    done = command("run", quick, "training.lr=-1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: training.lr = -1 is not usable: input should be greater than 0\n"


@pytest.mark.parametrize(("end", "code"), [("KeyboardInterrupt", 130), ("SystemExit(143)", 143)])
def test_an_interruption_says_how_to_go_on_and_is_the_exit_code(end, code, quick, tmp_path):
    # A thread still at work, as XLA's are, would otherwise keep the process alive.
    first = f"""
import threading, time, fedjax_pfl.experiment.driver as simulation
def simulate(*args, **options):
    threading.Thread(target=time.sleep, args=(300,)).start()
    raise {end}
simulation.simulate = simulate"""
    done = command("run", quick, "--out", tmp_path / "out", first=first)
    assert done.returncode == code
    assert done.stderr == f"interrupted; if it had begun: fedjax-pfl run --resume {tmp_path / 'out'}\n"


def test_quiet_prints_nothing(quick, tmp_path):
    result = invoke("run", quick, "--out", tmp_path / "out", "--quiet")
    assert result.exit_code == 0
    assert result.output == ""


def test_partition_shows_and_writes_who_holds_what_without_training(quick, tmp_path):
    result = invoke("partition", quick, "data.clients=3", "--out", tmp_path / "out")
    assert result.exit_code == 0
    shares = json.loads((tmp_path / "out" / "partition.json").read_text())
    assert shares["hash"] in result.output
    assert sum(shares["sizes"]) == 1797
    assert str(shares["class_counts"][2][9]) in result.output
    assert not (tmp_path / "out" / "summary.json").exists()


def test_partition_without_out_writes_nothing(quick, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert invoke("partition", quick).exit_code == 0
    assert sorted(tmp_path.iterdir()) == before


def test_lists_name_everything_there_is():
    for name, table in (("methods", METHODS), ("models", MODELS), ("datasets", SOURCES)):
        output = invoke(name).output
        assert [line.split()[0] for line in output.splitlines()] == list(table)


def test_describe_shows_docstring_defaults_and_reference():
    output = invoke("describe", "fedavg_ft").output
    assert "fine-tunes the aggregated model" in output
    assert "finetune_epochs = 5" in output
    assert "arXiv:2102.07078" in output


def test_every_method_model_and_public_name_is_documented():
    import fedjax_pfl

    for name in fedjax_pfl.__all__:
        assert getattr(fedjax_pfl, name).__doc__, name
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    for name, factory in {**METHODS, **MODELS}.items():
        assert factory.__doc__, name
        assert f"`{name}`" in readme, name
    rows = (Path(__file__).parent.parent / "docs" / "methods.md").read_text(encoding="utf-8")
    for name, factory in METHODS.items():
        headline = re.search(r"Headline: (PRE|POST)", factory.__doc__)[1]
        assert re.search(rf"^\| \[`{name}`\]\(.*\| {headline} \|$", rows, re.MULTILINE), name
        assert "Reference:" in factory.__doc__, name
        assert "Headline:" in factory.__doc__, name


def test_help_needs_no_jax():
    heavy = "'jax' not in sys.modules and 'numpy' not in sys.modules"
    program = f"import sys; from fedjax_pfl.cli.commands import app; assert {heavy}"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
