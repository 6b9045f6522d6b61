"""From a data set to a federation: every row where the arguments put it, and one error per misfit."""

import itertools

import jax
import numpy as np
import pytest

from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.data.divide import count_new, divide
from fedjax_pfl.errors import ConfigError
from tests.data.labels import TEN

SAMPLES, TRAIN_ROWS, CLIENTS = len(TEN), 140, 6
RNG = np.random.default_rng(1)
IMAGES = RNG.integers(0, 256, (SAMPLES, 2, 2, 1), np.uint8)
USERS = RNG.integers(0, 12, SAMPLES).astype(np.int32)
MERGED = Dataset("made", IMAGES, TEN, 10, None)
PARTS = MERGED._replace(train_rows=TRAIN_ROWS)
KINDS = ("iid", "pathological", "dirichlet")


def divided(dataset=MERGED, kind="iid", **fields):
    return divide(dataset, **{"clients": CLIENTS, "partition": {"kind": kind}, "seed": 3, **fields})


def rows(table):
    """The rows of each client, from its index table."""
    return [np.asarray(index)[:count].tolist() for index, count in zip(table.index, table.count, strict=True)]


def flat(*tables):
    return sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(rows(table) for table in tables)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_split_gives_every_row_to_one_client_for_one_use(kind):
    federation, manifest = divided(kind=kind, validation_share=0.2)
    assert flat(federation.train, federation.validation, federation.test) == list(range(SAMPLES))
    assert flat(federation.pooled) == flat(federation.test)
    np.testing.assert_array_equal(federation.x, IMAGES)
    np.testing.assert_array_equal(federation.y, TEN)
    for part, table in (("train", federation.train), ("validation", federation.validation), ("test", federation.test)):
        np.testing.assert_array_equal(table.count, manifest[f"n_{part}"])
        for held, counts in zip(rows(table), np.asarray(table.class_counts), strict=True):
            np.testing.assert_array_equal(np.bincount(TEN[held], minlength=10), counts)
    uses = federation.train, federation.validation, federation.test
    whole = [[*train, *validation, *test] for train, validation, test in zip(*map(rows, uses), strict=True)]
    assert manifest["sizes"] == [len(held) for held in whole]
    assert manifest["class_counts"] == [np.bincount(TEN[held], minlength=10).tolist() for held in whole]


@pytest.mark.parametrize("kind", KINDS)
def test_an_official_split_trains_on_one_part_and_pools_all_of_the_other(kind):
    federation, _ = divided(PARTS, kind, split="official", validation_share=0.2)
    assert flat(federation.train, federation.validation) == list(range(TRAIN_ROWS))
    assert flat(federation.pooled) == list(range(TRAIN_ROWS, SAMPLES))
    assert set(flat(federation.test)) <= set(range(TRAIN_ROWS, SAMPLES))


def test_natural_clients_are_users_and_are_tested_on_their_own_rows_of_the_test_part():
    federation, _ = divided(PARTS._replace(users=USERS), "natural", split="official")
    for trained, tested in zip(rows(federation.train), rows(federation.test), strict=True):
        (user,) = set(USERS[trained])
        assert sorted(tested) == [row for row in range(TRAIN_ROWS, SAMPLES) if USERS[row] == user]
    assert flat(federation.pooled) == flat(federation.test)


def test_validation_rows_are_held_apart_and_may_take_the_place_of_the_test_rows():
    none, _ = divided()
    assert none.validation is None
    tested, manifest = divided(validation_share=0.2)
    validated, same = divided(validation_share=0.2, evaluate_on="validation")
    assert manifest == same
    jax.tree.map(np.testing.assert_array_equal, (tested.train, tested.validation), (validated.train, validated.test))
    jax.tree.map(np.testing.assert_array_equal, tested.validation, validated.validation)
    assert flat(validated.pooled) == flat(tested.validation)


