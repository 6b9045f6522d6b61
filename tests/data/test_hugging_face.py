"""Data sets of Hugging Face's library, written to disk and in hand, without a network."""

import sys

import numpy as np
import pytest
from PIL import Image

from fedjax_pfl.data import hugging_face
from fedjax_pfl.data.divide import deal
from fedjax_pfl.data.intake import as_dataset
from fedjax_pfl.data.sources import load
from fedjax_pfl.errors import ConfigError

datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")

RNG = np.random.default_rng(2)
COLOURS, GRAY = RNG.integers(0, 256, (6, 4, 5, 3), np.uint8), RNG.integers(0, 256, (6, 4, 5), np.uint8)
Y = [0, 2, 1, 2, 0, 1]
CLASS = datasets.ClassLabel(names=["ant", "bee", "cat"])


@pytest.fixture(autouse=True)
def quiet_and_alone(monkeypatch):
    """No bars of progress, and no folder of data."""
    monkeypatch.delenv("FEDJAX_PFL_DATA", raising=False)
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def made(features, /, **columns):
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def of_images(images=COLOURS, labels=Y, image="img", label="label"):
    pictures = [Image.fromarray(pixels) for pixels in images]
    return made({image: datasets.Image(), label: CLASS}, **{image: pictures, label: labels})


def parts(**more):
    return datasets.DatasetDict(test=of_images(COLOURS[4:], Y[4:]), train=of_images(COLOURS[:4], Y[:4]), **more)


def check(found, images, train_rows=None, labels=Y):
    np.testing.assert_array_equal(found.images, images)
    np.testing.assert_array_equal(found.labels, labels)
    assert (found.images.dtype, found.labels.dtype, found.train_rows) == (images.dtype, np.int32, train_rows)


def test_a_folder_that_was_saved_is_a_source(tmp_path, monkeypatch):
    parts(validation=of_images(COLOURS[:1], [0])).save_to_disk(tmp_path / "shelf" / "both")
    of_images().save_to_disk(tmp_path / "one")
    check(load(f"hf:{tmp_path / 'shelf' / 'both'}"), COLOURS, train_rows=4)
    monkeypatch.chdir(tmp_path)
    check(load("hf:one"), COLOURS)
    monkeypatch.setenv("FEDJAX_PFL_DATA", str(tmp_path / "shelf"))
    found = load("hf:both")
    check(found, COLOURS, train_rows=4)
    assert (found.name, found.classes, found.vocabulary) == ("both", 3, None)
    assert load("hf:both/").name == "both"


def test_options_name_columns_and_configuration(tmp_path, monkeypatch):
    features = {"a": datasets.Image(), "b": datasets.Image(), "fine_label": CLASS, "coarse_label": CLASS}
    images = {"a": [Image.fromarray(pixels) for pixels in COLOURS], "b": [Image.fromarray(pixels) for pixels in GRAY]}
    two = made(features, **images, fine_label=Y, coarse_label=[1, 1, 0, 0, 1, 1])
    two.save_to_disk(tmp_path / "two")
    check(load(f"hf:{tmp_path / 'two'}?image=a"), COLOURS)  # fine_label is a usual name, coarse_label none
    check(load(f"hf:{tmp_path / 'two'}?label=coarse_label&image=b"), GRAY[..., None], labels=[1, 1, 0, 0, 1, 1])
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *given: asked.append(given) or parts())
    check(load("hf:owner/set?config=plain"), COLOURS, train_rows=4)
    assert load("hf:owner/set").name == "set"
    assert asked == [("owner/set", "plain"), ("owner/set", None)]


def test_data_sets_in_hand_are_data():
    check(as_dataset(parts()), COLOURS, train_rows=4)
    check(as_dataset(of_images(image="a", label="b")), COLOURS)
    check(as_dataset((of_images(COLOURS[:2], Y[:2]), of_images(COLOURS[2:], Y[2:]))), COLOURS, train_rows=2)
    check(as_dataset(of_images().with_format("numpy")), COLOURS)


def test_columns_are_arrays():
    data = made({"x": FLOATS, "y": VALUE("int64")}, x=NUMBERS.astype(np.float32).tolist(), y=Y)
    check(as_dataset((data["x"], data["y"])), NUMBERS.astype(np.float32))


def test_parts_that_are_not_read_are_named_when_a_test_part_is_missed(tmp_path):
    given = datasets.DatasetDict(train=of_images(), validation=of_images())
    given.save_to_disk(tmp_path / "set")
    for found in (as_dataset(given), load(f"hf:{tmp_path / 'set'}")):
        with pytest.raises(ConfigError, match=r"has no test part of its own \(left out: validation\); use \"merge\""):
            deal(found, clients=2, partition={"kind": "iid"}, split="official", seed=0)


