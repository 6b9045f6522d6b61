import copy
import pickle
import tomllib
from typing import NamedTuple

import numpy as np
import pytest

from fedjax_pfl import Config, ConfigError, compare, load_config, load_sweep, load_tune, simulate, sweep
from fedjax_pfl.experiment.gathered import folders_of
from fedjax_pfl.experiment.sections import Attack, Compression, Privacy

DATA = {"source": "digits"}
METHOD = {"name": "fedavg"}


def test_every_field_but_source_and_method_has_a_default():
    config = Config(data=DATA, method=METHOD)
    assert config.training.lr == 0.005
    assert config.model == {"name": "mlp", "hidden": 100, "init": "torch"}
    assert config.data.partition == {"kind": "dirichlet", "beta": 0.1, "style": "plain", "min_samples": 2}


def test_hyperparameters_are_filled_in_from_the_signature_and_survive_a_round_trip(tmp_path):
    config = Config(data=DATA, method={"name": "fedavg_ft", "finetune_epochs": 2}, participation={"ratio": [0.2, 0.5]})
    assert config.method == {
        "name": "fedavg_ft",
        "finetune_epochs": 2,
        "finetune_lr": None,
        "finetune_scope": "full",
    }
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    assert load_config(path) == config


def test_none_is_written_where_it_is_no_default_and_can_be_given(tmp_path):
    tables = {"data": {"source": "digits", "clients": 4}, "model": {"name": "mlp"}}
    config = Config(**tables, method={"name": "fedpac", "head_lr": None}, protocol="fedpac")
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    assert load_config(path) == config
    assert load_config(path, ["method.head_lr=0.2"]).method["head_lr"] == 0.2
    usual = Config(**tables, method={"name": "fedpac"})
    assert (usual.method["head_lr"], usual.replace("method.head_lr", "none").method["head_lr"]) == (0.1, None)
    clipped = usual.replace("training.clip_norm", 1.0)
    assert clipped.replace("training.clip_norm", "none") == usual
    assert usual.replace("training.augment", "none").training.augment == "none"
    with pytest.raises(ConfigError, match=r"training\.lr = 'none' is not usable"):
        usual.replace("training.lr", "none")
    with pytest.raises(ConfigError, match=r"changes = 1 is not usable: a dotted field such as training\.lr"):
        usual.replace({1: 2})


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('[data]\nsource = "digits"\n[method]\nname = "fedavg"\n', encoding="utf-8-sig")
    assert load_config(path) == Config(data=DATA, method=METHOD)


