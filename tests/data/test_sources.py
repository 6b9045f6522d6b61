"""Data sources: what they return, and one clear error for everything that can be wrong with a file."""

import zipfile

import numpy as np
import pytest

from fedjax_pfl.data.dataset import fingerprint
from fedjax_pfl.data.rows import read
from fedjax_pfl.data.sources import SOURCES, from_arrays, load
from fedjax_pfl.errors import ConfigError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)
LABELS = np.array([0, 2, 1, 2, 0, 1], np.uint8)
TEST_IMAGES = RNG.integers(0, 256, (2, 4, 5, 3), dtype=np.uint8)
TEST_LABELS = np.array([3, 0])


def save(path, **arrays):
    np.savez(path, **arrays)
    return f"npz:{path}"


def test_digits_are_scaled_to_the_full_uint8_range():
    from sklearn.datasets import load_digits

    data = load("digits")
    assert (data.name, data.classes, data.train_rows) == ("digits", 10, None)
    assert data.images.shape == (1797, 8, 8, 1)
    assert data.images.dtype == np.uint8
    assert data.labels.dtype == np.int32
    bunch = load_digits()
    np.testing.assert_array_equal(data.labels, bunch.target)
    # 0 and 16, the ends of the original scale, become 0 and 255; between them the scale is linear, rounded.
    assert set(np.unique(data.images[bunch.images[..., np.newaxis] == 0])) == {0}
    assert set(np.unique(data.images[bunch.images[..., np.newaxis] == 16])) == {255}
    np.testing.assert_allclose(data.images[..., 0] / 255, bunch.images / 16, atol=0.5 / 255)


@pytest.mark.parametrize(("image", "label"), [("image", "label"), ("x", "y"), ("image", "y")])
def test_npz_round_trip_under_all_names(tmp_path, image, label):
    data = load(save(tmp_path / "mine.npz", **{image: IMAGES, label: LABELS}))
    np.testing.assert_array_equal(data.images, IMAGES)
    np.testing.assert_array_equal(data.labels, LABELS)
    assert data.labels.dtype == np.int32
    assert (data.name, data.classes, data.train_rows) == ("mine", 3, None)


def test_of_arrays_under_two_names_the_one_that_is_listed_first_counts(tmp_path):
    others = {"x": IMAGES[1:3], "y": LABELS[1:3], "x_test": IMAGES[:1], "y_test": LABELS[:1], "writer": LABELS[1:3]}
    parts = {"image": IMAGES, "label": LABELS, "image_test": TEST_IMAGES, "label_test": TEST_LABELS}
    users = {"user": LABELS + 1, "user_test": TEST_LABELS}
    data = load(save(tmp_path / "a.npz", **others, **parts, **users))
    np.testing.assert_array_equal(data.images, np.concatenate([IMAGES, TEST_IMAGES]))
    np.testing.assert_array_equal(data.labels, [*LABELS, *TEST_LABELS])
    np.testing.assert_array_equal(data.users, [*(LABELS + 1), *TEST_LABELS])


@pytest.mark.parametrize(("image", "label"), [("image_test", "label_test"), ("x_test", "y_test")])
def test_official_test_part_follows_the_training_rows(tmp_path, image, label):
    source = save(tmp_path / "a.npz", image=IMAGES, label=LABELS, **{image: TEST_IMAGES, label: TEST_LABELS})
    data = load(source)
    assert data.train_rows == 6
    np.testing.assert_array_equal(data.images[6:], TEST_IMAGES)
    np.testing.assert_array_equal(data.images[:6], IMAGES)
    np.testing.assert_array_equal(data.labels, [0, 2, 1, 2, 0, 1, 3, 0])
    assert data.classes == 4  # class 3 occurs in the test part only


@pytest.mark.parametrize("names", [("user", "user_test"), ("writer", "writer_test")])
def test_users_of_both_parts_are_numbered_in_ascending_order(tmp_path, names):
    users = dict(zip(names, (np.array([9, 40, 9, 2, 2, 40]), np.array([7, 40])), strict=True))
    test_part = {"image_test": TEST_IMAGES, "label_test": TEST_LABELS}
    data = load(save(tmp_path / "a.npz", image=IMAGES, label=LABELS, **test_part, **users))
    np.testing.assert_array_equal(data.users, [2, 3, 2, 0, 0, 3, 1, 3])
    assert data.users.dtype == np.int32
    assert load(save(tmp_path / "b.npz", image=IMAGES, label=LABELS)).users is None
    names = from_arrays(IMAGES, LABELS, users=np.array(["b", "b", "a", "c", "a", "b"])).users
    np.testing.assert_array_equal(names, [1, 1, 0, 2, 0, 1])


def test_flat_images_whose_length_is_a_square_are_square_images():
    flat = IMAGES[..., :4, 0].reshape(6, 16)
    np.testing.assert_array_equal(from_arrays(flat, LABELS).images, IMAGES[..., :4, :1])


