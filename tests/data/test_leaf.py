"""LEAF shards: images and text, all that is known to be odd about them, one clear error per damage; then divided."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import Config
from fedjax_pfl.data.leaf import ALPHABET
from fedjax_pfl.data.sources import load
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.build import divide, make_engine, shape_of

RNG = np.random.default_rng(0)
WHITE, BLACK = [1.0] * 9, [0] * 9
SPACE = ALPHABET.index(" ")


def shard(path, users, **more):
    """Writes {user: (x, y)} as a shard, with whatever else belongs to it or not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    user_data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    path.write_text(json.dumps({"users": sorted(users), "num_samples": [-1], "user_data": user_data, **more}))
    return path


def tokens(text):
    return [ALPHABET.index(symbol) for symbol in text]


@pytest.fixture
def images(tmp_path):
    """Users b and a in both parts, c in the training and d in the test part alone; every label says whose it is."""
    train = {"b": ([WHITE, BLACK, WHITE], [1, 11, 21]), "a": ([WHITE, WHITE], [0, 10]), "c": ([BLACK] * 4, [2] * 4)}
    shard(tmp_path / "set/train/all_data_0.json", train)
    shard(tmp_path / "set/test/all_data_0.json", {"d": ([WHITE], [3]), "b": ([BLACK, WHITE], [1, 11])})
    shard(tmp_path / "set/test/all_data_1.json", {"a": ([BLACK], [10])})
    return f"leaf:{tmp_path / 'set'}"


@pytest.fixture(scope="session")
def plays(tmp_path_factory):
    """Three roles of twelve training and four test windows of five characters."""
    folder = tmp_path_factory.mktemp("leaf") / "plays"
    for part, count in (("train", 12), ("test", 4)):
        lines = {role: "".join(RNG.choice(list("abcdef "), count + 5)) for role in ("king", "fool", "ghost")}
        windows = {role: [line[i : i + 5] for i in range(count)] for role, line in lines.items()}
        shard(folder / part / "all_data.json", {role: (windows[role], list(line[5:])) for role, line in lines.items()})
    return f"leaf:{folder}"


# --- Reading ---------------------------------------------------------------------------------------------------------


def test_images_keep_white_paper_white_and_users_their_order(images):
    data = load(images)
    assert (data.name, data.classes, data.train_rows, data.vocabulary) == ("set", 22, 9, None)
    assert data.images.shape == (13, 3, 3, 1)
    assert data.images.dtype == np.uint8
    # Users are sorted in each part; a and b come before c and d.
    np.testing.assert_array_equal(data.users, [0, 0, 1, 1, 1, 2, 2, 2, 2, 0, 1, 1, 3])
    np.testing.assert_array_equal(data.labels, [0, 10, 1, 11, 21, 2, 2, 2, 2, 10, 1, 11, 3])
    white = [255, 255, 255, 0, 255, 0, 0, 0, 0, 0, 0, 255, 255]
    np.testing.assert_array_equal(data.images.reshape(13, 9), np.repeat(np.array(white)[:, None], 9, 1))


def test_pixels_are_rounded_to_the_nearest_of_256_values(tmp_path):
    shard(tmp_path / "a.json", {"a": ([[0.0, 0.499 / 255, 0.501 / 255, 254.4 / 255]], [0])})
    np.testing.assert_array_equal(load(f"leaf:{tmp_path}").images.reshape(-1), [0, 0, 1, 254])


def test_labels_may_be_whole_numbers_floats_or_characters(tmp_path):
    shard(tmp_path / "a.json", {"a": ([WHITE] * 7, [3, 4.0, "5", "A", "Z", "a", "z"])})
    data = load(f"leaf:{tmp_path}")
    np.testing.assert_array_equal(data.labels, [3, 4, 5, 10, 35, 36, 61])
    assert data.classes == 62


