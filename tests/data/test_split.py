"""Splits and the manifest: sizes in closed form, proportions, and what the hash must tell apart."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_pfl.data.dealing import Partition
from fedjax_pfl.data.split import Split, draw_test, manifest, set_aside, short_of_test_rows, split_rows
from fedjax_pfl.errors import ConfigError
from tests.data.labels import TEN, fixed, labels_of

# --- split_rows ------------------------------------------------------------------------------------------------------

ANY_LABELS = np.zeros(2000, np.int32)


@pytest.mark.parametrize(
    ("samples", "test_share", "validation_share", "expected"),
    [
        (800, 0.25, 0.0, (600, 0, 200)),
        (801, 0.25, 0.0, (600, 0, 201)),
        (10, 0.9, 0.0, (1, 0, 9)),  # (1 - 0.9) * 10 is 0.9999999999999998
        (2, 0.9, 0.0, (1, 0, 1)),
        (3, 0.01, 0.0, (2, 0, 1)),
        (125, 0.2, 0.29, (71, 29, 25)),  # 0.29 * 100 is 28.999999999999996
        (100, 0.5, 0.99, (1, 49, 50)),
        (4, 0.5, 0.99, (1, 1, 2)),
        (2, 0.5, 0.9, (1, 0, 1)),
        (4, 1e-12, 1 - 1e-12, (1, 2, 1)),  # what rounds to the whole still leaves one
    ],
)
def test_split_sizes(samples, test_share, validation_share, expected):
    part = np.arange(100, 100 + samples)
    (split,) = split_rows(ANY_LABELS, [part], 0, test_share=test_share, validation_share=validation_share)
    assert tuple(len(rows) for rows in split) == expected
    np.testing.assert_array_equal(np.sort(np.concatenate(split)), part)


@fixed
@given(
    samples=st.integers(2, 300),
    test_share=st.floats(0.001, 0.999),
    validation_share=st.floats(0, 0.999),
    seed=st.integers(0, 2**32 - 1),
)
def test_splits_always_leave_something_to_train_and_to_test_on(samples, test_share, validation_share, seed):
    parts = [np.arange(samples), np.arange(samples, samples + 2)]
    splits = split_rows(ANY_LABELS, parts, seed, test_share=test_share, validation_share=validation_share)
    for part, split in zip(parts, splits, strict=True):
        np.testing.assert_array_equal(np.sort(np.concatenate(split)), part)
        assert len(split.train) >= 1
        assert len(split.test) >= 1
        assert abs(len(split.test) - test_share * len(part)) <= 1
        train_total = len(split.train) + len(split.validation)
        assert abs(len(split.validation) - validation_share * train_total) <= 1


def test_splits_are_random_and_independent_of_other_clients():
    parts = [np.arange(100), np.arange(100, 200), np.arange(200, 300)]
    splits = split_rows(ANY_LABELS, parts, 5, test_share=0.25, validation_share=0.2)
    fewer = split_rows(ANY_LABELS, [parts[0], np.arange(7, 9), parts[2]], 5, test_share=0.25, validation_share=0.2)
    other = split_rows(ANY_LABELS, parts, 6, test_share=0.25, validation_share=0.2)
    for rows, same, different in zip(splits[2], fewer[2], other[2], strict=True):
        np.testing.assert_array_equal(rows, same)
        assert set(rows) != set(different)
    assert set(splits[0].test) != {row - 100 for row in splits[1].test}
    assert max(splits[0].train) > 90  # no leading block


def test_no_client_splits_by_the_stream_of_another_seed_or_of_the_partition():
    part, shares = np.arange(100), {"test_share": 0.25, "validation_share": 0.0}
    first, second = split_rows(ANY_LABELS, [part, part], 0, **shares)
    (other,) = split_rows(ANY_LABELS, [part], 1, **shares)
    assert set(second.test) != set(other.test)
    assert set(first.test) != set(np.random.default_rng(0).permutation(part)[-25:])


# --- stratified splits ---


def stratified(labels, parts, seed=0, test_share=0.25, validation_share=0.0):
    shares = {"test_share": test_share, "validation_share": validation_share}
    return split_rows(labels, parts, seed, stratified=True, **shares), split_rows(labels, parts, seed, **shares)


@pytest.mark.parametrize(
    ("sizes", "test_share", "expected"),
    [
        ([40, 20, 8], 0.25, [10, 5, 2]),
        ([4, 4, 4, 4], 0.25, [1, 1, 1, 1]),
        ([90, 6], 0.5, [45, 3]),
        ([6, 1, 1], 0.25, [2, 0, 0]),  # 2 of 8, and a lone row is trained on
        ([2, 1, 1, 1, 1], 0.5, [1, None, None, None, None]),  # 3 of 6: two lone rows must help out
        ([1, 1], 0.25, [None, None]),
        ([2, 2, 2, 2, 2], 0.9, [1, 1, 1, 1, 1]),  # 9 of 10 would leave four classes without a row to train on
        ([100, 2], 0.9, [91, 1]),
    ],
)
def test_each_class_is_split_in_proportion_and_keeps_a_row_to_train_on(sizes, test_share, expected):
    labels = labels_of(*sizes)
    ((split,), (plain,)) = stratified(labels, [np.arange(len(labels))], test_share=test_share)
    found = np.bincount(labels[split.test], minlength=len(sizes))
    assert all(count is None or count == tested for count, tested in zip(expected, found, strict=True))
    if None not in expected:
        assert len(split.test) == sum(expected)
    if test_share <= 0.5:
        assert len(split.test) == len(plain.test)
    np.testing.assert_array_equal(np.sort(np.concatenate(split)), np.arange(len(labels)))


@fixed
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) >= 2),
    test_share=st.floats(0.001, 0.999),
    validation_share=st.floats(0, 0.999),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_class_of_two_rows_is_tested_or_validated_on_and_not_trained_on(sizes, test_share, validation_share, seed):
    labels = labels_of(*sizes)
    ((split,), (plain,)) = stratified(labels, [np.arange(len(labels))], seed, test_share, validation_share)
    np.testing.assert_array_equal(np.sort(np.concatenate(split)), np.arange(len(labels)))
    trained, validated, _ = (np.bincount(labels[rows], minlength=len(sizes)) for rows in split)
    assert min(len(split.train), len(split.test)) >= 1
    assert (trained[np.array(sizes) >= 2] >= 1).all()
    assert (trained[validated > 0] >= 1).all()
    assert len(split.test) <= len(plain.test)
    assert len(split.validation) <= validation_share * (len(split.train) + len(split.validation)) + 1e-6
    if test_share <= 0.5:
        assert len(split.test) == len(plain.test)


def test_stratified_rows_are_drawn_at_random_and_independently_of_other_clients():
    labels = np.tile(np.arange(4), 50)
    parts = [np.arange(100), np.arange(100, 200)]
    counts = np.zeros(200)
    for seed in range(300):
        splits, _ = stratified(labels, parts, seed)
        assert [len(set(labels[split.test])) for split in splits] == [4, 4]
        counts[np.concatenate([split.test for split in splits])] += 1
    # Each row is drawn in a quarter of the draws (24 or 28 of 100 rows per class would show), within six deviations.
    assert np.abs(counts / 300 - 0.25).max() < 6 * np.sqrt(0.25 * 0.75 / 300)
    alone, _ = stratified(labels, parts[:1], 299)
    for rows, same in zip(alone[0], splits[0], strict=True):
        np.testing.assert_array_equal(rows, same)


# --- set_aside -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "share", "expected"),
    [
        ([600, 600], 1 / 6, [100, 100]),
        ([10, 11, 14, 16], 0.25, [2, 3, 4, 4]),  # exactly 2.5 (to even), 2.75, 3.5 (to even), 4
        ([2, 1, 0, 3], 0.01, [1, 0, 0, 1]),  # one of each class that can spare it
        ([2, 1, 0, 3], 0.99, [1, 0, 0, 2]),  # and one is left to train on
    ],
)
def test_a_share_of_each_class_is_set_aside(sizes, share, expected):
    labels = labels_of(*sizes)
    train, test = set_aside(labels, share, 0)
    np.testing.assert_array_equal(np.bincount(labels[test], minlength=len(sizes)), expected)
    np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(sum(sizes)))
    assert (np.diff(train) > 0).all()
    assert (np.diff(test) > 0).all()


def test_what_is_set_aside_is_random_and_follows_from_the_seed():
    counts = np.zeros(200)
    for seed in range(400):
        test = set_aside(TEN, 0.25, seed)[1]
        np.testing.assert_array_equal(test, set_aside(TEN, 0.25, seed)[1])
        counts[test] += 1
    # Each row is drawn in a quarter of the draws, within six standard deviations.
    assert np.abs(counts / 400 - 0.25).max() < 6 * np.sqrt(0.25 * 0.75 / 400)


def test_the_test_part_is_drawn_from_a_stream_of_its_own():
    one_class = np.zeros(200, np.int32)
    test = set_aside(one_class, 0.25, 3)[1]
    clients = [np.random.SeedSequence(3, spawn_key=(client,)) for client in range(5)]
    for stream in map(np.random.default_rng, [3, *clients]):
        assert set(test) != set(stream.choice(200, 50, replace=False))


# --- draw_test -------------------------------------------------------------------------------------------------------


def official(train_sizes, test_sizes):
    """Labels with a training part first, and the rows of the test part."""
    labels = np.concatenate([labels_of(*train_sizes), labels_of(*test_sizes)])
    return labels, np.arange(sum(train_sizes), len(labels))


def rows_of(labels, rows, counts):
    """A client's part: the first so many rows of each class."""
    return np.concatenate([rows[labels[rows] == k][:count] for k, count in enumerate(counts)])