def test_images_without_a_channel_axis_get_one():
    assert from_arrays(IMAGES[..., 0], LABELS).images.shape == (6, 4, 5, 1)
    both = from_arrays(IMAGES[..., 0], LABELS, TEST_IMAGES[..., :1], TEST_LABELS, name="mixed")
    assert both.images.shape == (8, 4, 5, 1)
    assert both.name == "mixed"


@pytest.mark.parametrize("row", [0, 1, 4095, 4096, 4998])
def test_any_other_sample_or_label_is_other_data(row):
    x, y = RNG.normal(size=(5000, 4)), np.arange(5000) % 3
    relabelled, changed = y.copy(), x.copy()
    relabelled[row], changed[row, 3] = (y[row] + 1) % 3, 0.0
    data = (x, y), (x, relabelled), (changed, y), (x[:-1], y[:-1])
    assert len({fingerprint(from_arrays(*of)) for of in data}) == len(data)


def test_the_same_numbers_in_another_shape_or_of_clients_instead_of_users_are_other_data():
    x, y, users = np.zeros((6, 4), np.float32), np.arange(6) % 3, np.arange(6) % 2
    data = [from_arrays(x.reshape(6, *shape), y) for shape in ((4,), (2, 2), (4, 1))]
    data += [from_arrays(x, y, users=users), from_arrays(x, y, users=users)._replace(divided=True)]
    assert len(set(map(fingerprint, data))) == len(data)


def test_relative_paths_are_looked_up_here_and_then_in_the_data_folder(tmp_path, monkeypatch):
    here, folder = tmp_path / "here", tmp_path / "folder"
    here.mkdir()
    folder.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("FEDJAX_PFL_DATA", str(folder))
    save(folder / "a.npz", image=IMAGES, label=LABELS)
    assert load("npz:a.npz").classes == 3
    save(here / "a.npz", image=IMAGES, label=np.zeros(6, int))
    assert load("npz:a.npz").classes == 1


def test_a_missing_file_error_names_every_place_looked_at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDJAX_PFL_DATA", "/some/folder")
    with pytest.raises(ConfigError) as caught:
        load("npz:sub/none.npz")
    assert caught.value.field == "data.source"
    assert str(tmp_path / "sub/none.npz") in caught.value.allowed
    assert "/some/folder/sub/none.npz" in caught.value.allowed
    monkeypatch.delenv("FEDJAX_PFL_DATA")
    with pytest.raises(ConfigError, match="FEDJAX_PFL_DATA may name"):
        load("npz:sub/none.npz")


@pytest.mark.parametrize("source", ["cifar10", "mine.npz", "", "npz", "npz:", "digits:8", "NPZ:a.npz"])
def test_unusable_source_strings(source):
    with pytest.raises(ConfigError) as caught:
        load(source)
    assert caught.value.field == "data.source"
    assert str(caught.value.value).startswith(source)


def test_an_unknown_source_error_lists_all_sources():
    with pytest.raises(ConfigError) as caught:
        load("imagenet")
    assert all(prefix in caught.value.allowed and text in caught.value.allowed for prefix, (_, text) in SOURCES.items())


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pictures": IMAGES, "label": LABELS}, "present: pictures, label"),
        ({"image": IMAGES}, r"label \(or y\); present: image$"),
        ({}, "present: none"),
        ({"image": IMAGES / np.nan, "label": LABELS}, "samples must be finite; 360 of 360 numbers, in 6 rows"),
        ({"image": IMAGES.astype(int), "label": LABELS}, "samples must be uint8.*int64: "),
        ({"image": IMAGES.reshape(6, -1), "label": LABELS}, r"\(6, 60\); reshape flat images"),
        ({"image": IMAGES[np.newaxis], "label": LABELS}, r"samples must be \[n, h, w, c\]"),
        ({"image": IMAGES[:0], "label": LABELS[:0]}, "samples hold nothing"),
        ({"image": IMAGES, "label": LABELS[:4]}, "6 samples and 4 labels"),
        ({"image": IMAGES, "label": LABELS.astype(float)}, "labels must be integers, got float64"),
        ({"image": IMAGES, "label": LABELS.astype(bool)}, "labels must be integers, got bool"),
        ({"image": IMAGES, "label": LABELS.astype(int) - 1}, "0 or more, the smallest is -1"),
        (
            {"image": IMAGES, "label": LABELS + np.int64(2**31)},
            r"class.*, from 0 on; the largest of \d different ones is 214748\d+: numpy\.unique",
        ),
        ({"image": IMAGES, "label": LABELS[:, np.newaxis]}, r"class numbers \[n\], got \(6, 1\)"),
        ({"image": IMAGES, "label": np.array([None] * 6)}, "cannot be read as plain arrays"),
        ({"image": IMAGES, "label": LABELS, "image_test": TEST_IMAGES}, "both its images and its labels"),
        ({"image": IMAGES, "label": LABELS, "y_test": TEST_LABELS}, "both its images and its labels"),
        (
            {"image": IMAGES, "label": LABELS, "x_test": TEST_IMAGES[:, 1:], "y_test": TEST_LABELS},
            r"\(4, 5, 3\) and test samples uint8 \(3, 5, 3\) must agree",
        ),
        (
            {"image": IMAGES, "label": LABELS, "x_test": TEST_IMAGES, "y_test": TEST_LABELS[:1]},
            "2 test samples and 1 test labels",
        ),
        (
            {"image": IMAGES, "label": LABELS, "user": LABELS[:5]},
            r"users must be integers or strings \[6\], got uint8 \(5,",
        ),
        (
            {"image": IMAGES, "label": LABELS, "user": LABELS / 2},
            r"users must be integers or strings \[6\], got float64",
        ),
        ({"image": IMAGES, "label": LABELS, "user_test": LABELS}, "users of every part that there is, or none"),
        (
            {"image": IMAGES, "label": LABELS, "x_test": TEST_IMAGES, "y_test": TEST_LABELS, "user": LABELS},
            "users of every part that there is, or none",
        ),
        (
            {"image": IMAGES, "label": LABELS, "x_test": TEST_IMAGES / 2, "y_test": TEST_LABELS},
            "test samples float32 .* must agree in type",
        ),
    ],
)
def test_bad_npz_contents(tmp_path, arrays, message):
    source = save(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ConfigError, match=message) as caught:
        load(source)
    assert (caught.value.field, caught.value.value) == ("data.source", source)


