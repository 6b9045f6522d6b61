import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from fedjax_pfl import METHODS, Config, ConfigError, Result, load_config
from fedjax_pfl.cli import printing
from fedjax_pfl.cli.commands import app, main
from fedjax_pfl.data.partition import PARTITIONS
from fedjax_pfl.data.sources import SOURCES
from fedjax_pfl.experiment.build import attackers
from fedjax_pfl.experiment.markdown_table import markdown_table
from fedjax_pfl.experiment.saved import Listed
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
    environment["JAX_COMPILATION_CACHE_DIR"] = jax.config.values["jax_compilation_cache_dir"] or "off"
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_table_that_is_wider_than_the_terminal_comes_in_parts(width, monkeypatch, capsys):
    names, headings = ["local", "fedavg", "fedavg_ft"], ["method", *(f"a column, {at}" for at in range(7))]
    rows = [[name, *(f"{at}.25 of {name}" for at in range(7))] for name in names]
    lines = [" | ".join(row) for row in (headings, ["---", *["---:"] * 7], *rows)]
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(printing.sys.stdout, "isatty", lambda: True)
    printing.print_markdown("# Title\n\n" + "\n".join(f"| {line} |" for line in lines) + "\n\nBelow.")
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert max(map(len, said.splitlines())) <= width
    assert all(entry in said for row in (headings, *rows) for entry in row), "nothing is cut"
    assert (said.count("\n fedavg_ft ") == 1) == (width == 200)
    assert "Below." in said


def counted(counts, **more):
    """The manifest of a partition with these samples per client and class, half of them for training."""
    sizes = [sum(row) for row in counts]
    halves = [size // 2 for size in sizes]
    of_all = {"sizes": sizes, "n_train": halves, "n_test": halves, "class_counts": counts}
    return {**of_all, "notes": [], "hash": 8 * "0123456789abcdef", **more}


@pytest.mark.parametrize(("width", "classes"), [(60, 100), (120, 100), (None, 100), (None, 2)])
def test_a_partition_of_many_classes_comes_in_parts_and_names_of_users_are_whole(width, classes, monkeypatch, capsys):
    counts = [[1000 * (client + 1) + label for label in range(classes)] for client in range(2)]
    users = [f"participant_of_the_federation_at_the_hospital_number_{at}" for at in range(2)]
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(printing.sys.stdout, "isatty", lambda: True)
    printing.print_partition(counted(counts, users=users, sizes=[7, 7], n_train=[5, 5], n_test=[2, 2]))
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    *table, of_hash = said.rstrip().splitlines()
    assert of_hash == f"hash {8 * '0123456789abcdef'}"
    assert max(map(len, table)) <= (width or 1000)
    assert sorted(map(int, re.findall(r"\b[12]\d{3}\b", said))) == sorted(counts[0] + counts[1])
    assert said.count("samples per client and class") == 1
    assert (said.count("\n client ") == 1) == (width is None)
    for user in users:
        assert all(part in said for part in (user[:40], user[40:]))


def test_a_terminal_that_a_partition_fits_shows_it_in_one_table(monkeypatch, capsys):
    shown = []
    for width in (38, 37):  # 8 + 6 + 7 + 6 for what is known of a client, twice 5 for its classes, and an edge
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(printing.sys.stdout, "isatty", lambda: True)
        printing.print_partition(counted([[500, 0], [100, 250]]))
        shown.append(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out))
    assert [said.count("\n client ") for said in shown] == [1, 2]
    assert [line.split() for line in shown[0].splitlines() if line.strip()][1:5] == [
        ["client", "size", "train", "test", "0", "1"],
        ["─" * 36],
        ["0", "500", "250", "250", "500", "·"],
        ["1", "350", "175", "175", "100", "250"],
    ]


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
    refused = invoke("run", quick, "--out", tmp_path / "out")
    assert refused.output == ""
    assert "--overwrite" in str(refused.exception)
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary


