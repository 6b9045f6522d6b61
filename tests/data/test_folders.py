"""Image folders: every layout, the order of samples and classes, the cache, and one clear error for every bad file."""

import os
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from fedjax_pfl.data import cache, folders
from fedjax_pfl.data.cache import cached
from fedjax_pfl.data.dataset import from_arrays
from fedjax_pfl.data.sources import load
from fedjax_pfl.errors import ConfigError

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def caches(tmp_path_factory, monkeypatch):
    """An empty cache for every test."""
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home / "fedjax_pfl" / "data"


@pytest.fixture
def decoded(monkeypatch):
    """The files that are opened, one entry each time."""
    opened, files = folders._opened, []
    monkeypatch.setattr(folders, "_opened", lambda file, *rest: files.append(file) or opened(file, *rest))
    return files


def draw(path, size=(5, 4), mode="RGB"):
    """Writes an image of random pixels, and returns them as [h, w, c]."""
    channels = {"RGB": 3, "RGBA": 4, "L": 1, "LA": 2}[mode]
    pixels = RNG.integers(0, 256, (size[1], size[0], channels), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels if channels > 1 else pixels[..., 0]).save(path)
    return pixels


def draw_all(root, *names, **options):
    return [draw(root / name, **options) for name in names]


def refused(source):
    with pytest.raises(ConfigError) as caught:
        load(source)
    assert (caught.value.field, caught.value.value) == ("data.source", source)
    return caught.value.allowed


def test_a_folder_per_class_sorted_by_name(tmp_path):
    cat2, dog, cat1 = draw_all(tmp_path / "pets", "cat/b.png", "dog/a.bmp", "cat/a.PNG")
    (tmp_path / "pets" / "cat" / "notes.txt").write_text("no image")
    draw(tmp_path / "pets" / "dog" / ".hidden.png", size=(9, 9))
    data = load(f"folder:{tmp_path / 'pets'}")
    np.testing.assert_array_equal(data.images, [cat1, cat2, dog])
    np.testing.assert_array_equal(data.labels, [0, 0, 1])
    assert (data.images.dtype, data.labels.dtype) == (np.uint8, np.int32)
    assert (data.name, data.classes, data.train_rows) == ("pets", 2, None)


def test_all_usual_suffixes_are_images_and_an_error_names_them(tmp_path):
    usual = ["png", "jpg", "jpeg", "jpe", "jfif", "jp2", "bmp", "gif", "tif", "tiff", "webp", "ppm", "PNG"]
    draw_all(tmp_path, *(f"{label}/{number}.{suffix}" for label in "ab" for number, suffix in enumerate(usual)))
    draw(tmp_path / "c" / "1.png").tofile(tmp_path / "c" / "1.raw")
    (tmp_path / "c" / "1.png").unlink()
    assert refused(f"folder:{tmp_path}").startswith(f"{tmp_path}/c holds no images (.png, .jpg, .jpeg, .jpe, .jfif,")
    shutil.rmtree(tmp_path / "c")
    assert len(load(f"folder:{tmp_path}").labels) == 2 * len(usual)


def test_numbers_are_sorted_by_value_and_train_can_be_a_class(tmp_path):
    draw_all(tmp_path, "10/a.png", "9/a.png", "9/b.png", "train/a.png", "car/a.png", "car/b.png", "car/c.png")
    data = load(f"folder:{tmp_path}")
    assert np.bincount(data.labels).tolist() == [2, 1, 3, 1]  # 9, 10, car, train
    assert data.train_rows is None


def test_cinic10_trains_on_train_and_valid(tmp_path):
    names = ["train/dog/a.png", "train/cat/a.png", "valid/dog/b.png", "test/dog/c.png", "test/cat/c.png"]
    dog, cat, valid, test_dog, test_cat = draw_all(tmp_path, *names)
    data = load(f"folder:{tmp_path}")
    np.testing.assert_array_equal(data.images, [cat, dog, valid, test_cat, test_dog])
    np.testing.assert_array_equal(data.labels, [0, 1, 1, 0, 1])
    assert (data.classes, data.train_rows) == (2, 3)