def test_a_stratified_split_keeps_who_holds_what_and_tests_nobody_on_classes_unseen():
    fields = {"kind": "dirichlet", "clients": 20, "test_share": 0.5, "validation_share": 0.3}
    (plain, before), (federation, manifest) = divided(**fields), divided(**fields, stratified=True)
    for key in ("sizes", "class_counts", "n_test"):
        assert manifest[key] == before[key]
    held = np.array(manifest["class_counts"])

    def unseen(data):
        return (held >= 2) & (np.asarray(data.test.class_counts) > 0) & (np.asarray(data.train.class_counts) == 0)

    assert unseen(plain).any()
    assert not unseen(federation).any()


def test_official_test_rows_that_do_not_suffice_are_noted():
    _, manifest = divided(PARTS, "pathological", split="official", test_share=0.6)
    short = [n < round(trained * 1.5) for n, trained in zip(manifest["n_test"], manifest["n_train"], strict=True)]
    assert any(short)
    assert manifest["notes"][-1].startswith(
        f"{sum(short)} clients of {CLIENTS} got fewer test samples than their share"
    )


def test_new_clients_are_the_same_clients_numbered_last():
    _, plain = divided(kind="dirichlet")
    _, moved = divided(kind="dirichlet", new_clients=0.34)
    assert sorted(plain["class_counts"]) == sorted(moved["class_counts"])
    old, new = moved["class_counts"][:4], moved["class_counts"][4:]
    assert [counts for counts in plain["class_counts"] if counts in old] == old
    assert [counts for counts in plain["class_counts"] if counts in new] == new
    assert moved["notes"][-1] == "clients 4 to 5 are new: they never train"


@pytest.mark.parametrize("test_share", [0.1, 0.25, 1 / 3, 0.5])
def test_samples_per_client_counts_what_a_client_trains_and_validates_on(test_share):
    _, manifest = divided(samples_per_client=12, test_share=test_share, validation_share=0.25)
    assert manifest["n_train"] == [9] * CLIENTS
    assert manifest["n_validation"] == [3] * CLIENTS


def test_the_global_test_set_is_cut_into_blocks_that_hold_it_once():
    labels = np.tile(TEN, 10)
    federation, _ = divide(
        Dataset("long", np.zeros((len(labels), 1, 1, 1), np.uint8), labels, 10, 700),
        clients=3,
        partition={"kind": "iid"},
        split="official",
        seed=0,
    )
    assert federation.pooled.count.tolist() == [434, 433, 433]
    assert flat(federation.pooled) == list(range(700, 2000))


def test_everything_follows_from_the_seed():
    fields = {"kind": "dirichlet", "validation_share": 0.2, "new_clients": 0.34}
    (first, one), (second, two), (_, other) = divided(**fields), divided(**fields), divided(**fields, seed=4)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert one == two
    assert one["hash"] != other["hash"]


@pytest.mark.parametrize(("share", "clients", "expected"), [(0.0, 5, 0), (0.34, 6, 2), (0.5, 2, 1), (0.99, 10, None)])
def test_new_clients_are_some_but_not_all(share, clients, expected):
    if expected is not None:
        assert count_new(share, clients) == expected
        return
    with pytest.raises(ConfigError) as caught:
        count_new(share, clients)
    assert caught.value.field == "data.new_clients"


@pytest.mark.parametrize(
    ("dataset", "fields", "field"),
    [
        (MERGED, {"kind": "natural"}, "data.partition.kind"),
        (MERGED, {"split": "official"}, "data.split"),
        (PARTS, {"split": "official", "test_part_share": 0.2}, "data.test_part_share"),
        (PARTS._replace(users=np.arange(SAMPLES)), {"kind": "natural", "split": "official"}, "data.split"),
        (MERGED, {"samples_per_client": 26}, "data.samples_per_client"),
        (MERGED, {"validation_share": 0.01, "evaluate_on": "validation"}, "data.validation_share"),
        (MERGED, {"new_clients": 0.01}, "data.new_clients"),
    ],
)
def test_arguments_that_do_not_fit_name_their_field(dataset, fields, field):
    with pytest.raises(ConfigError) as caught:
        divided(dataset, **fields)
    assert caught.value.field == field