def test_a_global_models_accuracy_and_harmonic_means_stand_below_the_table(quick, tmp_path):
    result = invoke("run", quick, "--out", tmp_path / "out")
    assert result.exit_code == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    pre, post = (100 * summary["personal"][point]["hm_last"] for point in ("pre", "post"))
    assert f"pooled test set: {100 * summary['global']:.2f} %\n" in result.output
    assert f"PRE {pre:.2f}, POST {post:.2f}\n" in result.output
    assert "\nfedavg on digits, 4 clients, 2 rounds " in result.output
    assert "best is selected on test data; weighted: by the clients' samples" in " ".join(result.output.split())


def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(quick):
    done = command("run", quick, "training.lr=-1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: training.lr = -1 is not usable: input should be greater than 0\n"


@pytest.mark.parametrize(("end", "code", "saved"), [("KeyboardInterrupt", 130, False), ("SystemExit(143)", 143, True)])
def test_an_interruption_says_how_to_go_on_and_is_the_exit_code(end, code, saved, quick, tmp_path):
    # A thread still at work, as XLA's are, would otherwise keep the process alive.
    first = f"""
import threading, time, fedjax_pfl.experiment.driver as simulation
def simulate(*args, **options):
    threading.Thread(target=time.sleep, args=(300,)).start()
    raise {end}
simulation.simulate = simulate"""
    if saved:
        (tmp_path / "out" / "checkpoints" / "3").mkdir(parents=True)
    done = command("run", quick, "--out", tmp_path / "out", first=first)
    assert done.returncode == code
    how = (
        f"goes on with fedjax-pfl run --resume {tmp_path / 'out'}" if saved else "there is no checkpoint to go on from"
    )
    assert done.stderr == f"interrupted; {how}\n"


def test_how_to_go_on_in_a_folder_whose_name_has_a_space(quick, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedjax_pfl.experiment.driver.simulate", interrupted)
    monkeypatch.setattr("fedjax_pfl.experiment.comparison.compare", interrupted)
    out = tmp_path / "of mine"
    (out / "checkpoints" / "3").mkdir(parents=True)
    one, many = invoke("run", quick, "--out", out), invoke("compare", quick, "--out", out)
    assert one.stderr == f"interrupted; goes on with fedjax-pfl run --resume '{out}'\n"
    assert many.stderr == f"interrupted; the same command with --out '{out}' goes on\n"
    assert (one.exit_code, many.exit_code) == (130, 130)


@pytest.mark.parametrize("complete", [True, False])
def test_an_interrupt_after_the_last_round_says_that_the_run_is_complete(complete, quick, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def interrupted(*_, **__):
        if complete:
            (out / "summary.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr("fedjax_pfl.experiment.driver.simulate", interrupted)
    out.mkdir()
    (out / "summary.json").write_text("{}")
    os.utime(out / "summary.json", (0, 0))  # that of an earlier run
    said = f"the run is complete: written to {out}" if complete else "there is no checkpoint to go on from"
    ended = invoke("run", quick, "--out", out, "--overwrite")
    assert (ended.stderr, ended.exit_code) == (f"interrupted; {said}\n", 130)


@pytest.mark.parametrize("begun", [True, False])
def test_an_interrupt_speaks_of_the_new_run_and_not_of_the_one_that_it_replaces(begun, quick, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def interrupted(*_, **__):
        if begun:
            (out / "config.toml").write_text(QUICK)
        raise KeyboardInterrupt

    monkeypatch.setattr("fedjax_pfl.experiment.driver.simulate", interrupted)
    (out / "checkpoints" / "3").mkdir(parents=True)
    (out / "config.toml").write_text(QUICK)
    os.utime(out / "config.toml", (0, 0))
    said = f"goes on with fedjax-pfl run --resume {out}" if begun else "there is no checkpoint to go on from"
    assert invoke("run", quick, "--out", out, "--overwrite").stderr == f"interrupted; {said}\n"


@pytest.mark.parametrize("name", ["run", "compare", "sweep"])
def test_runs_that_start_in_the_same_second_have_folders_of_their_own(name, quick, tmp_path, monkeypatch):
    """The folder of a refused run goes again."""
    given = []

    def begin(*_, out=None, **__):
        given.append(out)
        Path(out, "config.toml").touch()
        raise ZeroDivisionError

    def refuse(*_, **__):
        raise ConfigError("x", 1, "nothing")

    where = {"run": "driver.simulate", "compare": "comparison.compare", "sweep": "sweep.sweep"}[name]
    made = (lambda config, **_: begin(out=config.run.out)) if name == "run" else begin
    file = tmp_path / "s.toml"
    file.write_text('config = "quick.toml"\n[grid]\n"training.lr" = [0.1]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "now")
    for stub in (refuse, made, refuse, made, made):
        monkeypatch.setattr(f"fedjax_pfl.experiment.{where}", stub)
        invoke(name, file if name == "sweep" else quick)
        assert (tmp_path / "runs").exists() == bool(given)
    names = [Path(folder).name for folder in given]
    assert names == [f"{names[0]}{number}" for number in ("", "-2", "-3")]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == names


@pytest.mark.parametrize("name", ["run", "partition"])
def test_a_config_is_not_replaced_by_the_run_that_reads_it(name, quick, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    config = quick.rename(folder / "config.toml")
    refused = invoke(name, config, "--out", folder, "--overwrite").exception
    assert str(refused).endswith("there is no run in this one, and config.toml would be lost")
    assert config.read_text() == QUICK


def test_what_a_plot_would_not_use_is_refused(tmp_path):
    refused = invoke("plot", tmp_path, "-o", "k.png", "--kind", "partition", "--metric", "global").exception
    assert str(refused).startswith("--metric = 'global' is not usable: leave it out")
    for kind in ("clients", "partition"):
        refused = invoke("plot", tmp_path, "-o", "k.png", "--kind", kind, "--x", "seconds").exception
        assert str(refused) == f"--x = 'seconds' is not usable: leave it out for --kind {kind}: no curves are drawn"


def test_a_tilde_that_the_shell_leaves_is_the_home_folder(quick, tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / "folder").mkdir(parents=True)
    (home / "file.png").touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    (home / "config.toml").write_text(QUICK)
    invoke("partition", "~/config.toml", "--pfllib=~/made", "--out=~/written")
    assert (home / "made" / "config.json").exists()
    assert (home / "written" / "partition.json").exists()
    for refused, message in (
        (("compare", quick, "--out=~/file.png"), "it is a file"),
        (("plot", home, "--out=~/file.png"), "it exists"),
        (("report", home, "--out=~/folder"), "this is a folder"),
        (("plot", "~/folder", "--out=~/new.png"), f"RUN = '{home / 'folder'}' is not"),
    ):
        assert message in str(invoke(*refused).exception)
    invoke("init", "~/new.toml")
    assert (home / "new.toml").exists()
    assert str(invoke("ls", "~/nowhere").exception).startswith(f"FOLDER = '{home / 'nowhere'}' ")
    assert str(invoke("run", "--resume=~/folder").exception).startswith(f"--resume = '{home / 'folder'}' ")
    assert not (tmp_path / "~").exists()


def test_arguments_that_may_be_left_out_are_in_brackets_once():
    usages = [invoke(name, "--help").output.splitlines()[0] for name in ("ls", "init", "run", "report")]
    assert [usage.partition("[OPTIONS] ")[2] for usage in usages] == [
        "[FOLDER]",
        "[FILE]",
        "[CONFIG.toml] [SECTION.KEY=VALUE]...",
        "{RUN}...",
    ]


def test_resume_takes_an_override_with_a_path(quick, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr("fedjax_pfl.experiment.driver.simulate", lambda config, **_: given.append(config) or 1 / 0)
    folder = tmp_path / "lr=1"
    folder.mkdir()
    quick.rename(folder / "config.toml")
    cache = tmp_path / "cache"
    invoke("run", "--resume", folder, f"run.compilation_cache={cache}", "training.rounds=3")
    invoke("run", "--resume", folder, folder / "config.toml", f"run.compilation_cache={cache}")  # "=" in a file's name
    assert [config.run.compilation_cache for config in given] == [str(cache)] * 2
    assert [config.training.rounds for config in given] == [3, 2]


def test_a_variants_name_may_have_a_dot_and_begin_as_anothers(quick, monkeypatch):
    given = []
    monkeypatch.setattr(
        "fedjax_pfl.experiment.comparison.compare", lambda config, methods, **_: given.append(methods) or 1 / 0
    )
    variants = "v1=fedprox,v1.5=fedprox"
    own = ["v1.mu=0.5", "v1.5.mu=1", "v1.5.training.lr=0.1", "fedavg.training.augment = crop_flip"]
    invoke("compare", quick, "--methods", f"fedavg,{variants}", *(part for of in own for part in ("--set", of)))
    assert given == [
        {
            "fedavg": {"training.augment": "crop_flip"},
            "v1": {"method": "fedprox", "mu": 0.5},
            "v1.5": {"method": "fedprox", "mu": 1, "training.lr": 0.1},
        }
    ]
    for wrong, message in {
        "v2.mu=1": "one of the methods compared: fedavg, v1, v1.5",
        "v1.5.=1": "expected method.key",
    }.items():
        refused = invoke("compare", quick, "--methods", f"fedavg,{variants}", "--set", wrong).exception
        assert str(refused).startswith(f"--set = '{wrong}' is not usable: {message}")


def test_comparisons_and_sweeps_get_what_the_command_is_given(quick, tmp_path, monkeypatch):
    given = []
    for name in ("comparison.compare", "sweep.sweep"):
        monkeypatch.setattr(f"fedjax_pfl.experiment.{name}", lambda *_, **options: given.append(options) or 1 / 0)
    file, out = tmp_path / "s.toml", str(tmp_path / "out")
    file.write_text('config = "quick.toml"\n[grid]\ntraining.lr = [0.1, 0.2]\n[baseline]\ntraining.lr = 0.2\n')
    where = ["--out", out, "--executor", "submitit", "--job", "timeout_min=5", "--job", "slurm_partition=gpu"]
    more = ["--methods", "local,fedavg", "--seeds", "3,4", "--baseline", "fedavg"]
    invoke("compare", quick, *more, "--point", "post", *where, "--quiet")
    invoke("sweep", file, "--point", "post", *where, "--quiet")
    executor = {"name": "submitit", "timeout_min": 5, "slurm_partition": "gpu"}
    both = {"point": "post", "out": out, "progress": None, "executor": executor}
    assert given == [{**both, "seeds": [3, 4], "baseline": "fedavg"}, {**both, "baseline": {"training.lr": 0.2}}]


def test_reports_and_plots_get_what_the_command_is_given(tmp_path, monkeypatch):
    given = []
    for where in ("report.report", "plots.files.write_plot"):
        monkeypatch.setattr(f"fedjax_pfl.experiment.{where}", lambda *of, **options: given.append((of, options)) or [])
    runs = [tmp_path / "a", tmp_path / "b"]
    for overwrite in (True, False):
        more = ["--overwrite"] if overwrite else []
        invoke("report", *runs, "--out", tmp_path / "r.html", *more)
        invoke("plot", *runs, "-o", tmp_path / "p.png", "--metric", "post.accuracy", "--x", "seconds", *more)
        drawn = {"kind": "curves", "metric": "post.accuracy", "x": "seconds"}
        assert given[-2:] == [
            ((runs, tmp_path / "r.html"), {"overwrite": overwrite}),
            ((runs, tmp_path / "p.png"), {**drawn, "overwrite": overwrite}),
        ]


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("compare", "run.seed=7", "--seeds instead"),
        ("compare", "run.out=/tmp/x", "--out instead"),
        ("sweep", "run.out=/tmp/x", "--out instead"),
        ("tune", "run.out=/tmp/x", "leave it out: trials are recorded in their study, which --storage keeps"),
    ],
)
def test_an_override_that_a_command_would_not_read_is_refused(name, override, message, quick):
    refused = invoke(name, quick, "training.lr=0.1", override).exception
    assert str(refused) == f"override = '{override}' is not usable: {message}"


@pytest.mark.parametrize(
    ("override", "methods"),
    [("method.mu=0.5", "local,ditto"), ("method.name=fedprox", "local"), ("method.name=fedprox", "fedprox=local")],
)
def test_compare_refuses_an_option_of_a_method_that_is_not_compared(override, methods, tmp_path, quick, monkeypatch):
    ran = []
    monkeypatch.setattr("fedjax_pfl.experiment.comparison.compare", lambda *_, **__: ran.append(1) or 1 / 0)
    config = tmp_path / "prox.toml"
    config.write_text(QUICK.replace('"fedavg"', '"fedprox"'), encoding="utf-8")
    refused = invoke("compare", config, override, "--methods", methods).exception
    allowed = "that of a method that is compared: name it in --methods, or give it to one by --set METHOD.KEY=VALUE"
    assert str(refused) == f"override = '{override}' is not usable: {allowed}"
    assert ran == []
    for used in ("local,fedprox", "local,strong=fedprox", "all"):
        invoke("compare", config, override, "--methods", used, "--quiet")
    assert ran == [1] * 3
    invoke("compare", config, "training.lr=0.2", "--methods", "local")
    assert len(ran) == 4


NAMES = ["[old] lr=0.1", "a[/b]", "<b>x</b>", "*x*", "__y__", "`z`", "~~w~~", "&lt;", ":smile:", "\\[c]", "a | b", "|"]
NAMES.append("東京都立駒込病院の東")  # whose letters are two columns wide


def test_a_part_without_a_docstring_is_listed_as_ones_own(capsys):
    printing.print_table({"bare": lambda model, train: None, "fedavg": METHODS["fedavg"]})
    bare, of_fedavg = capsys.readouterr().out.splitlines()
    assert bare.split(maxsplit=1) == ["bare", "your own"]
    assert of_fedavg.startswith("fedavg FedAvg")


def test_names_are_printed_as_they_are(tmp_path, capsys):
    """They are no markup: neither that of rich nor Markdown."""
    table = markdown_table(["method", "PRE"], [[name, "1.00"] for name in NAMES])
    printing.print_markdown(f"# [t]\n\n{table}\n\n**Failed**: {', '.join(NAMES)}: _no_ and *no*.")
    said = capsys.readouterr().out
    assert f"\nFailed: {', '.join(NAMES)}: _no_ and *no*. " in said
    assert [name for name in NAMES if f"\n {name} " not in said] == []
    assert "[t]" in said
    counts = {"class_counts": [[1, 2]] * len(NAMES), "users": NAMES, "notes": NAMES, "hash": "[a]"}
    printing.print_partition({**counts, **dict.fromkeys(("sizes", "n_train", "n_test"), [3] * len(NAMES))})
    said = capsys.readouterr().out
    assert [name for name in NAMES if f" {name} " not in said or f"note: {name}\n" not in said] == []
    assert "hash [a]" in said
    named = {"method": {"name": "fedavg"}, "data": {"source": "npz:[a].npz"}}
    config = {**named, "run": {"seed": 0}, "training": {"rounds": 2}}
    listed = [Listed(tmp_path / name, config, 2, True, {"pre": None, "post": 0.5}, True, False) for name in NAMES]
    printing.print_runs(listed, tmp_path)
    said = capsys.readouterr().out
    assert [name for name in NAMES if f"│ {name} " not in said] == []
    assert said.count("npz:[a].npz") == len(NAMES)
    assert said.count(" 2/2 │   — │ 50.00 ") == len(NAMES)  # PRE: no client was scored


def test_quiet_prints_nothing_and_a_lost_partition_file_can_be_written_again(quick, tmp_path):
    result = invoke("run", quick, "--out", tmp_path / "out", "--quiet")
    assert result.exit_code == 0
    assert result.output == ""
    # Here of the same run: the remedy for a damaged partition file, as the error gives it.
    whole = (tmp_path / "out" / "partition.json").read_bytes()
    (tmp_path / "out" / "partition.json").write_bytes(b"")
    damaged = str(invoke("report", tmp_path / "out").exception)
    remedy, config = re.search("`fedjax-pfl (.*) (.*) --out FOLDER` writes the same", damaged).groups()
    assert invoke(remedy, config, "--out", tmp_path / "again").exit_code == 0
    assert (tmp_path / "again" / "partition.json").read_bytes() == whole


def test_a_partition_has_the_attackers_that_a_run_has(quick, tmp_path):
    attack = "attack.kind=label_flip", "attack.share=0.5"
    assert invoke("partition", quick, *attack, "--out", tmp_path / "out").exit_code == 0
    given = load_config(quick, attack)
    written = json.loads((tmp_path / "out" / "partition.json").read_text())
    assert written["attackers"] == np.flatnonzero(attackers(given)).tolist()
    refused = invoke("partition", quick, attack[0], "attack.share=0.01")
    assert str(refused.exception).startswith("attack.share = 0.01 is not usable: 0, or a share that is some of the ")


def test_partition_shows_and_writes_who_holds_what_without_training(quick, tmp_path):
    result = invoke("partition", quick, "data.clients=3", "--out", tmp_path / "out")
    assert result.exit_code == 0
    shares = json.loads((tmp_path / "out" / "partition.json").read_text())
    assert shares["hash"] in result.output
    assert sum(shares["sizes"]) == 1797
    assert str(shares["class_counts"][2][9]) in result.output
    assert not (tmp_path / "out" / "summary.json").exists()
    with pytest.raises(ConfigError, match="a run that has ended; this one has not begun"):
        Result.load(tmp_path / "out")


def test_partition_refuses_what_a_run_would(quick):
    refused = [invoke(name, quick, "data.validation_share=0.001").exception for name in ("run", "partition")]
    assert re.match(
        r"data\.validation_share = 0\.001 is not usable: a larger share: .* none to validate on$", str(refused[0])
    )
    assert str(refused[1]) == str(refused[0])


def test_partition_without_out_writes_nothing(quick, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert invoke("partition", quick).exit_code == 0
    assert sorted(tmp_path.iterdir()) == before


def test_partition_takes_nothing_from_a_run(quick, tmp_path):
    """Neither does it write where a config has its run, nor over a run where it is told to."""
    folder = tmp_path / "out"
    folder.mkdir()
    for name in ("config.toml", "partition.json", "metrics.jsonl"):
        (folder / name).write_text(name)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    of_run = tmp_path / "of_run.toml"
    of_run.write_text(load_config(quick).replace("run.out", str(folder)).to_toml())
    assert invoke("partition", of_run).exit_code == 0
    for how in ([], ["--overwrite"]):
        refused = invoke("partition", quick, "--out", folder, *how).exception
        assert str(refused).startswith(f"--out = '{folder}' is not usable: a directory without a run")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    (folder / "metrics.jsonl").unlink()
    assert invoke("partition", quick, "--out", folder, "--overwrite").exit_code == 0
    assert json.loads((folder / "partition.json").read_text())["hash"]


def test_lists_name_everything_there_is():
    tables = {"methods": METHODS, "models": MODELS, "partitions": PARTITIONS, "datasets": SOURCES}
    for name, table in tables.items():
        output = invoke(name).output
        assert [line.split()[0] for line in output.splitlines()] == list(table)


def test_describe_shows_docstring_defaults_and_reference():
    output = invoke("describe", "fedavg_ft").output
    assert "fine-tunes the aggregated model" in output
    assert "finetune_epochs = 5" in output
    assert "arXiv:2102.07078" in output


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "mlp",
            ["784-100-10 on 28x28 images", "Options ([model] in the config):", "  hidden = 100", '  init = "torch"'],
        ),
        ("dirichlet", ["Label skew by Dirichlet draws.", '  style = "plain"', "arXiv:1905.12022"]),
        ("indices", ["  file (must be given)"]),
        ("iid", ["Shuffled equal shares.", "No options of its own."]),
        ("npz", ['data.source = "npz": npz:PATH, your own arrays']),
        ("fedpac", ['protocol = "fedpac", in the place of the defaults:', "training.batch_size = 50", "Headline: "]),
        ("training.lr", ["training.lr = 0.005\n  eta, the learning rate in round 0."]),
        ("training.clip_norm", ["training.clip_norm = (left out)"]),
        ("data.source", ["data.source (must be given)"]),
        ("method", ["method.name: one of the following, each with options of its own.", "local, fedavg, "]),
        ("data.partition", ["data.partition.kind: one of", "pathological, dirichlet"]),
        ("run", ["How a run is carried out", "run.seed = 0", 'run.keep = "final"', "run.export = []"]),
    ],
)
def test_describe_knows_all_that_a_config_can_name(name, said):
    output = invoke("describe", name).output
    assert [part for part in said if part not in output] == []


def test_describe_of_what_there_is_not(capsys, monkeypatch):
    for name in ("fedavgg", "training.lrr", "training.", "."):
        monkeypatch.setattr(sys, "argv", ["fedjax-pfl", "describe", name])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr().err
        assert (left.value.code, said.count("\n")) == (2, 1)
        assert said.startswith(f"error: NAME = '{name}' is not usable: a method, model, partition, data source")


def test_init_writes_a_config_with_every_field(tmp_path):
    path = tmp_path / "mine.toml"
    assert invoke("init", path).exit_code == 0
    text = path.read_text()
    assert load_config(path) == Config(data={"source": "digits"}, method={"name": "fedavg"})
    for section, schema in Config.model_fields.items():
        _, _, below = text.partition(f"\n[{section}]\n")
        for field in getattr(schema.annotation, "model_fields", {"name": None}):
            assert re.search(rf"^#?{field} =", below.partition("\n[")[0], re.M), f"{section}.{field}"
    assert max(map(len, text.splitlines())) <= 102  # the width of the comments
    path.write_text("mine")
    again = invoke("init", path)
    assert (path.read_text(), again.exit_code) == ("mine", 1)
    assert str(again.exception) == f"FILE = '{path}' is not usable: a file that does not exist: nothing is overwritten"
    spaced = invoke("init", tmp_path / "my config.toml").output.splitlines()
    assert spaced[-1].endswith(f"; fedjax-pfl run '{tmp_path / 'my config.toml'}'")


def test_ls_shows_how_far_runs_are(tmp_path, monkeypatch):
    def run(folder, method, lines, *, ended):
        made = tmp_path / folder
        made.mkdir(parents=True)
        (made / "config.toml").write_text(
            f'[data]\nsource = "digits"\n[method]\nname = "{method}"\n[training]\nrounds = 40\n[run]\nseed = 7\n'
        )
        (made / "partition.json").write_text("{}")
        if lines:
            (made / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if ended:
            (made / "summary.json").write_text('{"diverged_round": 40}' if folder == "e" else "{}")

    lines = [
        {"round": 20, "pre": {"accuracy": 0.5}, "post": {"accuracy": 0.25}},
        {"round": 40, "pre": {"accuracy": 0.75}, "post": {"accuracy": 0.875}},
    ]
    run("table/a", "fedavg", lines, ended=True)
    run("b", "of_somebody", lines[:1], ended=False)
    run("c", "local", [], ended=False)
    run("d", "local", [], ended=False)
    run("e", "local", lines, ended=True)
    (tmp_path / "d" / ".lock").touch()  # it is at work
    (tmp_path / "no_run").mkdir()
    (tmp_path / "no_run" / "config.toml").write_text("")
    rows = [line for line in invoke("ls", tmp_path).output.splitlines() if "digits" in line]
    shown = [[cell.strip() for cell in line.split("│")[1:-1]] for line in rows]
    assert shown == [
        ["b", "of_somebody", "digits", "7", "20/40", "50.00", "25.00", "not ended"],
        ["c", "local", "digits", "7", "0/40", "—", "—", "not begun"],
        ["d", "local", "digits", "7", "0/40", "—", "—", "not ended"],
        ["e", "local", "digits", "7", "40/40", "75.00", "87.50", "diverged"],
        ["table/a", "fedavg", "digits", "7", "40/40", "75.00", "87.50", ""],
    ]
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2')  # a run that is just writing
    monkeypatch.chdir(tmp_path)
    assert "│ b   │ of_somebody │" in invoke("ls", "b").output  # the folder of a run itself
    (tmp_path / "b" / "metrics.jsonl").write_text("{\n")
    damaged = invoke("ls", tmp_path).exception
    assert str(damaged).startswith(
        f"metrics = '{tmp_path / 'b' / 'metrics.jsonl'}' is not usable: the metrics of a run"
    )
    (tmp_path / "b" / "metrics.jsonl").unlink()
    (tmp_path / "e" / "summary.json").write_text("[]")
    damaged = invoke("ls", tmp_path).exception
    assert str(damaged).startswith(f"summary = '{tmp_path / 'e' / 'summary.json'}' is not usable: the summary of a run")
    absent = invoke("ls", tmp_path / "absent").exception
    assert str(absent) == f"FOLDER = '{tmp_path / 'absent'}' is not usable: a folder that holds runs"


def test_ls_names_a_config_that_is_none_of_a_run(tmp_path):
    (tmp_path / "config.toml").write_text("[run]\nseed = 7\n[training]\n")
    (tmp_path / "partition.json").write_text("{}")
    damaged = invoke("ls", tmp_path).exception
    assert str(damaged) == (
        f"config file = '{tmp_path / 'config.toml'}' is not usable: "
        "the config of a run: it has no data.source, method.name, training.rounds"
    )


def test_version_and_completion():
    assert invoke("--version").output.strip() == importlib.metadata.version("fedjax_pfl")
    assert "--install-completion" in invoke("--help").output
    asked = {"_FEDJAX_PFL_COMPLETE": "complete_bash", "COMP_WORDS": "fedjax-pfl part", "COMP_CWORD": "1"}
    program = "from fedjax_pfl.cli.commands import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **asked}, check=False
    )
    assert done.stdout.split() == ["partition", "partitions"]


def test_every_method_and_model_is_documented():
    docs = Path(__file__).parent.parent / "docs"
    models = (docs / "howto" / "models.md").read_text(encoding="utf-8")
    for name, model in MODELS.items():
        assert model.__doc__, name
        assert f"`{name}`" in models, name
    rows = (docs / "methods.md").read_text(encoding="utf-8")
    for name, factory in METHODS.items():
        headline = re.search(r"Headline: (PRE|POST)", factory.__doc__)[1]
        assert re.search(rf"^\| \[`{name}`\]\(.*\| {headline}(; .*)? \|$", rows, re.MULTILINE), name
        assert "Reference:" in factory.__doc__, name


def test_help_needs_no_jax():
    heavy = "'jax' not in sys.modules and 'numpy' not in sys.modules"
    program = f"import sys; from fedjax_pfl.cli.commands import app; assert {heavy}"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