def test_without_a_test_part_val_is_the_test_part(tmp_path):
    draw_all(tmp_path, "Train/a/1.png", "Train/b/1.png", "Val/b/1.png", "other/nothing/to/see.png")
    data = load(f"folder:{tmp_path}")
    np.testing.assert_array_equal(data.labels, [0, 1, 1])
    assert data.train_rows == 2


def tiny_imagenet(root):
    """Two classes of the data set as it comes, and the pixels of its validation part; one image is grayscale."""
    draw_all(root, "train/n02/images/n02_0.JPEG", "train/n01/images/n01_0.JPEG", "train/n01/images/n01_1.JPEG")
    (root / "train" / "n01" / "n01_boxes.txt").write_text("n01_0.JPEG\t0\t0\t4\t3\n")
    draw(root / "test" / "images" / "test_0.JPEG")
    lines = ["val_1.JPEG\tn01\t0\t0\t4\t3", "val_0.JPEG\tn02\t0\t0\t4\t3"]
    draw(root / "val" / "images" / "val_0.JPEG", mode="L")
    draw(root / "val" / "images" / "val_1.JPEG")
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return lines


def test_tiny_imagenet_is_tested_on_val_and_gray_becomes_rgb(tmp_path):
    tiny_imagenet(tmp_path)
    data = load(f"folder:{tmp_path}")
    assert data.images.shape == (5, 4, 5, 3)
    np.testing.assert_array_equal(data.labels, [0, 0, 1, 1, 0])
    assert (data.classes, data.train_rows) == (2, 3)
    gray = np.asarray(Image.open(tmp_path / "val" / "images" / "val_0.JPEG"))
    np.testing.assert_array_equal(data.images[3], np.stack([gray] * 3, axis=-1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: None, "{annotations} is missing"),
        (lambda lines: lines[:1], "{annotations} has no line for {images}/val_0.JPEG"),
        (lambda lines: [*lines, "val_2.JPEG\tn01"], "{annotations}, line 3: there is no image {images}/val_2.JPEG"),
        (lambda lines: [lines[0], "val_0.JPEG n02"], "{annotations}, line 2: a name and a class are needed"),
        (lambda lines: [lines[0], "val_0.JPEG\tn03"], "{annotations}, line 2: class 'n03' has no images in the train"),
        (lambda lines: ["\udcff"], "{annotations} is no readable text file"),
    ],
)
def test_annotations_that_do_not_fit(tmp_path, change, message):
    lines = change(tiny_imagenet(tmp_path))
    annotations = tmp_path / "val" / "val_annotations.txt"
    if lines is None:
        annotations.unlink()
    else:
        annotations.write_text("\n".join(lines), errors="surrogateescape")
    expected = message.format(annotations=annotations, images=tmp_path / "val" / "images")
    assert refused(f"folder:{tmp_path}").startswith(expected)


@pytest.mark.parametrize("with_labels", [True, False])
def test_vireofood_lists_keep_their_order(tmp_path, with_labels):
    names = ["10/a.png", "2/a.png", "2/b.png", "10/b.png", "2/c.png"]
    ten, two, two_b, val, test = draw_all(tmp_path, *names, size=(3, 3))
    lines = [f"/{name} {name.split('/')[0]}" if with_labels else f"/{name}" for name in names]
    (tmp_path / "TR.txt").write_text("\n".join([lines[0], lines[2], lines[1]]))
    (tmp_path / "VAL.txt").write_text(lines[3] + "\n\n")
    (tmp_path / "TE.txt").write_text(lines[4])
    draw(tmp_path / "2" / "not_listed.png")
    data = load(f"folder:{tmp_path}")
    np.testing.assert_array_equal(data.images, [ten, two_b, two, val, test])
    np.testing.assert_array_equal(data.labels, [1, 0, 0, 1, 0])
    assert data.train_rows == 4