def test_overrides_are_toml_values_or_else_strings(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('[data]\nsource = "digits"\n[method]\nname = "fedprox"\n', encoding="utf-8")
    config = load_config(
        path,
        [
            "training.lr=0.5",
            "training.weight_decay=.01",
            "training.clip_norm=1.",
            "method.mu=1",
            "data.partition.kind=iid",
            "participation.ratio=[0.1, 1]",
            "run.out=runs/a b",
        ],
    )
    assert config.training.lr == 0.5
    assert (config.training.weight_decay, config.training.clip_norm) == (0.01, 1.0)
    assert config.method["mu"] == 1.0
    assert config.data.partition == {"kind": "iid"}
    assert config.participation.ratio == (0.1, 1.0)
    assert config.run.out == "runs/a b"


def test_options_are_those_of_the_usual_part_if_none_is_named(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('[data]\nsource = "digits"\n[method]\nname = "fedavg"\n', encoding="utf-8")
    config = load_config(path, ["data.partition.beta=0.5", "model.hidden=16"])
    assert config == Config(data=DATA, method=METHOD).replace({"data.partition.beta": 0.5, "model.hidden": 16})
    path.write_text('[data]\nsource = "digits"\n[model]\nhidden = 8\n[method]\nname = "fedavg"\n', encoding="utf-8")
    assert load_config(path).model == {"name": "mlp", "hidden": 8, "init": "torch"}
    assert load_config(path, ["model.name=mlp"]).model["hidden"] == 8
    assert load_config(path, ["model.name=cnn2"]) == Config(data=DATA, method=METHOD, model={"name": "cnn2"})


@pytest.mark.parametrize("copies", ["none", "concat", "replace", None])
def test_copies_are_the_methods_own_unless_given(copies):
    config = Config(data=DATA, method=METHOD, training={} if copies is None else {"copies": copies})
    assert config.training.copies == copies
    assert tomllib.loads(config.to_toml())["training"].get("copies") == copies


@pytest.mark.parametrize("kind", ["concat", "replace"])
def test_what_version_0_1_called_augmentation_is_now_copies(kind):
    with pytest.raises(ConfigError, match=f'training.copies = "{kind}"') as caught:
        Config(data=DATA, method=METHOD, training={"augment": kind})
    assert (caught.value.field, caught.value.value) == ("training.augment", kind)


def test_a_config_cannot_be_changed():
    config = Config(data=DATA, method={"name": "fedprox"})
    changes = {
        "training.lr": lambda: setattr(config.training, "lr", 1.0),
        "method.mu": lambda: config.method.__setitem__("mu", -5.0),
        "method.KEY": lambda: config.method.update(mu=-5.0),
        "data.partition.beta": lambda: config.data.partition.__setitem__("beta", 0.0),
        "model.KEY": lambda: config.model.pop("hidden"),
    }
    for field, change in changes.items():
        with pytest.raises(TypeError, match=rf'Config\.replace, which checks: config\.replace\("{field}", '):
            change()
    assert config == Config(data=DATA, method={"name": "fedprox"})
    for copied in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert copied == config
        with pytest.raises(TypeError, match=r"Config\.replace"):
            copied.method["mu"] = 1.0
    assert type(config.model_dump()["method"]) is dict


@pytest.mark.parametrize(
    ("tables", "field", "allowed"),
    [
        ({"data": DATA}, "method", "must be given"),
        ({"data": {}, "method": METHOD}, "data.source", "must be given: such as digits or npz:PATH"),
        ({"data": {**DATA, "client": 3}, "method": METHOD}, "data.client", "clients"),
        ({"data": {**DATA, "clients": 0}, "method": METHOD}, "data.clients", "greater than or equal to 1"),
        ({"data": {**DATA, "clients": 2.5}, "method": METHOD}, "data.clients", "integer"),
        ({"data": {**DATA, "clients": True}, "method": METHOD}, "data.clients", "integer"),
        ({"data": {**DATA, "split": "half"}, "method": METHOD}, "data.split", "'merge' or 'official'"),
        ({"data": {**DATA, "test_share": 1.0}, "method": METHOD}, "data.test_share", "less than 1"),
        (
            {"data": {**DATA, "split": "official", "test_part_share": 1.0}, "method": METHOD},
            "data.test_part_share",
            "less than 1",
        ),
        ({"data": {**DATA, "test_part_share": 0.2}, "method": METHOD}, "data.test_part_share", '"official"'),
        ({"data": {**DATA, "test_classes": "dominant"}, "method": METHOD}, "data.test_classes", '"official"'),
        ({"data": {**DATA, "test_classes": "rare"}, "method": METHOD}, "data.test_classes", "'all' or 'dominant'"),
        (
            {
                "data": {**DATA, "test_classes": "dominant", "split": "official", "partition": {"kind": "natural"}},
                "method": METHOD,
            },
            "data.test_classes",
            "not natural",
        ),
        (
            {"data": {**DATA, "partition": {"kind": "pathological", "overlap": True}}, "method": METHOD},
            "data.partition.overlap",
            '"merge"',
        ),
        (
            {
                "data": {
                    **DATA,
                    "split": "official",
                    "validation_share": 0.1,
                    "partition": {"kind": "weak_pathological", "overlap": True},
                },
                "method": METHOD,
            },
            "data.validation_share",
            "overlap",
        ),
        (
            {"data": {**DATA, "partition": {"kind": "iid", "overlap": True}}, "method": METHOD},
            "data.partition.overlap",
            "none",
        ),
        ({"data": {**DATA, "evaluate_on": "train"}, "method": METHOD}, "data.evaluate_on", "'test' or 'validation'"),
        ({"data": {**DATA, "evaluate_on": "validation"}, "method": METHOD}, "data.evaluate_on", "validation_share"),
        ({"data": {**DATA, "mean": "grey"}, "method": METHOD}, "data.mean", "number"),
        ({"data": {**DATA, "std": [0.5, 0.0]}, "method": METHOD}, "data.std", "greater than 0"),
        ({"data": {**DATA, "partition": "iid"}, "method": METHOD}, "data.partition", "kind"),
        ({"data": {**DATA, "partition": {"kind": "dir"}}, "method": METHOD}, "data.partition.kind", "dirichlet"),
        (
            {"data": {**DATA, "partition": {"kind": "iid", "beta": 1.0}}, "method": METHOD},
            "data.partition.beta",
            "none",
        ),
        (
            {"data": {**DATA, "partition": {"kind": "dirichlet", "beta": 0.0}}, "method": METHOD},
            "data.partition.beta",
            "greater than 0",
        ),
        ({"data": DATA, "method": {"name": "fedavg2"}}, "method.name", "fedavg"),
        ({"data": DATA, "method": {"mu": 0.1}}, "method.name", "fedavg"),
        ({"data": DATA, "method": METHOD, "model": {"layers": 2}}, "model.layers", "of mlp"),
        ({"data": DATA, "method": {"name": "fedavg", "mu": 0.1}}, "method.mu", "of fedavg"),
        ({"data": DATA, "method": {"name": "fedprox", "mu": "a"}}, "method.mu", "number"),
        ({"data": DATA, "method": {"name": "fedprox", "mu": -0.1}}, "method.mu", "greater than or equal to 0"),
        ({"data": DATA, "method": METHOD, "model": {"name": "vgg"}}, "model.name", "cnn2"),
        ({"data": DATA, "method": METHOD, "model": {"name": "mlp", "hidden": 0}}, "model.hidden", "greater than"),
        ({"data": DATA, "method": METHOD, "training": {"lr": 0.0}}, "training.lr", "greater than 0"),
        ({"data": DATA, "method": METHOD, "training": {"lr": float("nan")}}, "training.lr", "finite"),
        ({"data": DATA, "method": METHOD, "training": {"momentum": 1.0}}, "training.momentum", "less than 1"),
        ({"data": DATA, "method": METHOD, "training": {"augment": "flip"}}, "training.augment", "'crop_flip'"),
        ({"data": DATA, "method": METHOD, "participation": {"ratio": 0}}, "participation.ratio", "(0, 1]"),
        (
            {"data": DATA, "method": METHOD, "participation": {"ratio": [0.5, 0.1]}},
            "participation.ratio",
            "[low, high]",
        ),
        ({"data": DATA, "method": METHOD, "aggregation": {"rule": "max"}}, "aggregation.rule", "'krum'"),
        ({"data": DATA, "method": METHOD, "aggregation": {"trim": 0.1}}, "aggregation.trim", 'to "trimmed_mean"'),
        (
            {"data": DATA, "method": METHOD, "aggregation": {"rule": "median", "byzantine": 0.0}},
            "aggregation.byzantine",
            'to "krum" or "multi_krum"',
        ),
        (
            {"data": DATA, "method": METHOD, "aggregation": {"rule": "trimmed_mean", "trim": 0.5}},
            "aggregation.trim",
            "less than 0.5",
        ),
        ({"data": DATA, "method": METHOD, "run": {"placement": "pmap"}}, "run.placement", "'shard'"),
        ({"data": DATA, "method": METHOD, "run": {"placement": "map", "chunk": 4}}, "run.chunk", "one by one"),
        ({"data": DATA, "method": METHOD, "run": {"checkpoint_every": -1}}, "run.checkpoint_every", "or equal to 0"),
        ({"data": DATA, "method": METHOD, "trainning": {}}, "trainning", "training"),
    ],
)
def test_each_mistake_is_one_error_with_field_value_and_what_is_allowed(tables, field, allowed):
    with pytest.raises(ConfigError) as caught:
        Config(**tables)
    assert caught.value.field == field
    assert allowed in caught.value.allowed
    assert "\n" not in str(caught.value)
    section, *key = field.split(".")
    value = tables.get(section, {})
    for part in key:
        value = value.get(part, "(missing)") if isinstance(value, dict) else value
    if field not in ("method", "data.std"):
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"data.seed": -1}, "greater than or equal to 0"),
        ({"data.seed": 2**32}, "less than 4294967296"),
        ({"data.test_share": 0.0}, "greater than 0"),
        ({"data.test_share": 1.0}, "less than 1: it is a share"),
        ({"data.new_clients": 5}, "less than 1: it is a share"),
        ({"data.split": "official", "data.test_part_share": 0.0}, "greater than 0"),
        ({"data.validation_share": -0.1}, "greater than or equal to 0"),
        ({"data.validation_share": 1.0}, "less than 1: it is a share"),
        ({"data.partition.beta": 2e6}, "less than or equal to 1000000"),
        ({"data.partition.beta": float("nan")}, "a finite number"),
        ({"data.partition.kind": "weak_pathological", "data.partition.s": -1.0}, "greater than or equal to 0"),
        ({"data.partition.kind": "weak_pathological", "data.partition.s": 101.0}, "less than or equal to 100"),
        ({"data.partition.kind": "weak_pathological", "data.partition.style": "fancy"}, "'random' or 'fedpac'"),
        ({"data.partition.kind": "pathological", "data.partition.style": "fancy"}, "'random' or 'pfllib'"),
        ({"data.partition.style": "fancy"}, "'plain' or 'pfllib'"),
    ],
)
def test_partitions_and_splits_get_no_value_out_of_range(changes, allowed):
    with pytest.raises(ConfigError) as caught:
        Config(data=DATA, method=METHOD).replace(changes)
    assert caught.value.field == list(changes)[-1]
    assert caught.value.allowed.endswith(allowed)