@pytest.mark.parametrize(
    ("held", "test_share", "expected"),
    [
        ([300, 150, 150], 1 / 3, [150, 75, 75]),  # FedeCouple: 600 to train on and 300 to test on
        ([5, 3, 2], 0.3, [2, 1, 1]),  # 4 rows; exactly 2, 1.2, 0.8
        ([7, 2, 1], 0.5, [7, 2, 1]),
        ([40, 0, 2], 0.1, [5, 0, 0]),  # 5 rows; exactly 4.76, 0, 0.24
        ([0, 3, 0], 0.01, [0, 1, 0]),  # at least one
        ([300, 100, 0], 0.75, [900, 300, 0]),
    ],
)
def test_official_test_rows_follow_the_training_proportions(held, test_share, expected):
    labels, test_rows = official([400] * 3, [1000] * 3)
    part = rows_of(labels, np.arange(1200), held)
    (split,) = draw_test(labels, [part], test_rows, 0, test_share=test_share)
    np.testing.assert_array_equal(np.bincount(labels[split.test], minlength=3), expected)
    assert len(set(split.test)) == len(split.test)
    assert set(split.test) <= set(test_rows)
    assert set(split.train) == set(part)
    assert len(split.validation) == 0


@pytest.mark.parametrize(
    ("held", "test_share", "every", "dominant"),
    [
        ([26, 25, 25, 24], 0.5, [26, 25, 25, 24], [100, 0, 0, 0]),  # an even share is 25
        ([60, 30, 6, 4], 0.25, [20, 10, 2, 1], [22, 11, 0, 0]),  # 33 rows
        ([40, 0, 0, 0], 0.5, [40, 0, 0, 0], [40, 0, 0, 0]),
    ],
)
def test_dominant_are_the_classes_of_which_a_client_has_more_than_an_even_share(held, test_share, every, dominant):
    labels, test_rows = official([400] * 4, [1000] * 4)
    part = rows_of(labels, np.arange(1600), held)
    for test_classes, expected in (("all", every), ("dominant", dominant)):
        (split,) = draw_test(labels, [part], test_rows, 0, test_share=test_share, test_classes=test_classes)
        np.testing.assert_array_equal(np.bincount(labels[split.test], minlength=4), expected)
        assert set(split.train) == set(part)


