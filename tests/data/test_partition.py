"""Partitions and splits: PFLlib's golden vectors, closed forms, and rules that every kind must keep."""

import inspect
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_pfl.data.dealing import repair
from fedjax_pfl.data.partition import PARTITIONS, dirichlet, iid, natural, pathological, weak_pathological
from fedjax_pfl.errors import ConfigError
from tests.data.labels import TEN, fixed, labels_of


def class_counts(labels, parts):
    return np.array([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


def assert_well_formed(parts, samples, *, covering):
    """Ascending row numbers that no two clients share, and all of them if covering."""
    rows = np.concatenate(parts)
    assert rows.dtype == np.int64
    assert all((np.diff(part) > 0).all() for part in parts)
    assert len(np.unique(rows)) == len(rows)
    assert rows.min() >= 0
    assert rows.max() < samples
    if covering:
        assert len(rows) == samples


# --- Golden vectors of PFLlib: 20 clients, seed 1 (sizes before the split) -------------------------------------------

SETS = {"cifar10": (10, 6000, 2), "cifar100": (100, 600, 10), "tiny": (200, 500, 20), "fmnist": (10, 7000, 2)}
# fmt: off
GOLDEN_DIRICHLET = {
    "cifar10": [1621, 1814, 1211, 2080, 5128, 4264, 1440, 2622, 2974, 3236,
                1164, 1964, 5994, 1527, 3100, 4325, 4252, 3175, 5449, 2660],
    "cifar100": [3020, 3053, 2753, 3029, 2640, 2877, 3120, 3047, 2807, 3211,
                 2761, 3359, 3290, 2971, 3301, 3132, 3345, 2642, 3035, 2607],
    "tiny": [5092, 3261, 5001, 5006, 5162, 5323, 5067, 4823, 5144, 5210,
             5465, 4638, 5132, 5154, 5099, 5450, 4596, 5079, 5074, 5224],
    "fmnist": [82, 320, 875, 2603, 1455, 5473, 4385, 4461, 5560, 3556,
               6170, 6803, 8551, 626, 1328, 195, 2937, 4832, 5090, 4698],
}
GOLDEN_PATHOLOGICAL = {
    "cifar10": [2266, 1250, 2243, 6241, 2009, 952, 1734, 7305, 1859, 2514,
                2046, 5581, 1605, 1114, 1548, 7733, 2649, 1442, 2084, 5825],
    "cifar100": [1816, 4184, 1941, 4059, 1426, 4574, 952, 5048, 1654, 4346,
                 2060, 3940, 1890, 4110, 1364, 4636, 1960, 4040, 1899, 4101],
    "tiny": [2996, 7004, 2584, 7416, 2712, 7288, 2403, 7597, 2483, 7517,
             2952, 7048, 2027, 7973, 3229, 6771, 2815, 7185, 2868, 7132],
    "fmnist": [2316, 1300, 2293, 8091, 2059, 1002, 1893, 9046, 2933, 1909,
               2564, 6594, 2332, 1925, 1000, 8743, 1913, 1683, 3116, 7288],
}
# fmt: on


@pytest.mark.parametrize("name", SETS)
def test_pfllib_dirichlet_sizes(name):
    C, per_class, _ = SETS[name]
    parts, notes = dirichlet(labels_of(*[per_class] * C), 20, 1, None, beta=0.1, style="pfllib")
    assert [len(part) for part in parts] == GOLDEN_DIRICHLET[name]
    assert notes == ()
    assert_well_formed(parts, C * per_class, covering=True)


@pytest.mark.parametrize("name", SETS)
def test_pfllib_pathological_sizes(name):
    C, per_class, held = SETS[name]
    labels = labels_of(*[per_class] * C)
    parts, notes = pathological(labels, 20, 1, None, classes_per_client=held, style="pfllib")
    assert [len(part) for part in parts] == GOLDEN_PATHOLOGICAL[name]
    assert notes == ()
    assert_well_formed(parts, C * per_class, covering=True)
    # Clients come in groups of n c / K with the same classes, the first group with the first classes, and so on.
    group = 20 * held // C
    counts = class_counts(labels, parts)
    for client, row in enumerate(counts):
        first = client // group * held
        np.testing.assert_array_equal(np.flatnonzero(row), np.arange(first, first + held))


def test_pfllib_dirichlet_class_counts_of_cifar10():
    labels = labels_of(*[6000] * 10)
    counts = class_counts(labels, dirichlet(labels, 20, 1, None, style="pfllib").parts)
    held = [{k: n for k, n in enumerate(row.tolist()) if n} for row in counts]
    assert held[0] == {1: 9, 3: 668, 4: 476, 5: 287, 6: 5, 7: 167, 9: 9}
    assert held[1] == {0: 7, 1: 1, 2: 62, 4: 43, 7: 177, 8: 1524}
    assert held[4] == {0: 24, 2: 5104}


def test_a_dirichlet_client_has_as_many_samples_as_is_asked_for():
    labels = labels_of(*[100] * 10)
    few, many = (dirichlet(labels, 20, 3, None, beta=0.1, **least) for least in ({}, {"min_samples": 20}))
    sizes, enough = ([len(part) for part in found.parts] for found in (few, many))
    assert min(sizes) < 10
    assert min(enough) == 20
    assert_well_formed(many.parts, 1000, covering=True)
    assert "had fewer than 20 samples" in many.notes[0]
    kept = [size >= 20 for size in sizes]
    assert all(set(after) <= set(before) for after, before, of in zip(many.parts, few.parts, kept, strict=True) if of)
    for wrong in ({"size": 30}, {"size": None, "style": "pfllib"}):
        with pytest.raises(ConfigError, match=r"data\.partition\.min_samples = 5 is not usable: 2 with"):
            dirichlet(labels, 20, 3, **{"min_samples": 5, **wrong})
    with pytest.raises(ConfigError, match=r"data\.clients = 20 .* 51 samples per client"):
        dirichlet(labels, 20, 3, None, min_samples=51)


def pfllib_dirichlet_by_lists(labels, clients, seed, beta):
    """PFLlib's procedure as its description reads, without a limit of tries: (sorted rows per client, tries)."""
    rng = np.random.RandomState(seed)
    least = int(min(10 / (1 - 0.75), len(labels) / clients / 2))
    tries, smallest = 0, -1
    while smallest < least:
        tries += 1
        held = [[] for _ in range(clients)]
        for k in range(labels.max() + 1):
            rows = np.where(labels == k)[0]
            rng.shuffle(rows)
            shares = rng.dirichlet([beta] * clients)
            shares = np.array([p if len(h) < len(labels) / clients else 0 for p, h in zip(shares, held, strict=True)])
            cuts = (np.cumsum(shares / shares.sum()) * len(rows)).astype(int)[:-1]
            for h, chunk in zip(held, np.split(rows, cuts), strict=True):
                h.extend(chunk)
        smallest = min(len(h) for h in held)
    return [sorted(h) for h in held], tries


def test_pfllib_dirichlet_gives_the_very_rows_of_the_procedure_also_after_several_tries():
    labels = labels_of(90, 200, 150, 40, 120, 180)
    tries_seen = set()
    for seed in range(30):
        expected, tries = pfllib_dirichlet_by_lists(labels, 8, seed, 0.3)
        parts, notes = dirichlet(labels, 8, seed, None, beta=0.3, style="pfllib")
        if tries <= 10:
            assert [part.tolist() for part in parts] == expected
            assert notes == ()
        else:
            assert len(notes) == 1
        assert min(len(part) for part in parts) >= 40
        tries_seen.add(min(tries, 11))
    assert {1, 2, 11} <= tries_seen  # all three cases were met


def test_pfllib_pathological_last_holder_is_the_largest_and_shares_respect_the_floor():
    labels = labels_of(*[300] * 6)
    counts = class_counts(labels, pathological(labels, 12, 5, None, style="pfllib").parts)
    for column in counts.T:
        shares = column[column > 0]
        mean = 300 / len(shares)
        assert shares[-1] == shares.max()
        assert (shares >= int(max(mean / 10, 40 / 6))).all()


def pfllib_pathological_by_lists(labels, clients, seed, held):
    """PFLlib's procedure with lists: the rows of each client, and the classes that nobody holds."""
    rng = np.random.RandomState(seed)
    C = int(labels.max()) + 1
    least = int(min(10 / (1 - 0.75), len(labels) / clients / 2))
    left, rows, without = [held] * clients, [[] for _ in range(clients)], []
    for k in range(C):
        chosen = [client for client in range(clients) if left[client] > 0]
        if not chosen:
            without = list(range(k, C))
            break
        chosen = chosen[: int(np.ceil(clients / C * held))]
        of_class = np.flatnonzero(labels == k).tolist()
        mean = len(of_class) / len(chosen)
        counts = rng.randint(max(mean / 10, least / C), mean, len(chosen) - 1).tolist()
        for client, count in zip(chosen, [*counts, len(of_class) - sum(counts)], strict=True):
            rows[client] += of_class[:count]
            of_class = of_class[count:]
            left[client] -= 1
    return [sorted(part) for part in rows], without


@pytest.mark.parametrize(
    ("clients", "held", "without"),
    [(12, 2, [8, 9]), (12, 3, [9]), (4, 3, [6, 7, 8, 9]), (3, 4, [8, 9]), (20, 2, [])],
)
def test_pfllib_pathological_gives_the_very_rows_of_the_procedure_and_names_what_it_leaves_out(clients, held, without):
    labels = labels_of(*range(300, 400, 10))
    parts, notes = pathological(labels, clients, 4, None, classes_per_client=held, style="pfllib")
    expected, missing = pfllib_pathological_by_lists(labels, clients, 4, held)
    assert [part.tolist() for part in parts] == expected
    assert missing == without
    unused = np.isin(labels, without).sum()
    noun = "class" if len(without) == 1 else "classes"
    assert notes == ((f"{len(without)} {noun} had no holder; {unused} samples stayed unused",) if without else ())


def test_pfllib_pathological_gives_equal_shares_where_pfllib_has_nothing_to_draw_from():
    # 40 holders of 60 samples: the range [low, high) that PFLlib draws from, [1, 1), is empty.
    labels = labels_of(60, 60, 60, 6000)
    parts, _ = pathological(labels, 40, 1, None, classes_per_client=4, style="pfllib")
    counts = class_counts(labels, parts)
    assert (counts[:-1, :3] == 1).all()
    assert (counts[-1, :3] == 21).all()


# --- Rules that every kind keeps -------------------------------------------------------------------------------------

SHARE_ALL = [
    ("iid", {}),
    ("pathological", {"classes_per_client": 2}),
    ("pathological", {"classes_per_client": 1}),
    ("dirichlet", {"beta": 0.01}),
    ("dirichlet", {"beta": 1.0}),
    ("dirichlet", {"beta": 0.05, "style": "pfllib"}),
]
EQUAL_SIZES = [
    ("iid", {}),
    ("pathological", {"classes_per_client": 2}),
    ("dirichlet", {"beta": 0.05}),
    ("weak_pathological", {"s": 20.0}),
    ("weak_pathological", {"s": 0.0, "dominant_classes": 1}),
    ("weak_pathological", {"s": 100.0}),
]
OVERLAPPING = [
    ("pathological", {"classes_per_client": 2, "overlap": True}),
    ("weak_pathological", {"s": 20.0, "overlap": True}),
    ("weak_pathological", {"s": 100.0, "overlap": True}),
]
class_sizes = st.lists(st.integers(0, 60), min_size=3, max_size=8).filter(
    lambda sizes: sum(sizes) >= 6 and sizes[-1] and sum(size > 0 for size in sizes) >= 2
)


@pytest.mark.parametrize(("kind", "options"), SHARE_ALL)
@fixed
@given(sizes=class_sizes, seed=st.integers(0, 2**32 - 1), data=st.data())
def test_sharing_out_everything(kind, options, sizes, seed, data):
    labels = labels_of(*sizes)
    clients = data.draw(st.integers(1, len(labels) // 2))
    parts, notes = PARTITIONS[kind](labels, clients, seed, None, **options)
    classes = sum(size > 0 for size in sizes)
    covering = kind != "pathological" or clients * options["classes_per_client"] >= classes
    assert_well_formed(parts, len(labels), covering=covering)
    assert len(parts) == clients
    assert min(len(part) for part in parts) >= 2
    assert covering or "stayed unused" in notes[0]
    again = PARTITIONS[kind](labels, clients, seed, None, **options)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again.parts, strict=True))
    assert notes == again.notes


@pytest.mark.parametrize(("kind", "options"), EQUAL_SIZES)
@fixed
@given(sizes=class_sizes, seed=st.integers(0, 2**32 - 1), data=st.data())
def test_equal_sizes_up_to_the_last_sample(kind, options, sizes, seed, data):
    labels = labels_of(*sizes)
    clients = data.draw(st.integers(1, len(labels) // 2))
    size = data.draw(st.integers(2, len(labels) // clients))
    parts, notes = PARTITIONS[kind](labels, clients, seed, size, **options)
    assert [len(part) for part in parts] == [size] * clients
    assert_well_formed(parts, len(labels), covering=False)
    again = PARTITIONS[kind](labels, clients, seed, size, **options)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again.parts, strict=True))
    assert notes == again.notes


@pytest.mark.parametrize(("kind", "options"), OVERLAPPING)
@fixed
@given(sizes=class_sizes, seed=st.integers(0, 2**32 - 1), data=st.data())
def test_overlapping_clients_may_hold_all_samples_each(kind, options, sizes, seed, data):
    labels = labels_of(*sizes)
    clients = data.draw(st.integers(1, len(labels) // 2))
    size = data.draw(st.integers(2, len(labels)))
    parts, notes = PARTITIONS[kind](labels, clients, seed, size, **options)
    assert [len(part) for part in parts] == [size] * clients
    for part in parts:
        assert_well_formed([part], len(labels), covering=size == len(labels))
    again = PARTITIONS[kind](labels, clients, seed, size, **options)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again.parts, strict=True))
    assert notes == again.notes


@pytest.mark.parametrize(("kind", "options"), [*SHARE_ALL, ("pathological", {"style": "pfllib"})])
def test_the_seed_matters(kind, options):
    labels = labels_of(*[100] * 10)
    one, two = (PARTITIONS[kind](labels, 10, seed, None, **options).parts for seed in (1, 2))
    assert any(not np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(("kind", "options"), [*EQUAL_SIZES, *OVERLAPPING, ("weak_pathological", {"style": "fedpac"})])
def test_the_seed_matters_for_equal_sizes(kind, options):
    labels = labels_of(*[100] * 10)
    one, two = (PARTITIONS[kind](labels, 10, seed, 50, **options).parts for seed in (1, 2))
    assert any(not np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("kind", PARTITIONS)
def test_signatures_are_config_schemas(kind):
    parameters = list(inspect.signature(PARTITIONS[kind]).parameters.values())
    assert [p.name for p in parameters[:4]] == ["users" if kind == "natural" else "labels", "clients", "seed", "size"]
    for parameter in parameters[4:]:
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert (parameter.default is parameter.empty) == (parameter.name == "file")
        assert parameter.annotation is not parameter.empty


# --- natural ---------------------------------------------------------------------------------------------------------

USERS = labels_of(3, 1, 20, 0, 7, 2, 12)  # users 1 (one sample) and 3 (none) are never drawn


def owners(parts):
    assert all(len(set(USERS[part].tolist())) == 1 for part in parts)
    return [int(USERS[part[0]]) for part in parts]


@pytest.mark.parametrize("clients", [1, 3, 5])
def test_natural_clients_are_different_users_with_all_their_samples(clients):
    parts, notes = natural(USERS, clients, 4, None)
    assert notes == ("1 user of 6 with fewer than 2 samples to divide: left out",)
    assert_well_formed(parts, len(USERS), covering=False)
    assert owners(parts) == sorted(set(owners(parts)))
    for owner, part in zip(owners(parts), parts, strict=True):
        np.testing.assert_array_equal(part, np.flatnonzero(owner == USERS))
    assert clients < 5 or owners(parts) == [0, 2, 4, 5, 6]


def test_all_users_are_clients_whatever_they_have_if_so_many_are_asked_for():
    parts, notes = natural(USERS, 6, 4, None)
    assert (owners(parts), [len(part) for part in parts], notes) == ([0, 1, 2, 4, 5, 6], [3, 1, 20, 7, 2, 12], ())
    assert natural(USERS, 3, 4, 6).notes == ("3 users of 6 with fewer than 6 samples to divide: left out",)
    with pytest.raises(ConfigError, match=r"1 to 5, the number of users with 2 samples or more, .*; or that of all"):
        natural(USERS, 7, 4, None)


def test_natural_users_are_drawn_evenly_by_seed():
    drawn = [owners(natural(USERS, 2, seed, None).parts) for seed in range(400)]
    assert drawn[7] == owners(natural(USERS, 2, 7, None).parts)
    counts = np.bincount(np.ravel(drawn), minlength=7)
    np.testing.assert_array_equal(counts[[1, 3]], 0)
    assert np.abs(counts[[0, 2, 4, 5, 6]] - 160).max() < 5 * (400 * 0.4 * 0.6) ** 0.5


def test_natural_clients_of_equal_size_are_random_samples_of_users_who_have_as_many():
    one, two = (natural(USERS, 3, seed, 6).parts for seed in (0, 1))
    for parts in (one, two):
        assert_well_formed(parts, len(USERS), covering=False)
        assert [len(part) for part in parts] == [6] * 3
        assert owners(parts) == [2, 4, 6]
    assert any(not np.array_equal(a, b) for a, b in zip(one, two, strict=True))


# --- iid -------------------------------------------------------------------------------------------------------------


def test_iid_sizes_differ_by_at_most_one_and_classes_are_mixed():
    labels = np.repeat(np.arange(4, dtype=np.int32), 1000)
    parts = iid(labels, 7, 3, None).parts
    assert sorted(len(part) for part in parts) == [571] * 4 + [572] * 3
    # Hypergeometric: mean 143, standard deviation 9.6; five of them on either side.
    assert np.abs(class_counts(labels, parts) - 4000 / 7 / 4).max() < 48


# --- pathological ----------------------------------------------------------------------------------------------------


@fixed
@given(C=st.integers(2, 12), clients=st.integers(1, 30), seed=st.integers(0, 10**6), data=st.data())
def test_pathological_deals_classes_evenly_and_splits_them_evenly(C, clients, seed, data):
    c = data.draw(st.integers(1, C))
    labels = labels_of(*[100] * C)
    counts = class_counts(labels, pathological(labels, clients, seed, None, classes_per_client=c).parts)
    holders = (counts > 0).sum(axis=0)
    np.testing.assert_array_equal((counts > 0).sum(axis=1), c)
    assert set(holders) <= {clients * c // C, -(-clients * c // C)}
    for column in counts.T[holders > 0]:
        shares = column[column > 0]
        assert shares.sum() == 100
        assert np.ptp(shares) <= 1


def test_pathological_class_sets_are_random():
    labels = labels_of(*[200] * 10)
    sets = set()
    for seed in range(20):
        counts = class_counts(labels, pathological(labels, 20, seed, None).parts)
        sets |= {tuple(np.flatnonzero(row)) for row in counts}
    # 400 draws of 45 possible pairs: each is missing with probability (44/45)^400 = 1e-4 if they are uniform.
    assert len(sets) == 45
    # Also which classes get a holder at all, where there are fewer slots than classes.
    only = {np.flatnonzero(class_counts(labels, pathological(labels, 1, seed, None).parts)[0])[0] for seed in range(50)}
    assert len(only) >= 8


def test_pathological_gives_a_rare_class_no_more_holders_than_samples():
    labels = labels_of(3, 500, 500)
    counts = class_counts(labels, pathological(labels, 30, 0, None).parts)
    assert sorted(counts[:, 0])[-4:] == [0, 1, 1, 1]
    np.testing.assert_array_equal((counts > 0).sum(axis=1), 2)


def test_pathological_with_a_size_takes_equal_shares_of_each_class():
    labels = labels_of(*[600] * 10)
    parts, notes = pathological(labels, 20, 4, 90, classes_per_client=3)
    counts = class_counts(labels, parts)
    assert set(np.unique(counts)) == {0, 30}
    assert notes == ()


def test_pathological_with_a_size_spares_a_class_that_has_few_samples():
    # 10 clients x 2 classes x 50 samples; class 0 suffices for one holder only, so the others must hold the rest.
    labels = labels_of(60, 400, 400, 400)
    parts, notes = pathological(labels, 10, 0, 100)
    counts = class_counts(labels, parts)
    assert notes == ()
    assert (counts[:, 0] > 0).sum() == 1
    assert set(np.unique(counts)) == {0, 50}


def test_pathological_gives_even_a_class_too_small_for_a_client_one_holder():
    labels = labels_of(30, 400, 400, 400)
    parts, notes = pathological(labels, 10, 0, 100)
    counts = class_counts(labels, parts)
    assert sorted(counts[:, 0]) == [0] * 9 + [30]
    np.testing.assert_array_equal((counts > 0).sum(axis=1), 2)  # its gap of 20 is filled from its other class
    assert notes == (
        "1 class had fewer samples than asked for; 20 of 1000 samples were taken from other classes instead",
    )


def test_pathological_leaves_out_classes_without_a_holder_and_says_so():
    parts, notes = pathological(labels_of(*[30] * 10), 3, 0, None)
    assert sum(len(part) for part in parts) == 180
    assert notes == ("4 classes had no holder; 120 samples stayed unused",)


def test_pathological_clients_of_fedmate_draw_833_of_each_of_three_classes_independently():
    # 50,000 images, 20 clients, three classes each: 50,000 // 60 = 833 of each.
    labels = labels_of(*[5000] * 10)
    parts, notes = pathological(labels, 20, 0, 2499, classes_per_client=3, overlap=True)
    assert notes == ()
    counts = class_counts(labels, parts)
    assert set(np.unique(counts)) == {0, 833}
    np.testing.assert_array_equal((counts > 0).sum(axis=1), 3)
    np.testing.assert_array_equal((counts > 0).sum(axis=0), 6)
    # What two holders of a class share is hypergeometric: 833 drawn of 5,000, 833 of which the other has.
    mean, share = 833 * 833 / 5000, 833 / 5000
    deviation = math.sqrt(833 * share * (1 - share) * (5000 - 833) / 4999)
    shared = []
    for k in range(10):
        held = [set(part[labels[part] == k].tolist()) for part in parts]
        held = [rows for rows in held if rows]
        shared += [len(a & b) for at, a in enumerate(held) for b in held[at + 1 :]]
    assert len(shared) == 10 * 15
    assert np.abs(np.array(shared) - mean).max() < 6 * deviation
    assert abs(np.mean(shared) - mean) < 6 * deviation / math.sqrt(len(shared))


def test_pathological_overlapping_holders_of_a_class_that_is_too_small_all_take_it_whole():
    labels = labels_of(30, 100, 100, 100)
    parts, notes = pathological(labels, 10, 0, 100, overlap=True)
    counts = class_counts(labels, parts)
    assert sorted(counts[:, 0]) == [0] * 5 + [30] * 5  # 10 clients x 2 / 4 classes: five holders each
    np.testing.assert_array_equal((counts > 0).sum(axis=1), 2)  # gaps are filled from a client's other class
    assert notes == (
        "1 class had fewer samples than asked for; 100 of 1000 samples were taken from other classes instead",
    )


# --- dirichlet -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.1, 1.0, 20.0])
@pytest.mark.parametrize("size", [None, 300])
def test_dirichlet_shares_have_the_mean_and_variance_of_the_distribution(beta, size):
    # A component of a symmetric Dir(beta) over two outcomes is Beta(beta, beta): variance 1 / (4 (2 beta + 1)).
    if size is None:  # two clients share 2,000 classes
        labels = labels_of(*[400] * 2000)
        shares = class_counts(labels, dirichlet(labels, 2, 0, None, beta=beta).parts)[0] / 400
    else:  # 2,000 clients mix two classes, of which there are plenty
        labels = labels_of(420_000, 420_000)
        parts, notes = dirichlet(labels, 2000, 0, size, beta=beta)
        shares = class_counts(labels, parts)[:, 0] / size
        assert notes == ()
    variance = 1 / (4 * (2 * beta + 1))
    assert shares.mean() == pytest.approx(0.5, abs=5 * math.sqrt(variance / 2000))
    assert shares.var() == pytest.approx(variance, rel=0.15)


@pytest.mark.parametrize("size", [None, 50])
def test_dirichlet_with_a_thousand_clients_at_a_hundredth(size):
    labels = labels_of(*[6000] * 10)
    start = time.perf_counter()
    parts, notes = dirichlet(labels, 1000, 0, size, beta=0.01)
    assert time.perf_counter() - start < 5
    assert_well_formed(parts, 60_000, covering=size is None)
    assert min(len(part) for part in parts) >= 2
    assert bool(notes) == (size is None)
    if size is None:
        repaired = int(notes[0].removesuffix(" samples from the largest clients went to them").split(" ")[0])
        assert 300 < repaired <= sum(len(part) == 2 for part in parts)
    else:
        # Almost every client has one class only: the largest share of Dir(0.01) over 10 is above 0.9 mostly.
        assert np.median(class_counts(labels, parts).max(axis=1)) == size


@pytest.mark.parametrize("style", ["plain", "pfllib"])
@pytest.mark.parametrize("beta", [1e-300, 1e-6, 1e6])
def test_dirichlet_survives_extreme_concentrations(style, beta):
    labels = labels_of(*[400] * 5)
    parts, _ = dirichlet(labels, 10, 0, None, beta=beta, style=style)
    assert_well_formed(parts, 2000, covering=True)
    counts = class_counts(labels, parts)
    if beta == 1e6:
        assert np.abs(counts - 40).max() <= 1
    else:
        assert (counts > 300).sum() == 5  # each class has one owner, apart from what was repaired


def test_pfllib_dirichlet_survives_all_ways_in_which_small_draws_underflow():
    # NumPy's legacy sampler gives NaN where all gamma variates are 0, and inf where their sum is subnormal.
    labels = labels_of(*[20] * 5)
    for seed in (6, 7, 90):  # inf below the cap, two of them, and above the cap
        parts, _ = dirichlet(labels, 2, seed, None, beta=0.001, style="pfllib")
        assert_well_formed(parts, 100, covering=True)


def test_dirichlet_with_a_size_uses_up_scarce_classes_and_says_so():
    labels = labels_of(1000, 30, 1000)
    parts, notes = dirichlet(labels, 20, 0, 50, beta=0.1)
    counts = class_counts(labels, parts)
    assert counts[:, 1].sum() == 30
    assert [len(part) for part in parts] == [50] * 20
    assert len(notes) == 1
    assert notes[0].startswith("1 class had fewer samples than asked for; ")
    assert notes[0].endswith(" of 1000 samples were taken from other classes instead")


# --- weak pathological -----------------------------------------------------------------------------------------------


def test_weak_pathological_counts_of_fedecouple():
    # s = 20 of 600: 12 of each of 10 classes, and 480 / 3 = 160 more of each of three dominant classes.
    labels = labels_of(*[5000] * 10)
    parts, notes = weak_pathological(labels, 20, 0, 600, s=20.0)
    counts = class_counts(labels, parts)
    assert notes == ()
    assert set(np.unique(counts)) == {12, 172}
    np.testing.assert_array_equal((counts == 172).sum(axis=1), 3)
    np.testing.assert_array_equal((counts == 172).sum(axis=0), 6)  # 20 x 3 / 10: dealt evenly
    assert len({tuple(np.flatnonzero(row == 172)) for row in counts}) > 10


def test_weak_pathological_needs_no_sample_more_than_there_are_whatever_the_rounding_of_floats():
    # 5 classes have samples for one client and 5 for 19, whose quotients are 0.999... and 18.999... in floats.
    labels = labels_of(*[714] * 5, *[1686] * 5)
    parts, notes = weak_pathological(labels, 20, 0, 600, s=55.0, dominant_classes=5)
    assert notes == ()
    np.testing.assert_array_equal((class_counts(labels, parts) == 33 + 54).sum(axis=0), [1] * 5 + [19] * 5)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("s", "size", "uniform", "dominant"), [(50.0, 600, 30, 100), (20.0, 600, 12, 160), (0.0, 90, 0, 30)]
)
def test_weak_pathological_groups_of_fedpac(s, size, uniform, dominant, overlap):
    labels = labels_of(*[5000] * 10)
    parts, notes = weak_pathological(labels, 11, 0, size, s=s, style="fedpac", overlap=overlap)
    groups = [{0, 1, 2}, {2, 3, 4}, {4, 5, 6}, {6, 7, 8}, {8, 9, 0}]
    assert notes == ()
    for client, row in enumerate(class_counts(labels, parts)):
        assert row.tolist() == [uniform + dominant * (k in groups[client % 5]) for k in range(10)]
    times_held = np.bincount(np.concatenate(parts))
    assert (times_held.max() > 1) == overlap


def test_weak_pathological_groups_of_fedmate_are_ten_of_a_hundred_classes():
    # 580 = 100 uniform + 480 dominant ones, which is what its integer divisions leave of 600 at s = 20.
    labels = labels_of(*[500] * 100)
    parts, notes = weak_pathological(labels, 20, 0, 580, s=100 / 5.8, style="fedpac")
    assert notes == ()
    for client, row in enumerate(class_counts(labels, parts)):
        first = client % 10 * 10
        assert row.tolist() == [49 if first <= k < first + 10 else 1 for k in range(100)]


def test_weak_pathological_overlapping_clients_ask_no_class_for_more_than_it_has_at_one_client():
    # 8 of 20 clients hold each even class, which takes 8 x 240 + 20 x 18 = 2,280 of its 2,000 samples.
    labels = labels_of(*[2000] * 10)
    _, short = weak_pathological(labels, 20, 0, 900, style="fedpac")
    parts, notes = weak_pathological(labels, 20, 0, 900, style="fedpac", overlap=True)
    assert len(short) == 1
    assert notes == ()
    assert set(np.unique(class_counts(labels, parts))) == {18, 258}


@pytest.mark.parametrize(
    ("classes", "dominant"), [(2, 1), (3, 1), (9, 3), (10, 3), (20, 6), (21, 2), (62, 6), (100, 10)]
)
def test_weak_pathological_default_number_of_dominant_classes(classes, dominant):
    labels = labels_of(*[400] * classes)
    counts = class_counts(labels, weak_pathological(labels, 4, 0, 120, s=0.0).parts)
    np.testing.assert_array_equal((counts > 0).sum(axis=1), dominant)


def test_weak_pathological_rounds_equal_fractions_up_equally_often():
    # s = 5 of 40: 0.2 of each class and 38 more of the dominant one, so each is rounded up with probability 0.2.
    labels = labels_of(*[2000] * 10)
    counts = class_counts(labels, weak_pathological(labels, 300, 0, 40, s=5.0, dominant_classes=1).parts)
    assert set(np.unique(counts)) == {0, 1, 38, 39}
    rounded_up = (counts == 1) | (counts == 39)
    assert np.abs(rounded_up.mean(axis=0) - 0.2).max() < 5 * math.sqrt(0.16 / 300)
    assert abs((counts == 39).sum() / 300 - 0.2) < 5 * math.sqrt(0.16 / 300)


def test_weak_pathological_asks_no_class_for_more_than_it_has():
    # 10 clients x 100, s = 50: 5 uniform each and 50 for the dominant class. Class 0 has 50 + 120, enough for two.
    labels = labels_of(170, *[1000] * 9)
    for seed in range(5):
        parts, notes = weak_pathological(labels, 10, seed, 100, s=50.0, dominant_classes=1)
        assert notes == ()
        assert set(np.unique(class_counts(labels, parts))) == {5, 55}
    # 30 clients would have three each; now class 0, with 20 left, suffices for none of them.
    parts, notes = weak_pathological(labels, 30, 0, 100, s=50.0, dominant_classes=1)
    assert notes == ()
    assert (class_counts(labels, parts)[:, 0] == 5).all()


def test_weak_pathological_nearest_feasible_counts_where_a_class_runs_out():
    # fedpac, 10 clients x 100, s = 0: classes 0, 2, 4, 6, 8 are dominant for four clients each. 100 / 3 is 33 or 34.
    labels = labels_of(100, *[1000] * 9)
    parts, notes = weak_pathological(labels, 10, 0, 100, s=0.0, style="fedpac")
    counts = class_counts(labels, parts)
    assert counts[:, 0].sum() == 100  # all there is
    holders = [0, 4, 5, 9]
    assert np.ptp(counts[holders, 0]) <= 1  # cut evenly
    np.testing.assert_array_equal(counts.sum(axis=1), 100)
    # Gaps are filled from the clients' own classes, and clients who do not hold class 0 are left alone.
    groups = [{0, 1, 2}, {2, 3, 4}, {4, 5, 6}, {6, 7, 8}, {8, 9, 0}]
    for client, row in enumerate(counts):
        assert set(np.flatnonzero(row)) == groups[client % 5]
        if client not in holders:
            assert set(row[row > 0]) == {33, 34}
    # Class 0 was asked for 4 x 33 to 4 x 34 samples and has 100.
    replaced = int(notes[0].split("; ")[1].split(" ")[0])
    assert 32 <= replaced <= 36
    assert notes == (
        f"1 class had fewer samples than asked for; {replaced} of 1000 samples were taken from other classes instead",
    )


# --- repair ----------------------------------------------------------------------------------------------------------


def parts_of(*sizes):
    rows = np.random.default_rng(3).permutation(sum(sizes))
    return [np.sort(part) for part in np.split(rows, np.cumsum(sizes)[:-1])]


def test_repair_levels_the_largest_clients():
    before = parts_of(10, 1, 8, 0, 3)
    copy = [part.copy() for part in before]
    parts, notes = repair(before, 2, np.random.default_rng(0))
    sizes = [len(part) for part in parts]
    assert (sizes[1], sizes[3]) == (2, 2)
    assert sorted([sizes[0], sizes[2]]) == [7, 8]  # 10 -> 9 -> 8, and then one of two equals
    assert sizes[4] == 3
    assert notes == ("2 clients had fewer than 2 samples; 3 samples from the largest clients went to them",)
    assert_well_formed(parts, 22, covering=True)
    assert set(before[1]) < set(parts[1])  # nobody in need loses what it has
    assert all(np.array_equal(a, b) for a, b in zip(before, copy, strict=True))


def test_repair_moves_random_samples():
    gifts = {tuple(repair(parts_of(50, 0), 2, np.random.default_rng(seed)).parts[1]) for seed in range(20)}
    assert len(gifts) > 10


def test_repair_leaves_sound_parts_alone():
    before = parts_of(2, 5, 9)
    parts, notes = repair(before, 2, np.random.default_rng(0))
    assert notes == ()
    assert all(np.array_equal(a, b) for a, b in zip(before, parts, strict=True))


@fixed
@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=20), least=st.integers(1, 10))
def test_repair_reaches_the_floor_whenever_it_can(sizes, least):
    rng = np.random.default_rng(0)
    if sum(sizes) < least * len(sizes):
        with pytest.raises(ConfigError) as caught:
            repair(parts_of(*sizes), least, rng)
        assert (caught.value.field, caught.value.value) == ("data.clients", len(sizes))
        return
    parts = repair(parts_of(*sizes), least, rng).parts
    assert_well_formed(parts, sum(sizes), covering=True)
    after = [len(part) for part in parts]
    assert min(after) >= least
    level = max((b for a, b in zip(sizes, after, strict=True) if b < a), default=0)
    assert all(b <= level + 1 for b in after if level)  # no donor gave while another was larger by two


def test_repair_is_fast_for_thousands_of_clients():
    sizes = [0] * 9000 + [100] * 1000
    start = time.perf_counter()
    parts, _ = repair(parts_of(*sizes), 2, np.random.default_rng(0))
    assert time.perf_counter() - start < 3
    assert sorted({len(part) for part in parts}) == [2, 82]


# --- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "labels", "clients", "seed", "size", "options", "field"),
    [
        ("iid", TEN, 0, 0, None, {}, "data.clients"),
        ("iid", TEN, 101, 0, None, {}, "data.clients"),
        ("dirichlet", TEN[:0], 1, 0, None, {}, "data.clients"),
        ("iid", TEN, 2, 0, 101, {}, "data.samples_per_client"),
        ("dirichlet", TEN, 2, 0, 1, {}, "data.samples_per_client"),
        ("weak_pathological", TEN, 20, 0, 11, {}, "data.samples_per_client"),
        ("weak_pathological", TEN, 2, 0, None, {}, "data.samples_per_client"),
        ("dirichlet", TEN, 2, 0, 10, {"style": "pfllib"}, "data.partition.style"),
        ("pathological", TEN, 2, 0, 10, {"style": "pfllib"}, "data.partition.style"),
        ("pathological", TEN, 2, 0, None, {"classes_per_client": 11}, "data.partition.classes_per_client"),
        ("pathological", TEN, 2, 0, None, {"classes_per_client": 0}, "data.partition.classes_per_client"),
        (
            "pathological",
            TEN,
            5,
            0,
            None,
            {"classes_per_client": 11, "style": "pfllib"},
            "data.partition.classes_per_client",
        ),
        ("weak_pathological", TEN, 2, 0, 10, {"dominant_classes": 11}, "data.partition.dominant_classes"),
        ("weak_pathological", TEN, 2, 0, 10, {"dominant_classes": 0}, "data.partition.dominant_classes"),
        (
            "weak_pathological",
            TEN,
            2,
            0,
            10,
            {"dominant_classes": 2, "style": "fedpac"},
            "data.partition.dominant_classes",
        ),
        ("weak_pathological", TEN % 9, 2, 0, 10, {"style": "fedpac"}, "data.partition.style"),
        (
            "weak_pathological",
            labels_of(*[4] * 100),
            2,
            0,
            100,
            {"dominant_classes": 3, "style": "fedpac"},
            "data.partition.dominant_classes",
        ),
        ("weak_pathological", TEN, 20, 0, 201, {"overlap": True}, "data.samples_per_client"),
        ("pathological", TEN, 20, 0, 201, {"overlap": True}, "data.samples_per_client"),
        ("pathological", TEN, 2, 0, None, {"overlap": True}, "data.samples_per_client"),
        ("pathological", TEN, 2, 0, None, {"overlap": True, "style": "pfllib"}, "data.partition.overlap"),
        ("natural", USERS, 7, 0, None, {}, "data.clients"),
        ("natural", USERS, 6, 0, 2, {}, "data.clients"),
        ("natural", USERS, 0, 0, None, {}, "data.clients"),
        ("natural", USERS, 4, 0, 7, {}, "data.clients"),
        ("natural", USERS, 1, 0, 1, {}, "data.samples_per_client"),
    ],
)
def test_bad_requests_name_their_field(kind, labels, clients, seed, size, options, field):
    with pytest.raises(ConfigError) as caught:
        PARTITIONS[kind](labels, clients, seed, size, **options)
    assert caught.value.field == field