def test_neither_the_sharding_nor_the_order_of_keys_nor_num_samples_changes_anything(tmp_path):
    one, two = tmp_path / "one/same", tmp_path / "two/same"
    shard(one / "all_data_0.json", {"a": ([WHITE, BLACK, WHITE], [0, 1, 2]), "b": ([BLACK], [3])})
    shard(two / "all_data_1.json", {"b": ([BLACK], [3]), "a": ([WHITE], [2])})
    first = {"user_data": {"empty": {"y": [], "x": []}, "a": {"y": [0, 1], "x": [WHITE, BLACK]}}}
    (two / "all_data_0.json").write_text(json.dumps({**first, "num_samples": [800, 7, 0], "users": ["nobody"]}))
    (two / "notes.txt").write_text("no shard")
    for ours, theirs in zip(load(f"leaf:{one}"), load(f"leaf:{two}"), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_one_set_alone_has_no_test_part(tmp_path):
    shard(tmp_path / "flat/all_data.json", {"a": ([WHITE], [1])})
    shard(tmp_path / "deep/train/all_data.json", {"a": ([WHITE], [1])})
    for name in ("flat", "deep"):
        data = load(f"leaf:{tmp_path / name}")
        assert (data.name, data.train_rows, len(data.labels)) == (name, None, 1)


def test_the_alphabet_has_80_symbols():
    assert len(ALPHABET) == len(set(ALPHABET)) == 80


def test_the_symbols_are_in_the_order_of_ascii():
    """As in LEAF, where a label may be given as a number: 24 is a question mark, 25 an A, 53 an a and 79 the brace."""
    assert sorted(ALPHABET) == list(ALPHABET)
    assert [ALPHABET[token] for token in (0, 1, 24, 25, 53, 79)] == list("\n ?Aa}")


def test_text_becomes_tokens_and_unknown_characters_spaces(tmp_path):
    texts = ["To be,", "or not", "\n!}[]z", "a\u00e9@~\u4e16b", "\ud83d\ude00xyzw\ude00"]
    shard(tmp_path / "a.json", {"ROLE": (texts, [" ", "}", "\u00e9", 7, 79.0])})
    data = load(f"leaf:{tmp_path}")
    expected = [*map(tokens, texts[:3]), tokens("a    b"), tokens(" xyzw ")]
    np.testing.assert_array_equal(data.images, expected)
    np.testing.assert_array_equal(data.labels, [SPACE, 79, SPACE, 7, 79])
    assert data.images.dtype == np.uint8
    # All symbols are classes, whether they occur or not.
    assert (data.vocabulary, data.classes) == (80, 80)
    np.testing.assert_array_equal(data.users, np.zeros(5))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no readable JSON"),
        ("[" * 100_000, "no readable JSON"),
        ("[1]", 'no LEAF shard: it has no table "user_data"'),
        ('{"users": []}', 'no table "user_data"'),
        ('{"user_data": [1]}', 'no table "user_data"'),
        ({"a": [1, 2]}, "user 'a' in .*bad.json: it needs the lists x and y"),
        ({"a": {"x": [WHITE]}}, "it needs the lists x and y"),
        ({"a": {"x": "text", "y": [1]}}, "it needs the lists x and y"),
        ({"a": {"x": [WHITE], "y": [1, 2]}}, "1 samples x and 2 labels y"),
        ({"a": {"x": [WHITE, WHITE[:4]], "y": [1, 2]}}, "neither texts nor lists of numbers"),
        ({"a": {"x": [WHITE, "text"], "y": [1, 2]}}, "neither texts nor lists of numbers"),
        ({"a": {"x": [[{}] * 9], "y": [1]}}, "neither texts nor lists of numbers"),
        ({"a": {"x": [[10**400] * 9], "y": [1]}}, "neither texts nor lists of numbers"),
        ({"a": {"x": [WHITE[:8]], "y": [1]}}, r"x of shape \[1, 8\] is no list of flat square images"),
        ({"a": {"x": [[]], "y": [1]}}, "no list of flat square images"),
        ({"a": {"x": [1.0], "y": [1]}}, "no list of flat square images"),
        ({"a": {"x": [[[1.0]]], "y": [1]}}, "no list of flat square images"),
        ({"a": {"x": [[0, 255, 0, 0]], "y": [1]}}, "pixels from 0.0 to 255.0; they must be within 0 and 1"),
        ({"a": {"x": [[0, float("nan"), 0, 0]], "y": [1]}}, "pixels from nan"),
        ({"a": {"x": [[None] * 9], "y": [1]}}, "pixels from nan"),
        ({"a": {"x": [WHITE], "y": [1.5]}}, "label 1.5 is neither a whole number, 0 or more, nor a known character"),
        ({"a": {"x": [WHITE], "y": [-1]}}, "label -1 is neither"),
        ({"a": {"x": [WHITE], "y": [2**31]}}, "label 2147483648 is neither"),
        ({"a": {"x": [WHITE], "y": ["?"]}}, "label '\\?' is neither"),
        ({"a": {"x": [WHITE], "y": [None]}}, "label None is neither"),
        ({"a": {"x": ["abc"], "y": ["de"]}}, "label 'de' is neither a whole number, 0 to 79, nor a known character"),
        ({"a": {"x": ["abc"], "y": [80]}}, "label 80 is neither"),
        ({"a": {"x": ["abc", "ab"], "y": ["d", "c"]}}, "texts of 2 and of 3 characters"),
        ({"a": {"x": [""], "y": ["d"]}}, "texts of 0 and of 0 characters"),
        (
            {"a": {"x": ["01.jpg", "02.jpg"], "y": [0, 1]}},
            "x has the names of files, such as '01.jpg'; of LEAF, images",
        ),
        (
            {"a": {"x": [WHITE], "y": [1]}, "b": {"x": ["abc"], "y": ["d"]}},
            "user 'b' in .*it has texts of 3 characters",
        ),
        (
            {"a": {"x": [WHITE], "y": [1]}, "b": {"x": [[0]], "y": [1]}},
            "images of 1x1 pixels, bad.json has images of 3x3",
        ),
        ({"a": {"x": [], "y": []}}, "holds no JSON shard with samples"),
    ],
)
def test_damaged_shards_are_named(tmp_path, content, message):
    text = content if isinstance(content, str) else json.dumps({"user_data": content})
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(f"leaf:{tmp_path}")
    assert (caught.value.field, caught.value.value) == ("data.source", f"leaf:{tmp_path}")
    assert str(tmp_path) in caught.value.allowed