def test_lists_may_have_names_as_labels_and_spaces_in_paths(tmp_path):
    draw_all(tmp_path, "img/a b.png", "img/c.png")
    (tmp_path / "train.txt").write_text("img/a b.png\tsoup\nimg/c.png rice\n", encoding="utf-8-sig")
    np.testing.assert_array_equal(load(f"folder:{tmp_path}").labels, [1, 0])


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"test.txt": "a/1.png 0"}, "next to {root}/test.txt there is no train.txt"),
        (
            {"train.txt": "a/1.png 0\nb/1.png 1\na/2.png 0"},
            "{root}/train.txt, line 3: there is no image {root}/a/2.png",
        ),
        ({"train.txt": "a/1.png 0\nb/1.png"}, None),  # the folder's name is the label
        ({"train.txt": "a/1.png\nb/2.JPG"}, "{root}/train.txt, line 2: there is no image {root}/b/2.JPG"),
        ({"train.txt": "a/1.png 0\nb 1.png"}, "{root}/train.txt, line 2: a path and a label are needed"),
        ({"train.txt": "a/1.png 0\nsoup"}, "{root}/train.txt, line 2: a path and a label are needed"),
        ({"train.txt": "\n"}, "{root}/train.txt names no images"),
        ({"train.txt": "a/1.png 0\nb/1.png 0"}, "{root} has images of one class alone, '0'"),
        ({"train.txt": "a/1.png 0\nb/1.png 1", "TE.txt": "\n\na/1.png 2"}, "{root}/TE.txt, line 3: class '2' has no"),
        ({"train.txt": "a/1.png 0\nb/1.png 1", "TR.txt": "a/1.png 0"}, "{root}/TR.txt and {root}/train.txt are both"),
        (
            {"train.txt": "a/1.png 0\nb/1.png 1", "test.txt": "./a/1.png 0"},
            "{root}/test.txt, line 1: {root}/a/1.png is already named in {root}/train.txt, line 1",
        ),
        ({"train.txt": "a/1.png 0\nb/1.png 1\na/1.png 0"}, "{root}/train.txt, line 3: {root}/a/1.png is already"),
        ({"train.txt": "word " * 100}, "{root}/train.txt, line 1: there is no image {root}/word word"),
        (
            {"train.txt": "a/1.png 0\na/../../out/1.png 1"},
            "{root}/train.txt, line 2: a path below {root} is needed, without '..', got 'a/../../out/1.png'",
        ),
    ],
)
def test_lists_that_do_not_fit(tmp_path, lists, message):
    draw_all(tmp_path, "a/1.png", "b/1.png")
    for name, text in lists.items():
        (tmp_path / name).write_text(text)
    if message is None:
        assert load(f"folder:{tmp_path}").classes == 2
    else:
        assert refused(f"folder:{tmp_path}").startswith(message.format(root=tmp_path))


def test_grayscale_images_keep_one_channel_if_all_are(tmp_path):
    a, b = draw_all(tmp_path, "a/1.png", "b/1.png", mode="L")
    data = load(f"folder:{tmp_path}")
    np.testing.assert_array_equal(data.images, [a, b])
    transparent = draw(tmp_path / "a" / "2.png", mode="RGBA")  # neither the first nor the last
    data = load(f"folder:{tmp_path}")
    np.testing.assert_array_equal(data.images, [np.repeat(a, 3, -1), transparent[..., :3], np.repeat(b, 3, -1)])


def test_gray_images_that_are_transparent_have_one_channel_too(tmp_path):
    (a,) = draw_all(tmp_path, "a/1.png", mode="L")
    b = draw(tmp_path / "b" / "1.png", mode="LA")
    np.testing.assert_array_equal(load(f"folder:{tmp_path}").images, [a, b[..., :1]])


