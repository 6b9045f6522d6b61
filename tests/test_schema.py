"""The JSON schema of a config file takes what `load_config` takes, and refuses what an editor should underline."""

import inspect
import json
import re
import tomllib
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from fedjax_pfl import METHODS, Config, ConfigError, load_config, register_dataset
from fedjax_pfl.cli.commands import app
from fedjax_pfl.data.partition import PARTITIONS
from fedjax_pfl.experiment.schema import config_schema
from fedjax_pfl.models import MODELS

HOME = Path(__file__).resolve().parent.parent
FILES = sorted((HOME / "configs").rglob("*.toml"))
RUNS = [path for path in FILES if not {"grid", "space"} & set(tomllib.loads(path.read_text(encoding="utf-8")))]


@pytest.fixture(scope="module")
def schema():
    """As the command prints it."""
    printed = CliRunner().invoke(app, ["schema"])
    assert printed.exit_code == 0
    return json.loads(printed.output)


@pytest.fixture(scope="module")
def wrong(schema):
    """Text of a config file -> what the schema says against it."""
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    return lambda text: [str(error) for error in validator.iter_errors(tomllib.loads(text))]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: str(path.relative_to(HOME / "configs")))
def test_every_config_of_the_repository_fits(path, wrong):
    assert wrong(path.read_text(encoding="utf-8")) == []


def test_there_are_many_of_them():
    assert len(RUNS) > 40
    assert 0 < len(FILES) - len(RUNS) < 10


@pytest.mark.usefixtures("tables_as_before")
def test_a_users_source_may_have_an_argument():
    @register_dataset("mine")
    def mine(text):
        """Samples of a year."""

    schema = config_schema()["$defs"]["Data"]["properties"]["source"]
    for source, allowed in (("mine", True), ("mine:2020", True), ("digits", True), ("digits:3", False), ("npz", False)):
        assert jsonschema.Draft202012Validator(schema).is_valid(source) is allowed, source


SMALLEST = '[data]\nsource = "digits"\n[method]\nname = "fedavg"\n'


@pytest.mark.parametrize(
    "text",
    [
        SMALLEST,
        'protocol = "pfllib"\n' + SMALLEST,
        'protocol = "pfllib"\n[model]\ninit = "flax"\n' + SMALLEST,
        'protocol = "pfllib"\n[data]\nsource = "digits"\npartition = { beta = 0.5 }\n[method]\nname = "fedavg"\n',
        SMALLEST + "[participation]\nratio = [0.2, 0.5]\n",
        SMALLEST + "[participation]\nratio = 1\n",
        SMALLEST + "[model]\nhidden = 8\n",
        SMALLEST.replace('"digits"', '"digits"\npartition = { beta = 0.1 }'),
        SMALLEST.replace("digits", "npz:my/data.npz") + "[training]\nclip_norm = 1\n",
        SMALLEST.replace("digits", "arrays"),
        SMALLEST.replace("fedavg", "pfedcspc") + "server_lr_drops = [3]\nkappa = 0\n",
        SMALLEST + '[run]\nexport = ["features"]\nexport_clients = [0]\nout = "runs/a"\n',
        SMALLEST + '[training]\nclip_norm = "none"\ncopies = "none"\n[run]\nexport_clients = "none"\nout = "none"\n',
        SMALLEST.replace("fedavg", "ditto") + 'personal_epochs = "none"\n',
    ],
)
def test_what_can_be_run_fits(text, wrong, tmp_path):
    (tmp_path / "config.toml").write_text(text, encoding="utf-8")
    load_config(tmp_path / "config.toml")
    assert wrong(text) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[method]\nname = "fedavg"\n', "'data' is a required property"),
        ('[data]\nsource = "digits"\n', "'method' is a required property"),
        ('[data]\nclients = 4\n[method]\nname = "fedavg"\n', "'source' is a required property"),
        (SMALLEST.replace('name = "fedavg"', "lam = 1.0"), "'name' is a required property"),
        (SMALLEST + "[trainning]\nlr = 0.1\n", "'trainning' was unexpected"),
        (SMALLEST + "[training]\nlearning_rate = 0.1\n", "'learning_rate' was unexpected"),
        (SMALLEST + '[training]\nlr = "0.1"\n', "'0.1' is not of type 'number'"),
        (SMALLEST + "[training]\nlr = 0\n", "0 is less than or equal to the minimum of 0"),
        (SMALLEST + "[training]\nepochs = 1.5\n", "1.5 is not of type 'integer'"),
        (SMALLEST + '[training]\nlr = "none"\n', "'none' is not of type 'number'"),
        (SMALLEST + '[training]\nclip_norm = "no"\n', "'no' is not valid under any"),
        (SMALLEST + '[training]\ncopies = "non"\n', "'non' is not one of ['none', 'concat', 'replace']"),
        (SMALLEST + '[run]\nplacement = "gpu"\n', "'gpu' is not one of ['auto', 'map', 'vmap', 'shard']"),
        (SMALLEST + '[run]\nexport = ["feature"]\n', "'feature' is not one of"),
        (SMALLEST + "[participation]\nratio = [0.2, 0.5, 0.7]\n", "[0.2, 0.5, 0.7]"),
        (SMALLEST + "[participation]\nratio = 1.5\n", "1.5"),
        (SMALLEST.replace("fedavg", "fedavgg"), "'fedavgg' is not one of ['local', 'fedavg'"),
        (SMALLEST + "mu = 0.1\n", "'mu' was unexpected"),
        (SMALLEST.replace("fedavg", "ditto") + "lam = -1\n", "-1 is less than the minimum of 0"),
        (SMALLEST.replace("fedavg", "ditto") + "lam = true\n", "True is not of type 'number'"),
        (SMALLEST + '[model]\nname = "mpl"\n', "'mpl' is not one of"),
        (SMALLEST + '[model]\nname = "mlp"\nwidth = 8\n', "'width'"),
        ('protocol = "pfllib"\n[model]\nhiden = 8\n' + SMALLEST, "'hiden' is not one of"),
        (SMALLEST.replace('"digits"', '"digits"\npartition = { kind = "iid", beta = 0.1 }'), "'beta'"),
        (SMALLEST.replace("digits", "digit"), "'digit' is not valid under any"),
        (SMALLEST.replace("digits", "npz"), "'npz' is not valid under any"),
        (SMALLEST.replace("digits", "npz:"), "'npz:' is not valid under any"),
        (SMALLEST.replace('"digits"', '"digits"\npartition = { kind = "indices" }'), "'file' is a required property"),
        ('protocol = "pfl"\n' + SMALLEST, "'pfl' is not one of"),
    ],
)
def test_what_cannot_be_run_is_underlined(text, says, wrong, tmp_path):
    (tmp_path / "config.toml").write_text(text, encoding="utf-8")
    if 'digit"' not in text and '"npz' not in text:  # of these, only the data say so
        with pytest.raises(ConfigError):
            load_config(tmp_path / "config.toml")
    found = wrong(text)
    assert len(found) == 1
    assert says in found[0]


