"""What ``describe`` says of options, protocols and misspelt names, and how lists are laid out."""

import pytest

from fedjax_pfl import ConfigError, load_config
from fedjax_pfl.cli import printing
from fedjax_pfl.cli.describing import described, template
from fedjax_pfl.cli.printing import print_runs, print_table
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.options import hyperparameters
from fedjax_pfl.experiment.protocols import PROTOCOLS
from fedjax_pfl.experiment.saved import Listed
from fedjax_pfl.methods import METHODS
from fedjax_pfl.models import MODELS


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fedprox.mu", "fedprox.mu = 0.01\n  strength of the proximal term; the paper's grid is"),
        ("data.partition.beta", "dirichlet.beta = 0.1\n  concentration; small means few clients per class."),
        ("indices.file", "indices.file (must be given)\n"),
        ("mlp.hidden", "mlp.hidden = 100\n  number of units, which is the feature dimension."),
        (
            "data.partition.kind",
            "data.partition.kind: one of the following, each with options of its own.\n\niid, path",
        ),
        ("method.name", "method.name: one of the following, each with options of its own.\n\nlocal, fedavg, "),
    ],
)
def test_fields_of_parts(name, said):
    assert described(name).startswith(said)


def test_an_option_of_several_parts_is_that_of_each():
    named = [line.split(" = ")[0] for line in described("method.mu").splitlines() if line and not line.startswith(" ")]
    assert named == [f"{name}.mu" for name, method in METHODS.items() if "mu" in hyperparameters(method)]
    assert len(named) > 1


def test_every_field_of_a_config_is_described():
    config = Config(data={"source": "digits"}, method={"name": "fedprox"}).model_dump()
    fields = [f"{section}.{field}" for section, table in config.items() for field in table]
    texts = {field: described(field) for field in fields}
    assert [field for field, text in texts.items() if not text] == []
    assert [field for field, text in texts.items() if "``" in text] == []
    assert described("protocol").endswith(", ".join(PROTOCOLS))


def test_a_protocol_gives_what_a_template_leaves_in_comments(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(template().replace('#protocol = "pfllib"', 'protocol = "pfllib"'))
    given = {"data": {"source": "digits"}, "method": {"name": "fedavg"}}
    assert load_config(path) == Config(protocol="pfllib", **given)
    without = [line[1:] if line[:1] == "#" != line[1:2] != " " else line for line in template().splitlines()]
    path.write_text("\n".join(line for line in without if not line.endswith("=") and "protocol" not in line))
    assert load_config(path) == Config(**given)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("training.lrr", "training.lr"),
        ("fedprx.mu", "fedprox.mu"),
        ("datasource", "data.source"),
        ("fedavgg", "fedavg"),
        ("protocl", "protocol"),
    ],
)
def test_a_misspelt_name_is_recognised(name, meant):
    with pytest.raises(
        ConfigError, match=rf"^NAME = '{name}' is not usable: .*; did you mean {meant}\? fedjax-pfl meth"
    ):
        described(name)


def test_lists_are_aligned_and_without_markup(capsys):
    print_table(MODELS)
    lines = capsys.readouterr().out.splitlines()
    column = 1 + max(map(len, MODELS))
    assert {line[column - 1] for line in lines} == {" "}
    assert all(line[column] != " " for line in lines)
    assert "``" not in "".join(lines)


@pytest.mark.parametrize(
    ("begun", "ended", "diverged", "state"),
    [
        (True, True, False, ""),
        (True, True, True, "diverged"),
        (True, False, False, "not ended"),
        (False, False, False, "not begun"),
    ],
)
def test_a_partition_alone_is_listed_as_no_run_that_goes_on(begun, ended, diverged, state, tmp_path, capsys):
    config = Config(data={"source": "digits"}, method={"name": "fedavg"}).model_dump()
    print_runs([Listed(tmp_path / "a", config, 0, ended, {}, begun, diverged)], tmp_path)
    row = capsys.readouterr().out.splitlines()[-2]
    assert row.split("│")[-2].strip() == state


def test_a_name_that_is_wider_than_its_column_is_folded_and_not_cut(tmp_path, monkeypatch, capsys):
    tables = {"data": {"source": f"npz:{'data/' * 9}a.npz"}, "method": {"name": "fedavg"}}
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(printing.sys.stdout, "isatty", lambda: True)
    run = f"lr={'0.123456789,' * 4}seed=0"
    print_runs([Listed(tmp_path / run, Config(**tables).model_dump(), 0, True, {}, True, False)], tmp_path)
    rows = [line.split("│")[1:4] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    whole = ["".join(part.strip() for part in parts) for parts in zip(*rows, strict=True)]
    assert whole == [run, "fedavg", tables["data"]["source"]]