@pytest.mark.parametrize(
    ("text", "overrides", "field"),
    [
        (None, [], "config file"),
        ("[data", [], "config file"),
        ("[data]\nsource = 'digits'\n[method]\nname = 'local'", ["lr=1"], "override"),
        ("[data]\nsource = 'digits'\n[method]\nname = 'local'", ["training.lr"], "override"),
        ("[data]\nsource = 'digits'\n[method]\nname = 'local'", ["training..lr=1"], "override"),
        ("[data]\nsource = 'digits'\n[method]\nname = 'local'", [".lr=1"], "override"),
        ("[data]\nsource = 'digits'\n[method]\nname = 'local'", ["data.source.x=1"], "override"),
        ("[data]\nsource = 'digits'\n[method]\nname = 'local'", ["training.lr=fast"], "training.lr"),
    ],
)
def test_bad_files_and_overrides_are_config_errors(tmp_path, text, overrides, field):
    path = tmp_path / "config.toml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.field == field


def test_shipped_configs_load():
    from pathlib import Path

    configs = sorted((Path(__file__).parent.parent / "configs").rglob("*.toml"))
    assert configs
    for path in configs:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        config = (
            load_sweep(path)[0] if "grid" in tables else load_tune(path)[0] if "space" in tables else load_config(path)
        )
        assert tomllib.loads(config.to_toml())["data"]["source"]