def test_a_class_that_nobody_has_makes_no_even_share_smaller():
    sizes = [400, 0, 400, 0, 0, 400]
    labels, test_rows = official(sizes, sizes)
    part = rows_of(labels, np.arange(1200), [10, 0, 5, 0, 0, 5])  # 5 of 20 are more than a sixth, not than a third
    (split,) = draw_test(labels, [part], test_rows, 0, test_share=0.5, test_classes="dominant")
    np.testing.assert_array_equal(np.bincount(labels[split.test], minlength=6), [20, 0, 0, 0, 0, 0])


def test_a_client_with_as_many_of_each_class_has_no_dominant_one():
    labels, test_rows = official([400] * 4, [1000] * 4)
    parts = [rows_of(labels, np.arange(1600), held) for held in ([2, 1, 1, 1], [5, 5, 5, 5])]
    with pytest.raises(ConfigError, match="client 1") as caught:
        draw_test(labels, parts, test_rows, 0, test_share=0.5, test_classes="dominant")
    assert caught.value.field == "data.test_classes"


def test_a_class_short_in_the_test_part_is_not_replaced_by_others():
    labels, test_rows = official([400] * 3, [10, 1000, 0])
    part = rows_of(labels, np.arange(1200), [60, 30, 10])
    (split,) = draw_test(labels, [part], test_rows, 0, test_share=0.5)
    np.testing.assert_array_equal(np.bincount(labels[split.test], minlength=3), [10, 30, 0])