def test_damage_in_the_second_shard_or_between_the_parts_is_named(tmp_path):
    shard(tmp_path / "train/a_0.json", {"a": ([WHITE], [1])})
    second = shard(tmp_path / "train/a_1.json", {"a": (["abc"], ["d"])})
    with pytest.raises(ConfigError, match=r"user 'a' in .*a_1.json: it has texts of 3 .* a_0.json has images of 3x3"):
        load(f"leaf:{tmp_path}")
    second.unlink()
    test = shard(tmp_path / "test/a_0.json", {"a": (["abc"], ["d"])})
    with pytest.raises(ConfigError, match=r"train are images of 3x3 pixels, .*test texts of 3 characters"):
        load(f"leaf:{tmp_path}")
    test.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"test/a_0.json is no readable JSON"):
        load(f"leaf:{tmp_path}")
    test.unlink()
    with pytest.raises(ConfigError, match=r"test holds no JSON shard"):
        load(f"leaf:{tmp_path}")


def test_folders_that_are_missing_or_are_files(tmp_path, monkeypatch):
    file = shard(tmp_path / "a.json", {"a": ([WHITE], [1])})
    for argument, message in [
        ("", "leaf:PATH"),
        (str(tmp_path / "none"), "no such folder"),
        (str(file), "no such folder"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load(f"leaf:{argument}")
    monkeypatch.setenv("FEDJAX_PFL_DATA", str(tmp_path.parent))
    assert load(f"leaf:{tmp_path.name}").classes == 2


# --- Dividing by users -----------------------------------------------------------------------------------------------


def config(source, method="local", model="char_lstm", training=None, **data):
    data = {"source": source, "clients": 2, "partition": {"kind": "natural"}, **data}
    options = {"hidden": 4, "embedding": 3} if model == "char_lstm" else {}
    training = {"batch_size": 4} | (training or {})
    return Config(data=data, model={"name": model, **options}, method={"name": method}, training=training)


def rows(table, client):
    return sorted(np.asarray(table.index[client, : table.count[client]]).tolist())


def test_official_clients_are_tested_on_the_test_samples_of_their_own_user(images):
    federation, manifest = divide(config(images, split="official"), load(images))
    # Rows as in the first test: a trains on 0, 1 and is tested on 9; b on 2, 3, 4 and on 10, 11. c has nothing to be
    # tested on, d nothing to train on.
    assert [rows(federation.train, i) for i in range(2)] == [[0, 1], [2, 3, 4]]
    assert [rows(federation.test, i) for i in range(2)] == [[9], [10, 11]]
    assert rows(federation.pooled, 0) == [9, 10, 11]
    assert (manifest["n_train"], manifest["n_test"]) == ([2, 3], [1, 2])
    assert manifest["notes"] == ["1 user of 3 without test samples: left out"]
    with pytest.raises(ConfigError, match="1 to 2, the number of users with 2 samples") as caught:
        divide(config(images, split="official", clients=4), load(images))
    assert caught.value.field == "data.clients"


def test_all_users_of_the_training_part_are_clients_if_so_many_are_asked_for(images):
    federation, manifest = divide(config(images, split="official", clients=3), load(images))
    assert [rows(federation.train, i) for i in range(3)] == [[0, 1], [2, 3, 4], [5, 6, 7, 8]]
    assert [rows(federation.test, i) for i in range(3)] == [[9], [10, 11], []]
    assert manifest["notes"] == ["1 client of 3 without test samples: scores on test samples leave them out"]


def test_official_clients_may_set_aside_validation_samples_and_be_limited_in_size(plays):
    options = {"split": "official", "clients": 3, "samples_per_client": 8, "validation_share": 0.25}
    federation, manifest = divide(config(plays, **options), load(plays))
    assert (manifest["n_train"], manifest["n_validation"], manifest["n_test"]) == ([6] * 3, [2] * 3, [4] * 3)
    users = load(plays).users
    for table in (federation.train, federation.validation, federation.test):
        assert [set(users[rows(table, client)].tolist()) for client in range(3)] == [{0}, {1}, {2}]


def test_windows_of_text_that_overlap_with_those_trained_on_are_noted(plays, images):
    noted = {}
    for source, split, share in [
        (plays, "merge", 0.0),
        (plays, "official", 0.25),
        (plays, "official", 0.0),
        (images, "merge", 0.0),
    ]:
        notes = divide(config(source, split=split, validation_share=share), load(source))[1]["notes"]
        noted[source, split, share] = [note for note in notes if note.startswith("windows of a text overlap")]
    assert "those of the test part" in noted[plays, "merge", 0.0][0]
    assert "those of the validation part" in noted[plays, "official", 0.25][0]
    assert noted[plays, "official", 0.0] == noted[images, "merge", 0.0] == []


def test_merge_splits_all_samples_of_a_user(images):
    federation, manifest = divide(config(images, clients=3, test_share=0.34), load(images))
    mine = [rows(federation.train, i) + rows(federation.test, i) for i in range(3)]
    assert [sorted(held) for held in mine] == [[0, 1, 9], [2, 3, 4, 10, 11], [5, 6, 7, 8]]
    assert manifest["n_test"] == [2, 2, 2]
    assert manifest["notes"] == ["1 user of 4 with fewer than 2 samples to divide: left out"]
    assert divide(config(images, clients=4), load(images))[1]["n_test"] == [1, 2, 1, 0]  # d has one sample


def test_disjoint_users_can_be_merged_but_not_tested_on_their_own(tmp_path):
    shard(tmp_path / "train/a.json", {"a": ([WHITE] * 2, [0, 1]), "b": ([WHITE] * 2, [0, 1])})
    shard(tmp_path / "test/a.json", {"c": ([WHITE] * 2, [0, 1]), "d": ([WHITE] * 2, [0, 1])})
    source = f"leaf:{tmp_path}"
    with pytest.raises(ConfigError, match=r"no user with samples in both parts.*merge") as caught:
        divide(config(source, split="official"), load(source))
    assert caught.value.field == "data.split"
    assert divide(config(source, clients=4), load(source))[1]["sizes"] == [2] * 4
    federation, _ = divide(config(source, clients=2, split="official", partition={"kind": "iid"}), load(source))
    assert rows(federation.pooled, 0) == [4, 5, 6, 7]  # other partitions ask for labels alone


def test_a_source_without_users_has_no_natural_partition():
    with pytest.raises(ConfigError, match="digits has no users; use one of iid, ") as caught:
        divide(config("digits"), load("digits"))
    assert (caught.value.field, caught.value.value) == ("data.partition.kind", "natural")


# --- Text and models, methods, augmentation --------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["local", "fedavg_ft", "fedrep", "fedecouple"])
def test_methods_run_on_text(plays, method):
    wanted = config(plays, method, training={"copies": "none"})
    engine, federation = make_engine(wanted, shape_of(load(plays))), divide(wanted, load(plays))[0]
    key, number = jax.random.key(0), jax.ShapeDtypeStruct((), jnp.int32)
    run = jax.eval_shape(engine.init, key, federation)
    after = jax.eval_shape(engine.rounds, key, run, number, number, jax.ShapeDtypeStruct((), jnp.bool), federation)
    assert jax.tree.map(lambda leaf: leaf.shape, after) == jax.tree.map(lambda leaf: leaf.shape, run)


@pytest.mark.parametrize(
    ("method", "message"),
    [("fedcpd", "needs a model with feature maps"), ("pfedcspc", "needs a model with a projection")],
)
def test_methods_that_need_images_say_so(plays, method, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_engine(config(plays, method), shape_of(load(plays)))
    assert (caught.value.field, caught.value.value) == ("method.name", method)


def test_models_of_the_other_kind_are_refused(plays, images):
    with pytest.raises(ConfigError, match="it reads images, and plays is text of 80 symbols") as caught:
        make_engine(config(plays, model="mlp"), shape_of(load(plays)))
    assert (caught.value.field, caught.value.value) == ("model.name", "mlp")
    with pytest.raises(ConfigError, match="it reads text of 80 symbols, and set is images") as caught:
        make_engine(config(images), shape_of(load(images)))
    assert (caught.value.field, caught.value.value) == ("model.name", "char_lstm")


def test_augmentation_of_text_is_refused_whether_asked_for_or_a_default(plays):
    with pytest.raises(ConfigError, match=r'"none": plays is text.*\'concat\'.*what fedecouple does unless') as caught:
        make_engine(config(plays, "fedecouple"), shape_of(load(plays)))
    assert caught.value.field == "training.copies"
    for field, kind in (("copies", "replace"), ("augment", "crop_flip")):
        with pytest.raises(ConfigError, match=f"'{kind}' augments images$") as caught:
            make_engine(config(plays, training={field: kind}), shape_of(load(plays)))
        assert (caught.value.field, caught.value.value) == (f"training.{field}", kind)


# --- Real data -------------------------------------------------------------------------------------------------------

FOLDER = Path(os.environ.get("FEDJAX_PFL_DATA", ""))


def real(name):
    reason = f"FEDJAX_PFL_DATA names no folder with {name}"
    return pytest.mark.skipif("FEDJAX_PFL_DATA" not in os.environ or not (FOLDER / name).exists(), reason=reason)


@real("shakespeare")
def test_shakespeare():
    data = load("leaf:shakespeare")
    assert data.images.shape == (88_648, 80)
    assert (data.train_rows, data.users.max() + 1, data.classes) == (77_231, 100, 80)
    text = "".join(ALPHABET[token] for token in data.images[0])
    # The label of a window is the last character of the next window.
    np.testing.assert_array_equal(data.labels[:100], data.images[1:101, -1])
    assert text.isprintable()


@real("femnist_digits")
def test_femnist_digits():
    data = load("leaf:femnist_digits")
    assert data.images.shape == (7_200, 28, 28, 1)
    assert (data.train_rows, data.users.max() + 1, data.classes) == (5_760, 120, 10)
    assert data.images[:, :2].mean() > 250  # the margin is white paper


@real("mnist_by_writer.npz")
def test_mnist_by_writer():
    data = load("npz:mnist_by_writer.npz")
    assert data.images.shape == (60_000, 28, 28, 1)
    sizes = np.bincount(data.users)
    assert (len(sizes), np.median(sizes)) == (539, 116)