def test_a_config_is_copied_by_replace_which_checks():
    base = Config(data={"source": "digits"}, method={"name": "fedprox", "mu": 0.3})
    changed = base.replace({"training.lr": 0.1, "run.seed": 4})
    assert (changed.training.lr, changed.run.seed, changed.method["mu"]) == (0.1, 4, 0.3)
    assert base.training.lr == 0.005
    other = base.replace({"method.lam": 2.0, "method.name": "ditto"})  # whatever the order, the name comes first
    assert other.method == {"name": "ditto", "lam": 2.0, "personal_epochs": None}
    assert base.replace({"method.name": "fedprox"}) == base
    for field, value in [("training.learning_rate", 0.1), ("trainings.lr", 0.1), ("lr", 0.1), ("training.lr", -1.0)]:
        with pytest.raises(ConfigError, match=f"{field} = "):
            base.replace({field: value})
    with pytest.raises(TypeError, match=r"Config\.replace"):
        base.model_copy(update={"training.lr": 0.1})


def test_another_part_named_on_the_command_line_brings_its_own_defaults(tmp_path):
    path = tmp_path / "config.toml"
    tables = {"data": {"source": "digits", "partition": {"kind": "dirichlet", "beta": 0.3}}}
    path.write_text(Config(**tables, method={"name": "fedprox", "mu": 0.3}).to_toml())
    named = ["method.lam=2.0", "method.name=ditto", "data.partition.kind=iid"]  # in whatever order
    data = {"source": "digits", "partition": {"kind": "iid"}}
    assert load_config(path, named) == Config(data=data, method={"name": "ditto", "lam": 2.0})
    spaced = [f" {of.replace('=', ' = ')}" for of in [*named, "run.out=my runs/a"]]
    assert load_config(path, spaced) == load_config(path, named).replace("run.out", "my runs/a")
    assert load_config(path, ["method.name=fedprox"]).method == {"name": "fedprox", "mu": 0.3}


