"""From a data set to a federation: every row where the arguments put it, and one error per misfit."""

import itertools

import jax
import numpy as np
import pytest

from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.data.divide import count_new, deal
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.summary import majority_class
from tests.data.labels import TEN, divide

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
    np.testing.assert_array_equal(federation.x[np.arange(len(IMAGES))], IMAGES)
    np.testing.assert_array_equal(federation.y, TEN)
    for part, table in (("train", federation.train), ("validation", federation.validation), ("test", federation.test)):
        np.testing.assert_array_equal(table.count, manifest[f"n_{part}"])
        for held, counts in zip(rows(table), np.asarray(table.class_counts), strict=True):
            np.testing.assert_array_equal(np.bincount(TEN[held], minlength=10), counts)
        np.testing.assert_array_equal(table.class_counts, manifest[f"{part}_class_counts"])
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


def test_users_that_a_partition_does_not_look_at_are_noted():
    _, manifest = divided(MERGED._replace(users=np.arange(SAMPLES) % 5))
    assert manifest["notes"] == ['the users of made are not looked at: the partition is "iid", and theirs is "natural"']
    assert not divided()[1]["notes"]


def test_labels_that_count_from_1_are_noted():
    assert divided(MERGED._replace(labels=TEN + 1, classes=11))[1]["notes"] == [
        "class 0 has no sample; do the labels count from 1?"
    ]


def test_classes_without_samples_are_counted():
    assert divided(MERGED._replace(labels=TEN * 10, classes=91, own=True))[1]["notes"] == [
        "81 of 91 classes have no sample; are the labels the numbers of classes?"
    ]


def test_clients_without_validation_samples_are_counted_where_others_have_some():
    users = np.where(np.arange(SAMPLES) < SAMPLES - 2, 0, 1)  # two samples are too few for a part of their own

    def notes(share):
        return divided(MERGED._replace(users=users), "natural", clients=2, validation_share=share)[1]["notes"]

    assert [note for note in notes(0.2) if "validation" in note] == [
        "1 client of 2 without validation samples: scores on validation samples leave them out"
    ]
    assert not any("validation" in note for note in notes(0.0))


def test_a_test_part_from_python_that_is_divided_anew_is_noted():
    given = PARTS._replace(own=True)
    (note,) = divided(given)[1]["notes"]
    assert note.startswith("the test part given is divided anew")
    assert divided(given, split="official")[1]["notes"] == divided(PARTS)[1]["notes"] == []


def test_the_manifest_says_which_user_a_client_is():
    users, names = np.arange(SAMPLES) % 9, tuple(f"user_{at}" for at in range(9))
    named = MERGED._replace(users=users, user_names=names)
    federation, manifest = divided(named, "natural", clients=4, new_clients=0.3)
    assert [{names[users[row]] for row in held} for held in rows(federation.train)] == [
        {user} for user in manifest["users"]
    ]
    assert len(set(manifest["users"])) == 4
    numbered = divided(MERGED._replace(users=users), "natural", clients=4, new_clients=0.3)[1]["users"]
    assert [f"user_{number}" for number in numbered] == manifest["users"]
    assert "users" not in divided()[1]


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


def fedpac_counts(clients, size, s):
    """FedPAC's code, image by image: s % of so many go round all classes, the rest round the classes of the group."""
    groups = [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8], [8, 9, 0]]
    counts = np.zeros((clients, 10), int)
    for client in range(clients):
        for image in range(size):
            of = range(10) if image < size * s / 100 else groups[client % 5]
            counts[client, of[image % len(of)]] += 1
    return counts.tolist()


@pytest.mark.parametrize("s", [20.0, 50.0])
def test_the_groups_of_fedpac_train_on_600_images_and_are_tested_on_300(s):
    labels = np.concatenate([np.repeat(np.arange(10), 2000), np.repeat(np.arange(10), 1000)]).astype(np.int32)
    images = np.zeros((len(labels), 1, 1, 1), np.uint8)
    _, manifest = divide(
        Dataset("tenth", images, labels, 10, 20_000),
        clients=20,
        partition={"kind": "weak_pathological", "s": s, "style": "fedpac"},
        split="official",
        samples_per_client=600,
        test_share=1 / 3,
        seed=0,
    )
    assert manifest["train_class_counts"] == fedpac_counts(20, 600, s)
    assert manifest["test_class_counts"] == fedpac_counts(20, 300, s)
    assert manifest["notes"] == []