def test_colours_and_not_their_places_in_a_palette_are_resized(tmp_path):
    draw_all(tmp_path, "a/1.png", "b/1.png")
    with Image.open(tmp_path / "b" / "1.png") as image:
        image.quantize(5).save(tmp_path / "b" / "1.png")
    with Image.open(tmp_path / "b" / "1.png") as image:
        assert image.mode == "P"
        expected = image.convert("RGB").resize((3, 3), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(load(f"folder:{tmp_path}?size=3").images[1], expected)


def test_images_of_several_sizes_need_the_option_size(tmp_path):
    draw(tmp_path / "a" / "1.png")
    draw(tmp_path / "b" / "1.png", size=(6, 4))
    message = refused(f"folder:{tmp_path}")
    assert message.startswith(f"{tmp_path}/b/1.png has 6x4 pixels, {tmp_path}/a/1.png has 5x4; ")
    assert "?size=64" in message
    data = load(f"folder:{tmp_path}?size=3")
    with Image.open(tmp_path / "b" / "1.png") as image:
        np.testing.assert_array_equal(data.images[1], image.resize((3, 3), Image.Resampling.BILINEAR))
    assert data.images.shape == (2, 3, 3, 3)
    assert load(f"folder:{tmp_path}?size=2").images.shape == (2, 2, 2, 3)


@pytest.mark.parametrize("option", ["?", "?size", "?size=0", "?size=-4", "?size=1025", "?size=4.5", "?width=4"])
def test_unusable_options(tmp_path, option):
    assert refused(f"folder:{tmp_path}{option}").startswith("the only option is ?size=N")


def test_the_largest_size_and_the_smallest_can_be_asked_for():
    assert [folders.options(f"a?size={size}") for size in (1, 1024)] == [("a", 1), ("a", 1024)]


def test_a_folder_may_have_a_question_mark_in_its_name(tmp_path):
    draw_all(tmp_path, "pets?size=2/a/1.png", "pets?size=2/b/1.png")
    shutil.copytree(tmp_path / "pets?size=2", tmp_path / "pets")  # with the times of the files
    assert load(f"folder:{tmp_path}/pets?size=3").images.shape == (2, 3, 3, 3)
    shutil.move(tmp_path / "pets?size=2", tmp_path / "elsewhere")
    assert load(f"folder:{tmp_path}/pets?size=2").images.shape == (2, 2, 2, 3)
    shutil.move(tmp_path / "elsewhere", tmp_path / "pets?size=2")
    assert load(f"folder:{tmp_path}/pets?size=2").images.shape == (2, 4, 5, 3)
    assert load(f"folder:{tmp_path}/pets?size=2?size=3").images.shape == (2, 3, 3, 3)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "{root} holds no folders of images; expected is a folder per class"),
        (["loose.png"], "{root} holds no folders of images"),
        (["a/1.png"], "{root} has images of one class alone, 'a'"),
        (["a/1.png", "b/"], "{root}/b holds no images"),
        (["a/1.png", "b/1.png", "b/c/1.png"], "{root}/b/c holds images, in a folder of a class"),
        (["a/1.png", "b/1.png", "b/c/d/1.png"], "{root}/b/c/d holds images, in a folder of a class"),
        (["data/a/1.png", "data/b/1.png"], "{root}/data holds no images"),
        (["train/a/1.png", "train/b/1.png", "test/a/1.png", "test/b/"], "{root}/test/b holds no images"),
        (["train/a/1.png", "train/b/1.png", "test/1.png"], "{root}/test holds no folders of images"),
        (
            ["train/1.png", "test/1.png"],
            "{root}/train holds images, beside {root}/test; expected is a folder per class",
        ),
        (["train/1.png", "Test1/1.png"], "{root}/train holds images, beside {root}/Test1; expected is"),
        (["train/a/1.png", "train/b/1.png", "test/c/1.png"], "{root}/test/c: class 'c' has no images in the training"),
        (["train/a/1.png", "train/b/1.png", "val/a/1.png", "valid/a/1.png"], "{root}/val and {root}/valid are both"),
    ],
)
def test_folders_that_do_not_fit(tmp_path, names, message):
    for name in names:
        if name.endswith("/"):
            (tmp_path / name).mkdir(parents=True)
        else:
            draw(tmp_path / name)
    assert refused(f"folder:{tmp_path}").startswith(message.format(root=tmp_path))


@pytest.mark.parametrize("name", ["2.png", "2.jpg", "2.bmp", "2.gif"])
@pytest.mark.parametrize("kept", [0, 10, 0.8])
def test_damaged_images_are_named(tmp_path, name, kept):
    draw_all(tmp_path, "a/1.png", f"b/{name}", size=(40, 40))
    file = tmp_path / "b" / name
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content)) if kept < 1 else kept])
    assert refused(f"folder:{tmp_path}").startswith(f"{file} cannot be decoded as an image (")