def test_gray_images_have_one_channel_and_three_among_others():
    check(as_dataset(of_images(GRAY)), GRAY[..., None])
    mixed = [*GRAY[:2], *COLOURS[2:]]
    expected = np.concatenate([np.repeat(GRAY[:2, ..., None], 3, -1), COLOURS[2:]])
    check(as_dataset(of_images(mixed)), expected)
    transparent = np.concatenate([COLOURS, np.full((6, 4, 5, 1), 255, np.uint8)], axis=-1)
    check(as_dataset(of_images(transparent)), COLOURS)


@pytest.mark.parametrize("chunk", [1, 4, 6])
def test_images_are_decoded_in_chunks(chunk, monkeypatch):
    monkeypatch.setattr(hugging_face, "_CHUNK", chunk)
    check(as_dataset(of_images()), COLOURS)


NUMBERS = RNG.normal(size=(6, 3))
VALUE = datasets.Value


@pytest.mark.parametrize(
    ("feature", "given", "expected"),
    [
        (datasets.Sequence(VALUE("float64")), NUMBERS, NUMBERS.astype(np.float32)),
        (datasets.Sequence(VALUE("float32")), NUMBERS, NUMBERS.astype(np.float32)),
        (datasets.Array2D((4, 5), "uint8"), GRAY, GRAY[..., None]),
        (datasets.Sequence(VALUE("uint8")), GRAY[:, :, :4].reshape(6, 16), GRAY[:, :, :4, None]),
        (datasets.Sequence(datasets.Sequence(VALUE("int64"))), GRAY, GRAY[..., None]),
    ],
)
def test_numbers_are_pixels_or_stay_as_they_are(feature, given, expected):
    for name, label in (("x", "y"), ("features", "target")):
        found = made({name: feature, label: VALUE("int32")}, **{name: given.tolist(), label: Y})
        check(as_dataset(found), expected)


def row(kind, value, label="label"):
    return made({"x": kind, label: VALUE("int64")}, x=[value], **{label: [0]})


def stored(**image):
    """Two samples with the same image, as it is stored."""
    return made({"img": datasets.Image(), "label": CLASS}, img=[image] * 2, label=[0, 1])


def numbered(train, test):
    """Parts whose strings are numbered one by one, as the library does it."""
    given = {"train": list(train), "test": list(test)}
    rows = {
        part: made({"x": FLOATS, "label": VALUE("string")}, x=[[1.0]] * len(y), label=y) for part, y in given.items()
    }
    return datasets.DatasetDict(rows).class_encode_column("label")


def named(classes):
    return made({"x": FLOATS, "label": datasets.ClassLabel(names=list(classes))}, x=[[1.0]], label=[0])


def beside(name, kind):
    """A column of a type that says what it is for, beside one whose name does."""
    feature, value = (CLASS, 0) if kind is CLASS else (kind, Image.fromarray(GRAY[0]))
    columns = {"x": [[1.0]], name: [0], "gender": [value]}
    return made({"x": FLOATS, name: VALUE("int64"), "gender": feature}, **columns)


