"""Protocols by name: under what a config gives, complete, and as the documentation has them."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedjax_pfl import Config, ConfigError, load_config
from fedjax_pfl.cli.commands import app
from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.errors import one_of
from fedjax_pfl.experiment.build import divide
from fedjax_pfl.experiment.programs import alike
from fedjax_pfl.experiment.protocols import PROTOCOLS
from fedjax_pfl.experiment.saved import check_alike
from fedjax_pfl.experiment.sections import Data, Training

DATA = {"source": "digits"}
METHOD = {"name": "fedavg"}
FILE = '{}[data]\nsource = "digits"\n{}[method]\nname = "fedavg"\n'


def config(protocol=None, data=None, **tables):
    return Config(protocol=protocol, data={**DATA, **(data or {})}, method=METHOD, **tables)


def flat(tables, before=""):
    """Dotted field -> value."""
    found = {}
    for key, value in tables.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found


# --- What a protocol gives -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_takes_the_place_of_the_defaults_and_of_nothing_else(name):
    values, plain, found = flat(PROTOCOLS[name]), flat(config().model_dump()), flat(config(name).model_dump())
    for field, value in found.items():
        if field in values:
            assert value == values[field], field
        elif not field.startswith(("model.", "data.partition.")):  # whose options depend on the name
            assert value == plain[field], field
    assert found.keys() >= values.keys()
    assert not {"data.source", "data.mean", "data.std"} & values.keys()
    assert {field.split(".")[0] for field in values} == {"data", "model", "training", "participation"}


@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(PROTOCOLS, 2)])
def test_a_protocol_leaves_nothing_of_the_one_it_replaces(first, second):
    assert config(first).replace({"protocol": second}) == config(second)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_leaves_nothing_of_a_config_but_what_depends_on_the_data_set(name):
    """Every field of which a protocol could say something is another one than that of the protocol before."""
    data = {"clients": 3, "samples_per_client": 40, "test_share": 0.4, "seed": 7, "stratified": True}
    training = {"rounds": 3, "epochs": 3, "batch_size": 3, "lr": 0.3, "lr_decay": 0.9, "momentum": 0.1}
    training |= {"weight_decay": 0.1, "clip_norm": 3.0, "augment": "crop_flip_rotate", "augment_every": "round"}
    others = {"model": {"name": "mlp", "hidden": 3}, "participation": {"ratio": 0.5, "dropout": 0.3}}
    merged = config(data=data, training=training, **others)
    assert merged.replace({"protocol": name}) == config(name)
    official = config(data={"split": "official", "test_part_share": 0.3, "test_classes": "dominant"})
    kept = {"test_part_share": 0.3} if PROTOCOLS[name]["data"]["split"] == "official" else {}
    assert official.replace({"protocol": name}) == config(name, data=kept)


def test_the_protocols_are_those_of_the_documentation():
    text = (Path(__file__).parent.parent / "docs" / "protocol.md").read_text(encoding="utf-8")
    table = text[text.index("| field |") :].split("\n\n")[0]
    header, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    assert header[1:] == list(PROTOCOLS)
    shown = {name: {} for name in PROTOCOLS}
    for field, *cells in lines:
        for name, cell in zip(PROTOCOLS, cells, strict=True):
            if cell != "–":
                shown[name][field.strip("`")] = cell.rstrip("*")
    plain = flat(config().model_dump())
    rows = {field.strip("`") for field, *_ in lines}
    for name, tables in PROTOCOLS.items():
        for field, value in flat(tables).items():
            told = (
                "1/3"
                if value == 1 / 3
                else "1/6"
                if value == 1 / 6
                else f"{value:g}"
                if type(value) is float
                else value
            )
            if field in rows:
                assert shown[name].get(field) == (None if value is None else str(told).lower()), (name, field)
            else:  # the table leaves out what all have as it is by default
                assert value == plain[field], (name, field)
        assert shown[name].keys() <= flat(tables).keys()


def test_fedpac_trains_20_clients_on_600_images_mostly_of_three_classes():
    labels = np.concatenate([np.repeat(np.arange(10), 2000), np.repeat(np.arange(10), 1000)]).astype(np.int32)
    dataset = Dataset("tenth", np.zeros((len(labels), 1, 1, 1), np.uint8), labels, 10, 20_000)
    _, manifest = divide(config("fedpac"), dataset)
    assert manifest["n_train"] == [600] * 20
    assert manifest["n_test"] == [300] * 20
    for client, first in enumerate((0, 2, 4, 6, 8) * 4):
        group = {first, first + 1, (first + 2) % 10}
        assert manifest["train_class_counts"][client] == [172 if k in group else 12 for k in range(10)]
    _, random = divide(config("fedecouple"), dataset)
    assert random["n_test"] == [300] * 20
    groups = {tuple(np.flatnonzero(np.array(counts) == 172)) for counts in random["train_class_counts"]}
    assert len(groups) > 10


def test_pfllib_has_its_very_client_sizes_whatever_the_seed_of_the_run():
    labels = np.repeat(np.arange(10), 6000).astype(np.int32)
    dataset = Dataset("cifar10", np.zeros((60_000, 1, 1, 1), np.uint8), labels, 10, None)
    _, manifest = divide(config("pfllib", run={"seed": 5}), dataset)
    assert manifest["sizes"][:6] == [1621, 1814, 1211, 2080, 5128, 4264]
    assert manifest["n_train"] == [int(0.75 * size) for size in manifest["sizes"]]


# --- Under what a config gives ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "field", "expected"),
    [
        ({"training": {"lr": 0.5}}, "training", {"lr": 0.5, "momentum": 0.5, "batch_size": 50}),
        ({"training": Training(epochs=1)}, "training", {"lr": 0.02, "epochs": 1}),
        ({"model": {"init": "flax"}}, "model", {"name": "cnn3", "init": "flax"}),
        ({"model": {"name": "mlp"}}, "model", {"name": "mlp", "hidden": 100}),
        ({"participation": {"dropout": 0.1}}, "participation", {"ratio": 1.0, "dropout": 0.1}),
        ({"data": {"clients": 5}}, "data", {"clients": 5, "samples_per_client": 600, "split": "official"}),
        ({"data": {"samples_per_client": None, "partition": {"kind": "iid"}}}, "data", {"samples_per_client": None}),
    ],
)
def test_what_is_given_lies_above_the_protocol(given, field, expected):
    found = config("fedpac", **given).model_dump()[field]
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ({"s": 50.0}, {"kind": "weak_pathological", "s": 50.0, "style": "fedpac"}),
        ({"kind": "weak_pathological", "style": "random"}, {"kind": "weak_pathological", "s": 20.0, "style": "random"}),
        ({"kind": "dirichlet", "beta": 1.0}, {"kind": "dirichlet", "beta": 1.0, "style": "plain"}),
    ],
)
def test_another_kind_of_partition_takes_no_option_of_the_protocols(partition, expected):
    found = config("fedpac", data={"partition": partition}).data.partition
    assert {key: found[key] for key in expected} == expected


def test_tables_made_in_python_count_with_what_they_were_given():
    made = Config(protocol="fedpac", data=Data(source="digits", clients=7), method=METHOD)
    assert made == config("fedpac", data={"clients": 7})


def test_a_file_the_command_line_and_python_agree(tmp_path):
    named, plain = tmp_path / "named.toml", tmp_path / "plain.toml"
    named.write_text(FILE.format('protocol = "fedpac"\n', "clients = 5\n"), encoding="utf-8")
    plain.write_text(FILE.format("", "clients = 5\n"), encoding="utf-8")
    expected = config("fedpac", data={"clients": 5})
    assert load_config(named) == load_config(plain, ["protocol=fedpac"]) == expected
    named_s = tmp_path / "s.toml"
    named_s.write_text(named.read_text() + "[data.partition]\ns = 50.0\n", encoding="utf-8")
    of_another = load_config(named_s, ["data.partition.kind=dirichlet"])  # than the protocol's, whose option s is
    assert of_another.data.partition == config("fedpac", data={"partition": {"kind": "dirichlet"}}).data.partition
    pfllib = config("pfllib", data={"clients": 5}, training={"lr": 0.1})
    # Whichever is named last lies under all that the file and the command line give.
    assert load_config(named, ["training.lr=0.1", "protocol=pfllib"]) == pfllib


def test_replace_puts_the_protocol_over_the_config_and_the_other_changes_over_it():
    base = Config(data={**DATA, "mean": 0.3}, method={"name": "fedprox", "mu": 0.3}, training={"lr": 1.0, "epochs": 3})
    changed = base.replace({"training.lr": 0.1, "data.partition.s": 50.0, "protocol": "fedpac", "run.seed": 4})
    assert (changed.training.lr, changed.training.epochs, changed.training.momentum) == (0.1, 5, 0.5)
    assert changed.data.partition["s"] == 50.0
    assert (changed.method, changed.data.mean, changed.run.seed) == (base.method, 0.3, 4)
    # The protocols are still what they were.
    assert config("fedpac").data.partition["s"] == 20.0
    assert changed.replace({"protocol": "fedpac", "model.name": "mlp"}).model["name"] == "mlp"
    assert config("fedpac").model["name"] == "cnn3"


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_name_is_not_in_a_config_which_equals_one_that_spells_the_values_out(name, tmp_path):
    named = config(name, run={"out": "here"})
    path = tmp_path / "config.toml"
    path.write_text(named.to_toml(), encoding="utf-8")
    spelt_out = load_config(path)
    assert named == spelt_out
    assert "protocol" not in path.read_text(encoding="utf-8")
    assert alike(named) == alike(spelt_out)
    check_alike(named, spelt_out, "here")


def test_the_command_line_takes_a_protocol(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(FILE.format("", 'test_part_share = 0.2\npartition = { kind = "iid" }\n'), encoding="utf-8")
    arguments = ["partition", path, "protocol=pfedcspc", "data.clients=3", "--out", tmp_path / "out"]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out" / "partition.json").read_text(encoding="utf-8"))
    assert found["n_test"] == [round(size / 5) for size in found["n_train"]]  # a sixth of all it has


# --- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["fedpack", "", 3, ["fedpac"], {"name": "fedpac"}, True])
def test_an_unknown_protocol_is_one_error_with_the_list(wrong):
    for attempt in (lambda: config(wrong), lambda: config().replace({"protocol": wrong})):
        with pytest.raises(ConfigError) as caught:
            attempt()
        assert (caught.value.field, caught.value.value) == ("protocol", wrong)
        assert caught.value.allowed == one_of(wrong, PROTOCOLS)


def test_mistakes_beside_a_protocol_are_the_usual_errors(tmp_path):
    for tables, field in [
        ({"training": 3}, "training"),
        ({"training": {"rate": 1.0}}, "training.rate"),
        ({"model": "mlp"}, "model"),
        ({"data": {"partition": "iid"}}, "data.partition"),
        ({"protocols": "fedpac"}, "protocols"),
    ]:
        with pytest.raises(ConfigError) as caught:
            config("fedpac", **tables)
        assert caught.value.field == field
    assert "protocol" in re.split(r"\W+", caught.value.allowed)
    path = tmp_path / "config.toml"
    path.write_text(FILE.format("", ""), encoding="utf-8")
    for override, field in [("protocol", "override"), ("protocol=", "protocol"), ("protocols=fedpac", "override")]:
        with pytest.raises(ConfigError) as caught:
            load_config(path, [override])
        assert caught.value.field == field