def options_of(table, key, name):
    """The options of a name, as the schema has them."""
    wanted = {"properties": {key: {"const": name}}, "required": [key]}
    (found,) = [rule["then"] for rule in table["allOf"] if rule["if"] == wanted]
    return {option: given for option, given in found["properties"].items() if option != key}


def test_names_are_listed_with_each_ones_options(schema):
    tables, data = schema["properties"], schema["$defs"]["Data"]["properties"]
    for table, key, parts in (
        (tables["method"], "name", METHODS),
        (tables["model"], "name", MODELS),
        (data["partition"], "kind", PARTITIONS),
    ):
        assert table["properties"][key]["enum"] == list(parts)
        for name, part in parts.items():
            arguments = inspect.signature(part).parameters.values()
            assert list(options_of(table, key, name)) == [arg.name for arg in arguments if arg.kind is arg.KEYWORD_ONLY]
        named = {option for name in parts for option in options_of(table, key, name)}
        assert set(table["properties"]) == {key, *named}  # what an editor completes
    assert "ditto: strength of the tie" in tables["method"]["properties"]["lam"]["description"]
    lam = options_of(tables["method"], "name", "ditto")["lam"]
    assert lam == {
        "default": 1.0,
        "description": "strength of the tie; the paper's grid is 0.1, 1, 2.",
        "minimum": 0,
        "type": "number",
    }
    epochs = options_of(tables["method"], "name", "ditto")["personal_epochs"]
    assert epochs.keys() == {"anyOf", "description"}
    assert epochs["anyOf"] == [{"minimum": 0, "type": "integer"}, {"const": "none"}]


def test_fields_have_types_ranges_defaults_and_descriptions(schema):
    training = schema["$defs"]["Training"]["properties"]
    assert training["lr_decay"] == {
        "default": 1.0,
        "description": "factor on the learning rate per round.",
        "exclusiveMinimum": 0,
        "maximum": 1,
        "type": "number",
    }
    assert training["clip_norm"]["anyOf"] == [{"exclusiveMinimum": 0, "type": "number"}, {"const": "none"}]  # no null
    assert "default" not in training["clip_norm"]
    assert schema["properties"]["model"]["default"] == {"name": "mlp"}
    assert schema["$defs"]["Data"]["properties"]["partition"]["default"] == {"kind": "dirichlet"}
    assert training["copies"].keys() == {"description", "enum", "type"}
    for name, section in schema["$defs"].items():
        assert section["description"], name
        assert section["additionalProperties"] is False
        for field, given in section["properties"].items():
            assert given["description"], f"{name}.{field}"
            assert "``" not in given["description"]
    assert schema["properties"]["run"]["description"].startswith("How a run is carried out")
    assert not re.search(r'"null"|: null|, null', json.dumps(schema))


def test_a_field_is_described_by_its_docstring():
    schema = Config.model_json_schema()
    attack = schema["$defs"]["Attack"]["properties"]["share"]["description"]
    assert attack.startswith("the share of the training clients that attack, drawn by the seed of the partition; 0.2")
    source = schema["$defs"]["Data"]["properties"]["stratified"]["description"]
    assert source.startswith("split each class of a client in these shares, so that a client with two or more samples")
    for name, section in {"Config": schema, **schema["$defs"]}.items():
        for field, given in section["properties"].items():
            assert given["description"], f"{name}.{field}"