def test_overlapping_clients_share_training_rows_and_are_tested_on_rows_that_nobody_trains_on():
    labels = np.concatenate([np.repeat(np.arange(10), 600), np.repeat(np.arange(10), 100)]).astype(np.int32)
    federation, manifest = divide(
        Dataset("fedmate", np.zeros((len(labels), 1, 1, 1), np.uint8), labels, 10, 6000),
        clients=20,
        partition={"kind": "pathological", "classes_per_client": 3, "overlap": True},
        split="official",
        samples_per_client=300,
        test_share=1 / 6,
        seed=1,
    )
    trained, tested = flat(federation.train), flat(federation.test)
    assert len(trained) == 6000 > len(set(trained))
    together = f"clients overlap: together they train on {len(set(trained))} different samples, of 6000"
    assert manifest["notes"] == [together]
    assert max(trained) < 6000 <= min(tested)
    assert set(np.ravel(manifest["train_class_counts"])) == {0, 100}
    assert manifest["test_class_counts"] == (np.array(manifest["train_class_counts"]) // 5).tolist()
    assert flat(federation.pooled) == list(range(6000, 7000))


def test_dominant_classes_alone_may_be_tested():
    labels = np.concatenate([np.repeat(np.arange(100), 50), np.repeat(np.arange(100), 30)]).astype(np.int32)
    _, manifest = divide(
        Dataset("hundred", np.zeros((len(labels), 1, 1, 1), np.uint8), labels, 100, 5000),
        clients=5,
        partition={"kind": "weak_pathological", "s": 20.0, "style": "fedpac"},
        split="official",
        samples_per_client=500,
        test_share=200 / 700,
        test_classes="dominant",
        seed=0,
    )
    trained, tested = np.array(manifest["train_class_counts"]), np.array(manifest["test_class_counts"])
    for client in range(5):
        group = range(10 * client, 10 * client + 10)
        assert trained[client].tolist() == [41 if k in group else 1 for k in range(100)]
        assert tested[client].tolist() == [20 if k in group else 0 for k in range(100)]


def test_the_accuracy_of_always_guessing_the_majority_class_follows_from_the_manifest():
    federation, manifest = divided(PARTS, "dirichlet", split="official")
    found = []
    for trained, tested in zip(rows(federation.train), rows(federation.test), strict=True):
        guess = max(range(10), key=lambda k, trained=trained: (TEN[trained] == k).sum())
        found.append(np.mean([TEN[row] == guess for row in tested]))
    assert majority_class(manifest, "test", 0)["accuracy"] == pytest.approx(np.mean(found))


def test_new_clients_are_the_same_clients_numbered_last():
    _, plain = divided(kind="dirichlet")
    _, moved = divided(kind="dirichlet", new_clients=0.34)
    assert sorted(plain["class_counts"]) == sorted(moved["class_counts"])
    old, new = moved["class_counts"][:4], moved["class_counts"][4:]
    assert [counts for counts in plain["class_counts"] if counts in old] == old
    assert [counts for counts in plain["class_counts"] if counts in new] == new
    assert moved["notes"][-1] == "clients 4 to 5 are new: they never train"


def test_new_clients_are_drawn_from_a_stream_of_their_own():
    def parts(share):
        holdings, _ = deal(MERGED, clients=40, partition={"kind": "iid"}, new_clients=share, seed=3)
        return [frozenset(np.concatenate(split).tolist()) for split in holdings.splits]

    plain = parts(0.0)
    new = {plain.index(part) for part in parts(0.25)[30:]}
    others = [np.random.SeedSequence(3, spawn_key=key) for key in ((0,), (1,), (0, 0))]  # two clients', the test part's
    for stream in map(np.random.default_rng, [3, *others]):
        assert new != set(stream.choice(40, 10, replace=False).tolist())


@pytest.mark.parametrize(
    ("samples", "test_share", "tested"),
    [
        (12, 0.1, 2),
        (12, 0.25, 4),
        (12, 1 / 3, 6),
        (12, 0.5, 12),
        (21, 0.3, 9),  # 21 / (1 - 0.3) is 30.000000000000004
    ],
)
def test_samples_per_client_counts_what_a_client_trains_and_validates_on(samples, test_share, tested):
    _, manifest = divided(samples_per_client=samples, test_share=test_share, validation_share=0.25)
    assert manifest["n_train"] == [samples - samples // 4] * CLIENTS
    assert manifest["n_validation"] == [samples // 4] * CLIENTS
    assert manifest["n_test"] == [tested] * CLIENTS


@pytest.mark.parametrize("test_share", [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 1 / 3, 0.3, 0.25, 0.2, 0.1])
@pytest.mark.parametrize("clients", [1, 2, 5, 6, 20])
def test_the_largest_number_of_samples_per_client_that_is_named_is_accepted(clients, test_share):
    fields = {"clients": clients, "partition": {"kind": "iid"}, "test_share": test_share, "seed": 3}
    with pytest.raises(ConfigError, match="up to") as caught:
        deal(MERGED, **fields, samples_per_client=SAMPLES)
    most = int(caught.value.allowed.split()[2].rstrip(":"))
    assert deal(MERGED, **fields, samples_per_client=most)[1]["n_train"] == [most] * clients
    with pytest.raises(ConfigError, match=f"up to {most}: "):
        deal(MERGED, **fields, samples_per_client=most + 1)


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
        (MERGED, {"validation_share": 0.01}, "data.validation_share"),
        (MERGED, {"new_clients": 0.01}, "data.new_clients"),
    ],
)
def test_arguments_that_do_not_fit_name_their_field(dataset, fields, field):
    with pytest.raises(ConfigError) as caught:
        divided(dataset, **fields)
    assert caught.value.field == field


def test_no_share_is_asked_for_that_would_leave_none_either():
    """Of its only training sample a client can spare none, whatever the share."""
    for clients, allowed in ((CLIENTS, "a larger share: of"), (SAMPLES // 2, "0, or fewer clients: of 1 training")):
        with pytest.raises(ConfigError, match=rf"data\.validation_share = 0\.01 is not usable: {allowed}"):
            divided(clients=clients, validation_share=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_of_an_official_split_the_manifest_counts_what_was_shared_out(kind):
    """Training and validation rows, without the test rows, which clients may share."""
    _, manifest = divided(PARTS, kind, split="official", validation_share=0.2)
    shared = np.add(manifest["n_train"], manifest["n_validation"])
    assert manifest["sizes"] == shared.tolist()
    of_class = np.add(manifest["train_class_counts"], manifest["validation_class_counts"])
    assert manifest["class_counts"] == of_class.tolist()
    assert sum(manifest["n_test"]) > 0