@pytest.mark.parametrize("seed", range(8))
def test_a_client_of_few_rows_is_tested_on_a_class_that_the_test_part_has(seed):
    labels, test_rows = official([1] * 4, [0, 0, 0, 1])
    (split,) = draw_test(labels, [np.arange(4)], test_rows, seed, test_share=0.25)
    assert split.test.tolist() == [4]
    labels, test_rows = official([6, 5, 5, 0], [0, 1, 0, 9])
    (split,) = draw_test(labels, [np.arange(16)], test_rows, seed, test_share=0.05, test_classes="dominant")
    assert labels[split.test].tolist() == [1]


def test_clients_that_get_less_than_their_share_are_noted():
    labels, test_rows = official([400] * 3, [10, 1000, 0])
    parts = [rows_of(labels, np.arange(1200), held) for held in ([60, 30, 10], [0, 30, 0], [0, 20, 20])]
    splits = draw_test(labels, parts, test_rows, 0, test_share=0.5, validation_share=0.2)
    assert short_of_test_rows(splits, 0.5) == (
        "2 clients of 3 got fewer test samples than their share, 60 of 140: the test part has no more of their classes",
    )
    assert short_of_test_rows(splits[1:2], 0.5) == ()


def test_clients_may_share_test_rows_and_draw_them_at_random():
    labels, test_rows = official([100] * 2, [30] * 2)
    part = rows_of(labels, np.arange(200), [20, 20])
    splits = draw_test(labels, [part, part], test_rows, 0, test_share=0.5, validation_share=0.25)
    first, second = (set(split.test) for split in splits)
    assert first & second  # 40 of 60 each must overlap
    assert first != second
    for split in splits:
        assert (len(split.train), len(split.validation), len(split.test)) == (30, 10, 40)
        assert set(split.train) | set(split.validation) == set(part)
        assert (np.diff(labels[split.test]) < 0).any()  # not class by class
    again = draw_test(labels, [part, part], test_rows, 0, test_share=0.5, validation_share=0.25)
    assert all(np.array_equal(a, b) for a, b in zip(splits[1], again[1], strict=True))