class Range(NamedTuple):
    low: float
    high: float


def test_numbers_of_numpy_and_paths_are_taken(tmp_path):
    plain = Config(data={"source": "digits"}, method={"name": "fedprox", "mu": 0.5}, run={"out": str(tmp_path)})
    numbers = {
        "method.mu": np.float32(0.5),
        "run.seed": np.int64(3),
        "participation.ratio": Range(np.float64(0.5), 1.0),
    }
    taken = plain.replace({**numbers, "run.out": tmp_path})
    assert taken == plain.replace({"run.seed": 3, "participation.ratio": (0.5, 1.0)})
    with pytest.raises(ConfigError, match=r"training\.rounds = 2\.5 "):
        plain.replace("training.rounds", np.float64(2.5))


def test_a_seed_may_be_any_of_32_bits():
    found = Config(data={**DATA, "seed": 2**31}, method=METHOD, run={"seed": 2**32 - 1})
    assert (found.data.seed, found.run.seed) == (2**31, 2**32 - 1)


def test_tuples_and_ranges_are_lists():
    run = {"export": ("features",), "metrics": ("auc",), "export_clients": range(3)}
    config = Config(data={**DATA, "mean": (0.5, 0.4, 0.3)}, method=METHOD, run=run)
    assert (config.data.mean, config.run.export_clients) == ([0.5, 0.4, 0.3], [0, 1, 2])
    assert (config.run.export, config.run.metrics) == (["features"], ["auc"])
    with pytest.raises(ConfigError, match=r"data\.std = 0\.0 is not usable: input should be greater than 0"):
        config.replace("data.std", (0.5, 0.0, 0.5))


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "config.toml"
    path.write_text('data.source = "digits"\nmethod.name = "fedavg"\nrun.out = "~/runs/a"\n', encoding="utf-8")
    run = load_config("~/config.toml", ["run.compilation_cache=~/cache"]).run
    assert (run.out, run.compilation_cache) == (f"{tmp_path}/runs/a", f"{tmp_path}/cache")
    assert load_config(path, ["run.compilation_cache=off"]).run.compilation_cache == "off"
    for load, table in ((load_sweep, "[grid]\nrun.seed = [0]"), (load_tune, "[space]\ntraining.lr = [0.1, 0.2]")):
        (tmp_path / "of_it.toml").write_text(f'config = "~/config.toml"\n{table}\n', encoding="utf-8")
        assert load("~/of_it.toml")[0].run.out == f"{tmp_path}/runs/a"
    assert folders_of(["~/runs"]) == [tmp_path / "runs"]