def test_more_than_8_bits_are_refused(tmp_path):
    draw(tmp_path / "a" / "1.png", mode="L")
    (tmp_path / "b").mkdir()
    Image.fromarray(np.full((4, 5), 1000, np.uint16)).save(tmp_path / "b" / "1.png")
    assert refused(f"folder:{tmp_path}").startswith(f"{tmp_path}/b/1.png has pixels of more than 8 bits")


def test_relative_folders_are_looked_up_in_the_data_folder(tmp_path, monkeypatch):
    draw_all(tmp_path / "shelf", "pets/a/1.png", "pets/b/1.png")
    monkeypatch.setenv("FEDJAX_PFL_DATA", str(tmp_path / "shelf"))
    monkeypatch.chdir(tmp_path)
    assert load("folder:pets?size=2").name == "pets"
    assert "there is no such folder" in refused("folder:none")
    assert refused("folder:") == "a path is needed after the colon: folder:PATH"
    assert refused("folder:?size=2") == "a path is needed after the colon: folder:PATH"


def same(data, other):
    np.testing.assert_array_equal(data.images, other.images)
    np.testing.assert_array_equal(data.labels, other.labels)
    assert [data.name, *data[3:]] == [other.name, *other[3:]]
    assert (data.images.dtype, data.labels.dtype) == (other.images.dtype, other.labels.dtype)
    return True


@pytest.mark.parametrize("parts", [("train", "test"), ("",)])
def test_a_second_load_decodes_nothing(tmp_path, caches, decoded, parts, monkeypatch):
    draw_all(tmp_path, *(f"{part}/{label}/1.png".strip("/") for part in parts for label in "ab"))
    first = load(f"folder:{tmp_path}")
    assert len(decoded) == 4 * len(parts)  # headers, then pixels
    decoded.clear()
    monkeypatch.chdir(tmp_path)
    assert same(load(f"folder:../{tmp_path.name}"), first)
    assert same(load("folder:."), first)
    assert not decoded
    assert [file.suffix for file in caches.iterdir()] == [".npz"]
    load(f"folder:{tmp_path}?size=5")
    assert len(decoded) == 4 * len(parts)
    assert len(list(caches.iterdir())) == 2


def test_a_changed_folder_is_read_anew_and_its_cache_replaced(tmp_path, caches, decoded):
    draw_all(tmp_path, "a/1.png", "b/1.png")
    source = f"folder:{tmp_path}"
    before = load(source)
    pixels = draw(tmp_path / "b" / "1.png")
    os.utime(tmp_path / "b" / "1.png", ns=(0, 0))  # whatever the clock's resolution
    np.testing.assert_array_equal(load(source).images, [before.images[0], pixels])
    (tmp_path / "b" / "1.png").rename(tmp_path / "b" / "2.png")
    decoded.clear()
    load(source)
    assert decoded
    draw(tmp_path / "b" / "3.png")
    assert len(load(source).labels) == 3
    decoded.clear()
    assert same(load(source), load(source))
    assert not decoded
    assert len(list(caches.iterdir())) == 1


def test_what_another_version_has_cached_is_read_anew(tmp_path, decoded, monkeypatch):
    draw_all(tmp_path, "a/1.png", "b/1.png")
    first = load(f"folder:{tmp_path}")
    decoded.clear()
    monkeypatch.setattr(cache, "_VERSION", cache._VERSION + 1)
    assert same(load(f"folder:{tmp_path}"), first)
    assert decoded


def test_a_file_of_another_size_or_behind_a_link_is_a_change(tmp_path, decoded):
    pixels = draw(tmp_path / "elsewhere" / "1.png")
    draw(tmp_path / "pets" / "a" / "1.png")
    (tmp_path / "pets" / "b").symlink_to(tmp_path / "elsewhere")
    source, file = f"folder:{tmp_path / 'pets'}", tmp_path / "elsewhere" / "1.png"
    np.testing.assert_array_equal(load(source).images[1], pixels)
    time = file.stat().st_mtime_ns
    file.write_bytes(file.read_bytes() + b"more")
    os.utime(file, ns=(time, time))  # the size alone differs
    decoded.clear()
    load(source)
    assert decoded


