"""tensorflow-datasets without TensorFlow or a network: it reads tiny data that were written under real names."""

import json
import shutil
import subprocess

import numpy as np
import pytest
import tensorflow_datasets
from PIL import Image

from fedjax_pfl.data import sources, tfds
from fedjax_pfl.errors import ConfigError

RNG = np.random.default_rng(0)
IMAGES = {
    "train": RNG.integers(0, 256, (7, 32, 32, 3), np.uint8),
    "test": RNG.integers(0, 256, (3, 32, 32, 3), np.uint8),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder of data sets, and an empty cache."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "data"


def prepare(folder, name="cifar10", config=None, version="3.0.2", images=IMAGES, features=None):
    """Writes images of the labels 0, 1, 2, 0, 1, ... as though they were the data set of that name and version."""
    core = tensorflow_datasets.core
    shape = next(iter(images.values())).shape[1:]
    features = features or {
        "image": tensorflow_datasets.features.Image(shape=shape),
        "label": tensorflow_datasets.features.ClassLabel(num_classes=10),
    }

    class Tiny(core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = core.Version(version)
        BUILDER_CONFIGS = [core.BuilderConfig(name=config)] if config else []

        def _info(self):
            return core.DatasetInfo(builder=self, features=tensorflow_datasets.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {part: self._generate_examples(pixels) for part, pixels in images.items()}

        def _generate_examples(self, pixels):
            for row, image in enumerate(pixels):
                sample = {"image": Image.fromarray(image.squeeze()), "label": row % 3}
                yield row, {feature: sample.get(feature, row) for feature in features}

    Tiny.name = name
    Tiny(data_dir=folder, file_format="array_record").download_and_prepare()


def refused(source):
    with pytest.raises(ConfigError) as caught:
        sources.load(source)
    assert (caught.value.field, caught.value.value) == ("data.source", source)
    return caught.value.allowed


def by_image(images, labels):
    """Samples in an order that does not depend on theirs: TFDS shuffles what it writes."""
    return sorted((image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True))


@pytest.mark.parametrize("chunk", [2, 7, 1000])
def test_train_and_test_are_the_official_parts(folder, monkeypatch, chunk):
    monkeypatch.setattr(tfds, "_CHUNK", chunk)
    prepare(folder)
    data = sources.load("tfds:cifar10")
    assert (data.name, data.classes, data.train_rows) == ("cifar10", 3, 7)
    assert (data.images.shape, data.images.dtype, data.labels.dtype) == ((10, 32, 32, 3), np.uint8, np.int32)
    assert by_image(data.images[:7], data.labels[:7]) == by_image(IMAGES["train"], [0, 1, 2, 0, 1, 2, 0])
    assert by_image(data.images[7:], data.labels[7:]) == by_image(IMAGES["test"], [0, 1, 2])


def test_a_config_is_a_part_of_the_name(folder):
    gray = {"train": RNG.integers(0, 256, (4, 28, 28, 1), np.uint8)}
    prepare(folder, "emnist", "byclass", "3.1.0", gray)
    data = sources.load("tfds:emnist/byclass")
    assert (data.name, data.classes, data.train_rows) == ("emnist/byclass", 3, None)
    assert by_image(data.images, data.labels) == by_image(gray["train"], [0, 1, 2, 0])


def test_where_the_data_sets_are(folder, monkeypatch, tmp_path):
    prepare(tmp_path / "shelf" / "tensorflow_datasets")
    assert f"not prepared in {folder};" in refused("tfds:cifar10")
    monkeypatch.delenv("TFDS_DATA_DIR")
    monkeypatch.setenv("FEDJAX_PFL_DATA", str(tmp_path / "shelf"))
    assert len(sources.load("tfds:cifar10").labels) == 10
    monkeypatch.delenv("FEDJAX_PFL_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert f"not prepared in {tmp_path}/tensorflow_datasets;" in refused("tfds:cifar10")


def test_nothing_is_downloaded_and_the_error_has_the_command_that_does_it(folder, tmp_path):
    message = refused("tfds:emnist/byclass")
    assert 'pip install -e ".[tfds-prepare]"' in message
    # The command, run as a shell would, with a module in the place of TFDS that tells how it is called.
    (tmp_path / "tensorflow_datasets.py").write_text(
        "def builder(*args, **options):\n"
        "    print(args, options)\n"
        "    return type('Builder', (), {'download_and_prepare': lambda self: print('prepared')})()\n"
    )
    command = message.partition("this prepares it: ")[2]
    told = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    called = ("emnist/byclass",), {"data_dir": str(folder), "file_format": "array_record"}
    assert told == f"{called[0]} {called[1]}\nprepared\n"


@pytest.mark.parametrize("name", ["", "CIFAR10", "cifar10/", "../cifar10", "huggingface:mnist", "a b", "cifar10/a/b"])
def test_names_that_are_none(name):
    assert refused(f"tfds:{name}").startswith("a data set of tensorflow-datasets is needed: tfds:cifar10")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar11", "(Dataset cifar11 not found.)"),
        ("emnist/words", "BuilderConfig words not found"),
        ("cifar10:1.0.0", "cannot be loaded at version 1.0.0"),
    ],
)
def test_names_that_tfds_does_not_know(name, message):
    allowed = refused(f"tfds:{name}")
    assert allowed.startswith("tensorflow-datasets refuses it (")
    assert message in allowed
    assert "\n" not in allowed


def test_tfrecord_is_refused(folder):
    prepare(folder)
    info = folder / "cifar10" / "3.0.2" / "dataset_info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"fileFormat": "tfrecord"}))
    message = refused("tfds:cifar10")
    assert message.startswith(
        f"{folder}/cifar10/3.0.2 is written as tfrecord, and array_record is needed; move it away;"
    )
    assert 'file_format="array_record"' in message


def test_data_sets_that_have_no_images_with_labels(folder):
    features = tensorflow_datasets.features
    image, label = features.Image(shape=(32, 32, 3)), features.ClassLabel(num_classes=10)
    # Names that TFDS has not, so that it takes the features from the files.
    prepare(folder, "no_label", features={"image": image, "digit": label})
    assert refused("tfds:no_label") == "it has no feature 'label' of type ClassLabel; present: digit, image"
    prepare(folder, "no_class", features={"image": image, "label": features.Scalar(np.int64)})
    assert refused("tfds:no_class").startswith("it has no feature 'label' of type ClassLabel")
    prepare(folder, "no_image", features={"label": label})
    assert refused("tfds:no_image").startswith("it has no feature 'image' of type Image")
    prepare(folder, "no_train", images={"test": IMAGES["test"]})
    assert refused("tfds:no_train") == "it has no part 'train'; present: test"


def test_images_of_several_sizes_are_refused(folder):
    features = tensorflow_datasets.features
    anything = {"image": features.Image(shape=(None, None, 3)), "label": features.ClassLabel(num_classes=10)}

    class Growing(list):
        shape = (2, 4, 4, 3)

    images = {"train": Growing([np.zeros((4, 4, 3), np.uint8), np.zeros((1, 1, 3), np.uint8)])}
    prepare(folder, "growing", images=images, features=anything)
    message = refused("tfds:growing")
    assert message.startswith(f"its part 'train' in {folder}/growing/3.0.2 cannot be read (ValueError: images of shape")


@pytest.mark.parametrize("variable", ["TFDS_DATA_DIR", "FEDJAX_PFL_DATA"])
def test_the_folder_of_a_user_whom_nobody_knows_is_one_that_is_not_there(variable, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    monkeypatch.setenv(variable, "~nobody_knows")
    assert refused("tfds:cifar10").startswith(f"it is not prepared in {tmp_path}/~nobody_knows")


@pytest.mark.parametrize("damage", [lambda content: content[: len(content) // 2], lambda content: bytes(len(content))])
def test_damaged_files_are_named(folder, damage):
    prepare(folder)
    (file,) = (folder / "cifar10" / "3.0.2").glob("cifar10-test*")
    file.write_bytes(damage(file.read_bytes()))
    assert refused("tfds:cifar10").startswith(f"its part 'test' in {folder}/cifar10/3.0.2 cannot be read (")


def test_a_second_load_decodes_nothing_and_other_files_are_read_anew(folder, monkeypatch):
    prepare(folder)
    first = sources.load("tfds:cifar10")
    decode, decoded = tfds._decode, []
    monkeypatch.setattr(tfds, "_decode", lambda *args: decoded.append(args) or decode(*args))
    second = sources.load("tfds:cifar10")
    assert not decoded
    np.testing.assert_array_equal(second.images, first.images)
    np.testing.assert_array_equal(second.labels, first.labels)
    assert [second.name, *second[3:]] == [first.name, *first[3:]]
    shutil.rmtree(folder / "cifar10")
    prepare(folder, images={"train": IMAGES["test"]})
    assert len(sources.load("tfds:cifar10").labels) == 3
    assert len(decoded) == 1