def test_files_that_are_no_npz(tmp_path):
    text, bare, broken, archive = (tmp_path / name for name in ("a.npz", "b.npy", "c.npz", "d.npz"))
    text.write_text("no archive at all")
    np.save(bare, IMAGES)
    save(broken, image=IMAGES, label=LABELS)
    content = bytearray(broken.read_bytes())
    content[200:260] = bytes(60)  # inside the image array, so that its checksum no longer fits
    broken.write_bytes(content)
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("image", "no array")
        file.writestr("label", "nor this")
    for path, message in [
        (text, "no npz file"),
        (bare, "no npz file"),
        (broken, "cannot be read"),
        (archive, "must be uint8"),
        (tmp_path, "no such file"),
    ]:
        with pytest.raises(ConfigError, match=message) as caught:
            load(f"npz:{path}")
        assert caught.value.field == "data.source"


@pytest.mark.parametrize(("at", "byte"), [(6, 1), (8, 99)])  # of a member's header: encrypted, compressed somehow
def test_archives_that_nobody_can_unpack(tmp_path, at, byte):
    source = save(tmp_path / "a.npz", image=IMAGES, label=LABELS)
    content = bytearray((tmp_path / "a.npz").read_bytes())
    for signature, after in ((b"PK\x03\x04", at), (b"PK\x01\x02", at + 2)):
        content[content.index(signature) + after] = byte
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read as plain arrays") as caught:
        load(source)
    assert caught.value.field == "data.source"
    with pytest.raises(ConfigError, match="cannot be read as plain arrays") as caught:
        read(str(tmp_path / "a.npz"))
    assert caught.value.field == "data.partition.file"


def test_users_of_any_integer_type_stay_apart():
    large = 2**53
    users, test_users = np.full(6, large, np.uint64), np.array([large + 1, -1])
    data = from_arrays(IMAGES, LABELS, TEST_IMAGES, TEST_LABELS, users=users, test_users=test_users)
    np.testing.assert_array_equal(data.users, [1] * 6 + [2, 0])
    assert data.user_names == ("-1", str(large), str(large + 1))


def test_labels_may_be_as_many_as_the_samples_of_both_parts():
    labels, test_labels = np.arange(1100), np.arange(1100, 1300)
    data = from_arrays(np.zeros((1100, 1)), labels, np.zeros((200, 1)), test_labels)
    assert data.classes == 1300
    with pytest.raises(ConfigError, match="the largest of 1300 different ones is 1300: ") as caught:
        from_arrays(np.zeros((1100, 1)), labels, np.zeros((200, 1)), test_labels + 1)
    hint = caught.value.allowed.partition(": ")[2].removesuffix(" numbers the classes of both parts")
    first, second = eval(hint, {"numpy": np, "y": labels[::2], "y_test": test_labels})
    np.testing.assert_array_equal(first, np.arange(550))
    np.testing.assert_array_equal(second, np.arange(550, 750))


def test_numbers_of_classes_below_a_thousand_need_not_be_held_by_as_many_samples():
    assert from_arrays(np.zeros((3, 1)), np.array([0, 999, 5])).classes == 1000
    with pytest.raises(ConfigError, match="the largest of 3 different ones is 1000: "):
        from_arrays(np.zeros((3, 1)), np.array([0, 1000, 5]))


def test_arrays_given_in_python_name_the_field_data():
    with pytest.raises(ConfigError, match="got int32: ") as caught:
        from_arrays(IMAGES.astype(np.int32), LABELS, name="mine")
    assert (caught.value.field, caught.value.value) == ("data", "mine")


def test_floats_of_a_file_stay_as_they_are(tmp_path):
    data = load(save(tmp_path / "table.npz", x=IMAGES.reshape(6, 60) / 7, y=LABELS))
    np.testing.assert_array_equal(data.images, (IMAGES.reshape(6, 60) / 7).astype(np.float32))
