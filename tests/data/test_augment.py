"""Augmentation: every operation against NumPy and SciPy, the draws, and the client that results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import ndimage, stats

from fedjax_pfl.data.augment import (
    add_copies,
    apply_transform,
    augment,
    crop_flip,
    crop_flip_rotate,
    draw_crop,
    five_operations,
)
from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.ops.training import cache_features, phase_key, scan_batches
from tests import generator

KEY = generator.key(3)
DRAWS = 2000
# Square and not, even and odd, one channel and three, and one so low that a shift can move all of it out.
SHAPES = [(6, 6, 1), (5, 8, 3), (3, 9, 1)]


def images(shape, count=DRAWS):
    return np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)


@pytest.fixture(scope="module")
def drawn():
    """Many draws of the five operations: the transforms in NumPy, and name -> which draws are of this operation."""
    transform = jax.tree.map(np.asarray, jax.jit(five_operations)(jax.random.split(KEY, DRAWS)))
    flipped = (transform.turn == np.diag([1.0, -1.0])).all(axis=(1, 2))
    rotated = transform.turn[:, 1, 0] != 0
    kinds = {
        "flip": flipped,
        "rotation": rotated,
        "brightness": (transform.gain != 1) & (transform.offset == 0),
        "inversion": transform.offset != 0,
    }
    # A shift by nothing in both directions is a shift, too.
    kinds["shift"] = ~functools.reduce(np.logical_or, kinds.values())
    return transform, kinds


def shifted(x, shift):
    """Each image [n, h, w, c] moved by its own whole number of rows and columns, zeros from outside."""
    out = np.zeros_like(x)
    height, width = x.shape[1:3]
    for image, (down, right), moved in zip(x, shift.astype(int), out, strict=True):
        for r in range(height):
            for c in range(width):
                if 0 <= r - down < height and 0 <= c - right < width:
                    moved[r, c] = image[r - down, c - right]
    return out


# --- Draws -----------------------------------------------------------------------------------------------------------


def test_each_sample_has_one_operation_and_each_operation_a_fifth(drawn):
    transform, kinds = drawn
    for kind, chosen in kinds.items():
        assert abs(chosen.mean() - 0.2) < 4.5 * np.sqrt(0.16 / DRAWS), kind
    assert (np.sum(list(kinds.values()), axis=0) == 1).all()
    # What belongs to another operation stays neutral.
    assert (transform.turn[~(kinds["flip"] | kinds["rotation"])] == np.eye(2)).all()
    assert not transform.shift[~kinds["shift"]].any()
    np.testing.assert_array_equal(transform.offset, 255 * kinds["inversion"])
    plain = np.where(kinds["inversion"], -1, 1)
    np.testing.assert_array_equal(np.where(kinds["brightness"], 1, transform.gain), plain)


def test_magnitudes_are_uniform_over_their_range(drawn):
    transform, kinds = drawn
    moves = transform.shift[kinds["shift"]].ravel()
    values, counts = np.unique(moves, return_counts=True)
    assert values.tolist() == list(range(-4, 5))
    assert (np.abs(counts / len(moves) - 1 / 9) < 4.5 * np.sqrt(8 / 81 / len(moves))).all()
    turn = transform.turn[kinds["rotation"]]
    np.testing.assert_allclose(turn @ turn.transpose(0, 2, 1), np.broadcast_to(np.eye(2), turn.shape), atol=1e-6)
    np.testing.assert_allclose(np.linalg.det(turn), 1, rtol=1e-6)
    angles = np.degrees(np.arctan2(turn[:, 1, 0], turn[:, 0, 0]))
    for found, low, high in ((angles, -30, 30), (transform.gain[kinds["brightness"]], 0.5, 1.5)):
        assert low <= found.min() < low + 0.05 * (high - low)
        assert high - 0.05 * (high - low) < found.max() <= high
        assert stats.kstest(found, stats.uniform(low, high - low).cdf).pvalue > 0.01


# --- Operations ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def pictures(request, drawn):
    """Images, and what becomes of each under its transform."""
    x = images(request.param)
    return x, np.asarray(jax.jit(apply_transform)(jax.tree.map(jnp.asarray, drawn[0]), jnp.asarray(x)))


def test_whole_pixel_moves_and_inversion_are_exact(pictures, drawn):
    (x, found), (transform, kinds) = pictures, drawn
    np.testing.assert_array_equal(found[kinds["flip"]], x[kinds["flip"], :, ::-1])
    np.testing.assert_array_equal(found[kinds["inversion"]], 255 - x[kinds["inversion"]])
    chosen = kinds["shift"]
    np.testing.assert_array_equal(found[chosen], shifted(x[chosen], transform.shift[chosen]))
    assert found.dtype == np.uint8


def test_brightness_multiplies_rounds_and_clips(pictures, drawn):
    (x, found), (transform, kinds) = pictures, drawn
    chosen = kinds["brightness"]
    exact = transform.gain[chosen].astype(np.float64)[:, None, None, None] * x[chosen]
    # Only where the float32 product can fall on the other side of a half may the rounding differ.
    tie = np.abs(exact % 1 - 0.5) < 1e-4
    expected = np.clip(np.rint(exact), 0, 255)
    np.testing.assert_array_equal(found[chosen][~tie], expected[~tie])
    assert tie.mean() < 1e-3
    assert (expected == 255).any()


def test_rotation_is_scipys(pictures, drawn):
    (x, found), (transform, kinds) = pictures, drawn
    for i in np.flatnonzero(kinds["rotation"]):
        # SciPy turns from the first axis to the second.
        angle = -np.degrees(np.arctan2(transform.turn[i, 1, 0], transform.turn[i, 0, 0]))
        expected = ndimage.rotate(
            x[i].astype(np.float64), angle, axes=(1, 0), reshape=False, order=1, mode="grid-constant"
        )
        assert np.abs(found[i] - expected).max() < 0.5 + 1e-2
    assert not np.array_equal(found[kinds["rotation"]], x[kinds["rotation"]])


@pytest.fixture(scope="module")
def crops():
    """The shift and the flip of many draws."""
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(draw_crop))(jax.random.split(KEY, DRAWS)))


def test_crops_and_flips_are_drawn_uniformly(crops):
    shift, flipped = crops
    assert abs(np.mean(flipped) - 0.5) < 4.5 * np.sqrt(0.25 / DRAWS)
    values, counts = np.unique(shift, return_counts=True)
    assert values.tolist() == list(range(-4, 5))
    assert (np.abs(counts / (2 * DRAWS) - 1 / 9) < 4.5 * np.sqrt(8 / 81 / (2 * DRAWS))).all()


@pytest.mark.parametrize("reflect", [False, True], ids=["black", "reflected"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_crop_and_flip(shape, reflect, crops):
    x = images(shape)
    found = np.asarray(jax.jit(functools.partial(crop_flip, reflect=reflect))(jax.random.split(KEY, DRAWS), x))
    height, width = shape[:2]
    padded = np.pad(x, ((0, 0), (4, 4), (4, 4), (0, 0)), mode="reflect" if reflect else "constant")
    for image, (down, right), flipped, own in zip(padded, *crops, found, strict=True):
        expected = image[4 - down : 4 - down + height, 4 - right : 4 - right + width]
        np.testing.assert_array_equal(own, expected[:, ::-1] if flipped else expected)


@pytest.fixture(scope="module")
def tilted():
    """Draws of ``crop_flip_rotate``, with the mirror (-1 for a flip) and the angle in degrees of each."""
    transform = jax.tree.map(np.asarray, jax.jit(crop_flip_rotate)(jax.random.split(KEY, DRAWS)))
    mirror = np.where(transform.turn[:, 1, 1] < 0, -1, 1)  # the cosine is positive
    angle = np.degrees(np.arctan2(-transform.turn[:, 0, 1], transform.turn[:, 0, 0]))
    return transform, mirror, angle


def test_crop_flip_and_rotation_are_drawn_uniformly_and_independently(tilted):
    transform, mirror, angle = tilted
    assert abs(np.mean(mirror == -1) - 0.5) < 4.5 * np.sqrt(0.25 / DRAWS)
    values, counts = np.unique(transform.shift, return_counts=True)
    assert values.tolist() == list(range(-4, 5))
    assert (np.abs(counts / (2 * DRAWS) - 1 / 9) < 4.5 * np.sqrt(8 / 81 / (2 * DRAWS))).all()
    assert -15 <= angle.min() < -14.5
    assert 14.5 < angle.max() <= 15
    assert stats.kstest(angle, stats.uniform(-15, 30).cdf).pvalue > 0.01
    drawn = np.corrcoef(np.stack([mirror, angle, *transform.shift.T]))
    assert (np.abs(drawn - np.eye(4)) < 4.5 / np.sqrt(DRAWS)).all()
    assert (transform.gain == 1).all()
    assert not transform.offset.any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_crop_flip_and_rotation_one_after_another(shape, tilted):
    """On a canvas so wide that nothing is cut off on the way, shifted and flipped in NumPy, then turned by SciPy."""
    transform, mirror, angle = tilted
    x = images(shape)
    found = np.asarray(jax.jit(apply_transform)(jax.tree.map(jnp.asarray, transform), jnp.asarray(x)))
    border = 16
    moved = shifted(np.pad(x[:300], ((0, 0), (border, border), (border, border), (0, 0))), transform.shift[:300])
    for i, image in enumerate(moved):
        image = (image[:, ::-1] if mirror[i] == -1 else image).astype(np.float64)
        # SciPy turns from the first axis to the second.
        image = ndimage.rotate(image, -angle[i], axes=(1, 0), reshape=False, order=1, mode="grid-constant")
        assert np.abs(found[i] - image[border:-border, border:-border]).max() < 0.5 + 1e-2


# --- The augmented client --------------------------------------------------------------------------------------------

POOL, CLASSES, LARGEST = 140, 4, 130
SENTINEL = 7  # the pool row that all padding points at; no client holds it, and its class is nobody's
PIXELS = images((5, 4, 3), POOL)
LABELS = np.random.default_rng(1).integers(0, CLASSES - 1, POOL).astype(np.int32)
LABELS[SENTINEL] = CLASSES - 1
ROWS = np.setdiff1d(np.random.default_rng(2).permutation(POOL), [SENTINEL], assume_unique=True)[:LARGEST]
COUNTS, CAPACITY = (0, 1, 4, 9), 9
# Also more padding, and more than one block of samples.
CASES = [*((count, CAPACITY) for count in COUNTS), (4, LARGEST + 1), (LARGEST, LARGEST + 1)]

every_kind = pytest.mark.parametrize("kind", ["concat", "replace"])
every_case = pytest.mark.parametrize(("count", "capacity"), CASES)


def client(count, capacity=CAPACITY):
    index = np.full(capacity, SENTINEL, np.int32)
    index[:count] = ROWS[:count]
    held = np.bincount(LABELS[ROWS[:count]], minlength=CLASSES).astype(np.float32)
    return ClientData(*map(jnp.asarray, (PIXELS, LABELS, index, np.array(count, np.int32), held)))


jitted = jax.jit(add_copies, static_argnames="kind")


@functools.cache
def augmented(count, kind, capacity=CAPACITY):
    return jax.tree.map(np.asarray, jitted(KEY, client(count, capacity), kind=kind))


def contents(data):
    """Images and labels of the samples of a client, through its index."""
    rows = np.asarray(data.index)[: int(data.count)]
    return np.asarray(data.x[rows]), np.asarray(data.y)[rows]


def keys_of(key, positions):
    """A draw depends on key and position alone."""
    return jax.vmap(lambda position: jax.random.fold_in(key, position))(positions)


@functools.cache
def copies():
    """The copy of each of ``ROWS``."""
    transform = jax.jit(five_operations)(keys_of(KEY, jnp.arange(LARGEST)))
    return np.asarray(jax.jit(apply_transform)(transform, jnp.asarray(PIXELS[ROWS])))


@every_kind
@every_case
def test_a_client_holds_its_originals_first_or_the_copies_alone_and_no_padding(kind, count, capacity):
    x, y = contents(augmented(count, kind, capacity))
    own = [PIXELS[ROWS[:count]]] if kind == "concat" else []
    np.testing.assert_array_equal(x, np.concatenate([*own, copies()[:count]]))
    np.testing.assert_array_equal(y, np.tile(LABELS[ROWS[:count]], len(own) + 1))


@every_kind
@every_case
def test_counts_and_classes_are_those_of_the_samples(kind, count, capacity):
    data = augmented(count, kind, capacity)
    times = 2 if kind == "concat" else 1
    assert int(data.count) == times * count
    assert data.capacity == times * capacity
    np.testing.assert_array_equal(data.class_counts, np.bincount(contents(data)[1], minlength=CLASSES))
    # What the padding points at exists.
    assert data.index.min() >= 0
    assert data.index.max() < data.x.shape[0] == len(data.y)


@every_kind
def test_the_given_client_is_kept_and_none_changes_nothing(kind):
    given = client(4)

    def check():
        assert add_copies(KEY, given, kind).original is given

    jax.eval_shape(check)
    assert add_copies(KEY, given, "none") is given
    assert given.original is None


@every_kind
def test_another_key_draws_other_copies_and_the_same_key_the_same(kind):
    first, again, other = (contents(jitted(key, client(9), kind=kind))[0] for key in (KEY, KEY, jax.random.key(4)))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@every_kind
def test_clients_side_by_side_get_what_each_gets_alone(kind):
    rows = [client(count)._replace(x=None, y=None) for count in COUNTS]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)

    def one(row):
        return add_copies(KEY, row._replace(x=jnp.asarray(PIXELS), y=jnp.asarray(LABELS)), kind)._replace(original=None)

    together = jax.jit(jax.vmap(one))(stacked)
    for i, count in enumerate(COUNTS):
        found = jax.tree.map(lambda leaf, i=i: leaf[i], together)
        jax.tree.map(np.testing.assert_array_equal, contents(found), contents(augmented(count, kind)))
        np.testing.assert_array_equal(found.class_counts, augmented(count, kind).class_counts)


# --- Images that are augmented whenever they are read ----------------------------------------------------------------

CROPS = {
    "crop_flip": crop_flip,
    "crop_flip_reflect": functools.partial(crop_flip, reflect=True),
    "crop_flip_rotate": lambda keys, x: apply_transform(crop_flip_rotate(keys), x),
}
crop_kinds = pytest.mark.parametrize("kind", CROPS)


def seen(key, kind, positions):
    """What the images at these positions become under a draw."""
    return np.asarray(jax.jit(CROPS[kind])(keys_of(key, positions), jnp.asarray(PIXELS[ROWS])[positions]))


def images_of_epochs(data, epochs):
    """The image of each position in each epoch of training with KEY, [epochs, capacity, ...], and in a map over all."""

    def note(carry, batch, key):
        table, step = carry
        at = jnp.where(batch.mask > 0, jnp.argmax(batch.y[:, None] == data.labels, axis=1), data.capacity)
        number = step // -(-data.count // 4)
        return table.at[number, at].set(batch.x, mode="drop"), step + 1

    @jax.jit
    def play():
        table = jnp.zeros((epochs, data.capacity, *data.x.shape[1:]), jnp.uint8)
        table, _ = scan_batches(KEY, note, (table, 0), data, epochs=epochs, batch_size=4)
        return table, cache_features(lambda x: x.astype(jnp.float32).reshape(len(x), -1), data).x

    table, mapped = play()
    return np.asarray(table), np.asarray(mapped).reshape(data.capacity, *data.x.shape[1:])


def distinct(count):
    """A client whose samples all have another label, so that a batch says which they are."""
    data = client(count)
    return data._replace(y=jnp.arange(POOL, dtype=jnp.int32))


@crop_kinds
def test_every_epoch_draws_anew_and_other_passes_see_the_draw_of_the_round(kind):
    data = augment(jax.random.key(9), distinct(9), kind, every="epoch")
    table, mapped = images_of_epochs(data, 3)
    positions = jnp.arange(9)
    for number in range(3):
        key = phase_key(jax.random.fold_in(KEY, number), "augment")
        np.testing.assert_array_equal(table[number], seen(key, kind, positions))
    np.testing.assert_array_equal(mapped, seen(jax.random.key(9), kind, positions))
    assert not np.array_equal(table[0], table[1])


@crop_kinds
def test_a_draw_per_round_is_the_same_in_all_passes(kind):
    table, mapped = images_of_epochs(augment(jax.random.key(9), distinct(9), kind, every="round"), 2)
    expected = seen(jax.random.key(9), kind, jnp.arange(9))
    for found in (*table, mapped):
        np.testing.assert_array_equal(found, expected)


def test_features_and_originals_are_left_alone():
    given = client(4)
    data = augment(KEY, given, "crop_flip", every="epoch")
    assert data.original is given
    assert cache_features(lambda x: x.astype(jnp.float32).reshape(len(x), -1), data).augmentation is None
    assert augment(KEY, given, "none", every="epoch") is given


def test_crops_are_taken_of_copies_too():
    given = client(9)
    with_copies = add_copies(KEY, given, "concat")
    data = augment(jax.random.key(9), with_copies, "crop_flip", every="round")
    positions = jnp.array([0, 8, 9, 17])
    x = np.concatenate([PIXELS[ROWS[:9]], copies()[:9]])[positions]
    expected = jax.jit(crop_flip)(keys_of(jax.random.key(9), positions), jnp.asarray(x))
    np.testing.assert_array_equal(data.take(positions, positions >= 0).x, expected)
    assert data.original is given
    np.testing.assert_array_equal(data.original.take(positions[:2], positions[:2] >= 0).x, PIXELS[ROWS[[0, 8]]])