LIST, FLOATS = datasets.Sequence(VALUE("int64")), datasets.Sequence(VALUE("float32"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: row(LIST, [1, 2], "kind"), r"must be said: hf:NAME\?label=COLUMN, or .*; present: x \("),
        (lambda: row(LIST, [1, 300]), r"samples must be uint8 \(pixels\) or floats, got int64"),
        (lambda: row(datasets.Array2D((1, 2), "int64"), [[0, 256]]), r"must be uint8 .* or floats, got int64"),
        (lambda: row(datasets.Array2D((1, 2), "int64"), [[-1, 255]]), r"must be uint8 .* or floats, got int64"),
        (lambda: row(VALUE("string"), "word"), "or floats, got <U4"),
        (
            lambda: made({"x": LIST, "y": VALUE("int64")}, x=[[1], [1, 2]], y=[0, 1]),
            "'x' of the train part must be numbers, in one shape",
        ),
        (
            lambda: made({"x": FLOATS, "y": VALUE("int64")}, x=[None, [1.0]], y=[0, 1]),
            "'x' of the train part must be numbers, .*, none of them missing",
        ),
        (
            lambda: made({"x": datasets.Array2D((1, 2), "uint8"), "y": CLASS}, x=[[[1, 2]], None], y=[0, 1]),
            "the samples must be finite; 2 of 4 numbers, in 1 rows, are NaN",
        ),
        (lambda: row(datasets.Array2D((0, 3), "int64"), np.zeros((0, 3), int)), "'x' of the train part must be num"),
        (
            lambda: made({"x": FLOATS, "y": CLASS}, x=[[1.0]] * 2, y=[0, None]),
            "sample 1 of the train part has no label",
        ),
        (lambda: made({"x": FLOATS, "y": LIST}, x=[[1.0]] * 2, y=[[0], [0, 1]]), "'y' of the train part differ in sh"),
        (lambda: made({"x": FLOATS, "y": VALUE("string")}, x=[[1.0]], y=["ant"]), r"got <U3: numpy\.unique"),
        (lambda: made({"img": datasets.Image(), "label": CLASS}, img=[None], label=[0]), "sample 0 has no image"),
        (
            lambda: stored(bytes=b"junk", path=None),
            r"in column 'img' of the train part, one of samples 0 to 1, cannot be decoded \(UnidentifiedImageError: ",
        ),
        (lambda: stored(bytes=None, path="/none.png"), r"column 'img' of the train .* \(FileNotFoundError: "),
        (lambda: of_images([GRAY[0].astype(np.int32)], [0]), r"more than 8 bits \(Pillow's mode I\) in column 'img'"),
        (lambda: of_images([GRAY[0], GRAY[1, :2]], [0, 1]), r"one size .* sample 0 has \(4, 5\), sample 1 \(2, 5\)"),
        (lambda: of_images([], []), "the train part holds nothing"),
        (
            lambda: numbered(["ant", "bee", "cat"], ["bee", "cat"]),
            r"'label' numbers the classes of train as ant, bee, cat and of test as bee, cat; test.align_labels_w",
        ),
        (
            lambda: (named("abcdefg"), named("bacdefg")),
            r"train as a, b, c, d, e, \.\.\. and of test as b, a, c, d, e, ",
        ),
        (lambda: beside("label", CLASS), r"which column is the label must be said: .*; present: x \(.*label \(Value\)"),
        (lambda: beside("image", datasets.Image()), "which column is the image must be said: "),
        (lambda: of_images(labels=[-1] * 6), "labels must be 0 or more"),
        (lambda: [of_images()] * 4, r"data = 'list of 4' is not usable: \(x, y\) or "),
        (lambda: datasets.DatasetDict(test=of_images()), "it needs a part 'train'; present: test"),
        (lambda: of_images().to_iterable_dataset(), r"data = 'IterableDataset' is not usable: \(x, y\)"),
    ],
)
def test_data_in_hand_that_do_not_fit_are_one_line(data, message):
    with pytest.raises(ConfigError, match=message) as caught:
        as_dataset(data())
    assert caught.value.field == "data"
    assert "\n" not in str(caught.value)


def test_images_that_are_not_to_be_decoded_are():
    check(as_dataset(of_images().cast_column("img", datasets.Image(decode=False))), COLOURS)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("", "hf:NAME or hf:FOLDER; options are"),
        ("set?size=3", "hf:NAME or hf:FOLDER; options are"),
        ("set?label", "hf:NAME or hf:FOLDER; options are"),
        ("set?label=a&label=b", "hf:NAME or hf:FOLDER; options are"),
        ("{folder}?image=pixels", r"there is no column 'pixels'; present: img \(Image\), label \(ClassLabel\)"),
        ("owner/none", r"no such folder, and as a data set of the hub it cannot be loaded \(OSError: no way there\)$"),
        ("{folder}/junk", "an image in column 'img' of the train part, one of samples 0 to 1, cannot be decoded"),
        ("a" * 300, "no such folder, and as a data set of the hub it cannot be loaded"),
        ("~nobody_knows/set", "no such folder, and as a data set of the hub it cannot be loaded"),
        ("{folder}/damaged", r"cannot be loaded \(FileNotFoundError: "),
    ],
)
def test_sources_that_cannot_be_used_are_one_line(tmp_path, monkeypatch, argument, message):
    def unreachable(*_):
        raise OSError("no way there\nand more")

    of_images().save_to_disk(tmp_path / "set")
    stored(bytes=b"junk", path=None).save_to_disk(tmp_path / "set" / "junk")
    (tmp_path / "set" / "damaged").mkdir()
    (tmp_path / "set" / "damaged" / "dataset_info.json").write_text("{}")
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    source = f"hf:{argument.format(folder=tmp_path / 'set')}"
    with pytest.raises(ConfigError, match=message) as caught:
        load(source)
    assert (caught.value.field, caught.value.value) == ("data.source", source)


def test_without_the_library_there_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as though it were not installed
    with pytest.raises(ConfigError, match=r'the package datasets: pip install "fedjax_pfl\[hf\]"$') as caught:
        load("hf:mnist")
    assert (caught.value.field, caught.value.value) == ("data.source", "hf:mnist")