# --- manifest --------------------------------------------------------------------------------------------------------


def small_manifest(labels=(0, 1, 1, 2, 0), first=((0,), (1,), (2,)), second=((3,), (), (4,))):
    splits = [Split(*(np.array(rows, np.int64) for rows in client)) for client in (first, second)]
    parts = [np.sort(np.concatenate(split)) for split in splits]
    return manifest(np.array(labels, np.int32), 4, Partition(parts, ("a note",)), splits)


def test_manifest_is_json_and_complete():
    record = small_manifest()
    assert json.loads(json.dumps(record)) == record
    # SHA-256 of the little-endian int64 sequence 1 0 1 1 1 2 1 3 0 1 4 5 0 1 1 2 0: each array after its length.
    assert record.pop("hash") == "87656938e5b7f459d9e956970599480e4f3b5b88a8d4acff68df24fc83a4a5ff"
    assert record == {
        "sizes": [3, 2],
        "class_counts": [[1, 2, 0, 0], [1, 0, 1, 0]],
        "n_train": [1, 1],
        "n_validation": [1, 0],
        "n_test": [1, 1],
        "train_class_counts": [[1, 0, 0, 0], [0, 0, 1, 0]],
        "validation_class_counts": [[0, 1, 0, 0], [0, 0, 0, 0]],
        "test_class_counts": [[0, 1, 0, 0], [1, 0, 0, 0]],
        "notes": ["a note"],
    }


def test_manifest_hash_tells_every_difference():
    changes = [
        {},
        {"labels": (0, 1, 1, 2, 1)},
        {"first": ((1,), (0,), (2,))},
        {"first": ((0, 1), (), (2,))},
        {"first": ((0,), (1, 2), ())},
        {"second": ((4,), (), (3,))},
        {"second": ((), (3,), (4,))},
        {"first": ((3,), (), (4,)), "second": ((0,), (1,), (2,))},
    ]
    assert len({small_manifest(**change)["hash"] for change in changes}) == len(changes)


def test_manifest_hash_does_not_depend_on_integer_types():
    splits = [Split(*(np.array([row], np.int32) for row in (0, 1, 2)))]
    wide = [Split(*(rows.astype(">i8") for rows in splits[0]))]
    labels = np.array([0, 1, 2], np.int16)
    part = Partition([np.arange(3)], ())
    assert manifest(labels, 3, part, splits) == manifest(labels.astype(np.int64), 3, part, wide)


# --- Errors ---


def test_a_client_without_samples_is_an_error():
    with pytest.raises(ConfigError, match=r"data\.clients = 2 .* client 1 has no samples"):
        draw_test(TEN, [np.arange(5), np.arange(0)], np.arange(100, 200), 0, test_share=0.5)


def test_a_client_whose_classes_the_test_part_lacks_is_an_error():
    labels, test_rows = official([10, 10], [0, 10])
    with pytest.raises(ConfigError) as caught:
        draw_test(labels, [rows_of(labels, np.arange(20), [5, 0])], test_rows, 0, test_share=0.5)
    assert caught.value.field == "data.split"


@pytest.mark.parametrize("stratified", [False, True])
def test_a_client_with_one_sample_trains_on_it(stratified):
    shares = {"test_share": 0.9, "validation_share": 0.9, "stratified": stratified}
    two, one = split_rows(TEN, [np.arange(2), np.array([7])], 0, **shares)
    assert [rows.tolist() for rows in one] == [[7], [], []]
    assert [len(rows) for rows in two] == [1, 0, 1]
    with pytest.raises(ConfigError, match="client 1 has no samples"):
        split_rows(TEN, [np.arange(2), np.arange(0)], 0, **shares)