def test_links_to_a_folder_above_are_not_followed_again_and_again(tmp_path, monkeypatch):
    draw_all(tmp_path, "a/1.png", "b/1.png")
    for name in "ab":  # two, between which a walk would go to and fro
        (tmp_path / name / "up").symlink_to(tmp_path)
    walk, seen = os.walk, []

    def counted(*args, **options):
        for step in walk(*args, **options):
            seen.append(step[0])
            assert len(seen) < 20
            yield step

    monkeypatch.setattr(os, "walk", counted)
    assert len(load(f"folder:{tmp_path}").labels) == 2
    assert seen == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "b")]
    (tmp_path / "c").symlink_to(tmp_path)
    assert refused(f"folder:{tmp_path}").startswith(f"{tmp_path}/c holds no images")


def test_a_link_to_another_folder_of_the_same_data_is_a_change(tmp_path):
    """Of a class that is a link to another class, each folder is looked at once."""
    first, third = draw_all(tmp_path, "a/1.png", "c/1.png")
    link = tmp_path / "z"
    for target, pixels in (("a", first), ("c", third)):
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / target)
        np.testing.assert_array_equal(load(f"folder:{tmp_path}").images, [first, third, pixels])


@pytest.mark.parametrize("of", ["classes", "images"])
def test_a_link_to_what_agrees_in_sizes_and_times_is_a_change(tmp_path, of):
    root = tmp_path / "pets"
    for number, store in enumerate(("first", "second")):
        for label in "ab":
            file = tmp_path / store / label / "1.bmp"  # whose size follows from that of the image
            pixels = draw(file)
            os.utime(file, ns=(0, 0))
            link = root / label if of == "classes" else root / label / "1.bmp"
            link.parent.mkdir(parents=True, exist_ok=True)
            if number:
                link.unlink()
            link.symlink_to(file.parent if of == "classes" else file)
        np.testing.assert_array_equal(load(f"folder:{root}").images[1], pixels)


def test_a_folder_that_is_another_link_is_a_change(tmp_path):
    link, built = tmp_path / "data", []
    for store in "ab":
        (tmp_path / store).mkdir()
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / store)
        cached("data", link, lambda store=store: built.append(store) or from_arrays(np.zeros((2, 1)), np.arange(2)))
    assert built == ["a", "b"]


def test_every_damage_to_the_cache_is_noticed_and_repaired(tmp_path, caches, decoded):
    draw_all(tmp_path, "a/1.png", "b/1.png")
    source = f"folder:{tmp_path}"
    first = load(source)
    (file,) = caches.iterdir()
    content = file.read_bytes()
    start = content.index(first.images.tobytes())
    flipped = bytearray(content)
    flipped[start + 7] ^= 1
    for damaged in (bytes(flipped), content[: len(content) // 2], b"", b"no archive", content[:-1]):
        file.write_bytes(damaged)
        decoded.clear()
        with pytest.warns(UserWarning, match=re.escape(str(file)) + " cannot be used"):
            data = load(source)
        assert decoded
        assert same(data, first)
        assert file.read_bytes() == content
    assert same(load(source), first)


def test_the_checksum_is_compared_besides_that_of_the_archive(tmp_path, caches):
    draw_all(tmp_path, "a/1.png", "b/1.png")
    source = f"folder:{tmp_path}"
    first = load(source)
    (file,) = caches.iterdir()
    for name in ("images", "labels", "classes", "train_rows", "name"):
        with np.load(file) as archive:
            arrays = dict(archive)
        arrays[name] = arrays[name][::-1] if arrays[name].ndim else np.array("other" if name == "name" else 1)
        np.savez(file, **arrays)
        with pytest.warns(UserWarning, match="its checksum differs"):
            assert same(load(source), first)


def test_data_are_loaded_where_no_cache_can_be_written(tmp_path, monkeypatch):
    draw_all(tmp_path / "data", "a/1.png", "b/1.png")
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="are not cached"):
        assert load(f"folder:{tmp_path / 'data'}").classes == 2


def test_an_interrupted_write_leaves_nothing_behind(tmp_path, caches, monkeypatch):
    draw_all(tmp_path, "a/1.png", "b/1.png")

    def interrupted(file, **arrays):
        file.write(b"half an archive")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(np, "savez", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(f"folder:{tmp_path}")
    assert not list(caches.iterdir())
    assert load(f"folder:{tmp_path}").classes == 2