@pytest.mark.parametrize("text", ["2024", "2026-11-27", "12:30:00", "true", "1.5", "[a] b", "{a}"])
def test_text_that_looks_like_another_type_is_text_where_a_field_holds_text(text, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('data.source = "digits"\nmethod.name = "fedavg"\n', encoding="utf-8")
    rows = ["data.partition.kind=indices", f"data.partition.file={text}"]
    config = load_config(path, [f"run.out={text}", f"run.compilation_cache={text}", f"data.source={text}", *rows])
    found = config.run.out, config.run.compilation_cache, config.data.source, config.data.partition["file"]
    assert found == (text,) * 4
    assert load_config(path, ['run.out="a b"']).run.out == "a b"
    assert load_config(path, ["run.out=none"]).run.out is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.export=[features]", "not TOML; a shell takes quotes away, .*: 'run.export=\\[\"features\"\\]'$"),
        ("run.metrics=[a, b]", 'not TOML; a shell takes quotes away, .*: \'run.metrics=\\["a", "b"\\]\'$'),
        ("run.metrics=[brier", "not TOML; a shell takes quotes away, .*: 'run.metrics=\\[\"...\"\\]'$"),
        ("data.partition={kind = iid}", 'it is not TOML; .*: \'data.partition={"kind" = "iid"}\'$'),
        ("data.partition={kind iid}", "it is not TOML; .*: 'data.partition={key = \"...\"}'$"),
        ("training.lr=2026-11-27", "'2026-11-27' is not usable: input should be a valid number"),
        ("training.lr=12:30:00", "'12:30:00' is not usable: input should be a valid number"),
    ],
)
def test_what_an_override_cannot_mean_is_named_as_it_is_given(override, message, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('data.source = "digits"\nmethod.name = "fedavg"\n', encoding="utf-8")
    field, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path, [override])
    assert (caught.value.field, caught.value.value) == (field, value)


@pytest.mark.parametrize("path", [None, 3])
def test_what_is_no_path_of_a_config_is_refused(path):
    with pytest.raises(ConfigError, match=f"config file = {path} is not usable: the path of a file"):
        load_config(path)


@pytest.mark.parametrize("given", ["config.toml", {"data": {"source": "digits"}}, None])
def test_what_is_no_config_is_refused(given):
    for run in (simulate, lambda config: compare(config, ["local"]), lambda config: sweep(config, {"run.seed": [0]})):
        with pytest.raises(ConfigError, match=r"config = .* is not usable: a Config: load_config\(path\) of a file"):
            run(given)


def test_what_is_not_given_is_what_the_descriptions_say():
    assert [Attack(kind=kind).strength for kind in ("scaled", "gaussian", "sign_flip")] == [10.0, 1.0, None]
    assert [Attack(kind=kind).malicious_share for kind in ("none", "label_flip")] == [0.0, 0.2]
    assert Compression(kind="top_k").kept_share == 0.1
    assert Privacy(clip=1.0, noise=1.0).target_delta == 1e-5


def test_what_is_no_text_is_named_and_not_raised():
    with pytest.raises(ConfigError, match=r"method\.1 = 1 is not usable: keys should be strings"):
        Config(data={"source": "digits"}, method={"name": "fedavg", 1: 2})
    with pytest.raises(ConfigError, match=r"method\.name = \['fedavg', 'local'\] is not usable"):
        Config(data={"source": "digits"}, method={"name": "fedavg"}).replace(
            "method.name", np.array(["fedavg", "local"])
        )
    with pytest.raises(ConfigError, match=r"config file = 'a\\x00\.toml' is not usable: cannot be read"):
        load_config("a\0.toml")
