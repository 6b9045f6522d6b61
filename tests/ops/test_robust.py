"""Trimmed means and Krum against SciPy and plain loops, with absent and with senseless rows."""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from scipy.stats import trim_mean

from fedjax_pfl import Config, ConfigError
from fedjax_pfl.experiment.build import DataShape, make_engine
from fedjax_pfl.method import Cohort, Round
from fedjax_pfl.ops.robust import RULES, krum, multi_krum, trimmed_mean
from tests.reference import at

RNG = np.random.default_rng(4)
ROWS = 9
STACKED = {"w": RNG.normal(size=(ROWS, 3, 2)), "b": [RNG.normal(size=ROWS)]}
# From everybody to nobody.
PRESENT = [np.argsort(RNG.normal(size=ROWS)) < n for n in (9, 8, 7, 6, 5, 4, 3, 2, 1, 0)]


def single(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


@cache
def compiled(rule, options):
    return jax.jit(partial(rule, **dict(options)))


def called(rule, stacked, present, **options):
    """What a rule makes of the uploads of those present, whose weights it must not see, and zeros of the others."""
    uploads = jax.tree.map(lambda leaf: np.where(present.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, 0.0), stacked)
    weight = np.where(present, np.arange(1, len(present) + 1), 0)
    return compiled(rule, tuple(options.items()))(single(uploads), jnp.asarray(weight, jnp.float32))


def near(tree, expected, rtol=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), tree, expected)


def zeros(stacked):
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape[1:]), stacked)


@pytest.mark.parametrize("trim", [0.0, 0.2, 0.25, 0.45])
@pytest.mark.parametrize("present", PRESENT, ids=lambda present: f"{present.sum()} present")
def test_the_trimmed_mean_is_scipys_over_the_rows_present(trim, present):
    found = called(trimmed_mean, STACKED, present, trim=trim)
    if not present.any():
        return near(found, zeros(STACKED))
    return near(found, jax.tree.map(lambda leaf: trim_mean(leaf[present], trim, axis=0), STACKED))


def test_shares_are_cut_as_they_are_in_decimals():
    """29 of 100 on each side leave 42: in binary, 0.29 * 100 is less than 29."""
    values = np.arange(100.0) ** 2
    found = called(trimmed_mean, values, np.ones(100, bool), trim=0.29)
    assert float(found) == pytest.approx(np.mean(values[29:71]), rel=1e-6)


def rows_of(stacked):
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(stacked)], axis=1)


def best_by_loops(rows, f, m):
    """The m rows with the best scores, and those that tie with the last of them."""
    n = len(rows)
    scores = []
    for i in range(n):
        others = sorted(np.sum((rows[i] - rows[j]) ** 2) for j in range(n) if j != i)
        scores.append(sum(others[: max(1, n - f - 2)]))
    order = np.argsort(scores, kind="stable")
    last = scores[order[m - 1]]
    return [i for i in range(n) if scores[i] <= last + 1e-12]


@pytest.mark.parametrize("byzantine", [0.0, 0.2, 0.3, 0.49])
@pytest.mark.parametrize("present", PRESENT, ids=lambda present: f"{present.sum()} present")
@pytest.mark.parametrize("rule", [krum, multi_krum])
def test_krum_chooses_as_loops_do_among_the_rows_present(rule, present, byzantine):
    found, n = called(rule, STACKED, present, byzantine=byzantine), int(present.sum())
    if n == 0:
        return near(found, zeros(STACKED))
    f = int(byzantine * n + 1e-9)
    ours = jax.tree.map(lambda leaf: leaf[present], STACKED)
    chosen = best_by_loops(rows_of(ours), f, 1 if rule is krum else n - f)
    if n > f + 3:  # more than one neighbour: no two rows have the same score
        assert len(chosen) == (1 if rule is krum else n - f)
    return near(found, jax.tree.map(lambda leaf: leaf[chosen].mean(axis=0), ours))


def test_two_rows_that_are_each_others_neighbour_are_averaged_in_whatever_order():
    rows = {"w": np.array([[5.0, 1], [0, 0], [1, 1]])}
    for order in itertools.permutations(range(3)):
        near(called(krum, {"w": rows["w"][list(order)]}, np.ones(3, bool), byzantine=0.0), {"w": np.array([0.5, 0.5])})


def test_distances_are_not_lost_beside_what_all_rows_have_in_common():
    """Parameters are longer than the differences between them, and one row may be longer by far."""
    rng = np.random.default_rng(8)
    rows = 30 + 1e-3 * rng.normal(size=(7, 400))
    rows[3] = 1e6
    exact = rows.astype(np.float32).astype(np.float64)
    for byzantine in (0.15, 0.3):
        f = int(byzantine * 7)
        found = called(multi_krum, {"w": rows}, np.ones(7, bool), byzantine=byzantine)
        chosen = best_by_loops(exact, f, 7 - f)
        assert len(chosen) == 7 - f
        assert 3 not in chosen
        np.testing.assert_allclose(found["w"], exact[chosen].mean(axis=0), rtol=1e-6)


@pytest.mark.parametrize("rule", [krum, multi_krum])
def test_running_statistics_do_not_count_in_a_distance(rule):
    """Nobody lies about them: an attacker with common ones would be nearer to all than honest clients are."""
    rng = np.random.default_rng(9)
    w, variance = 1e-2 * rng.normal(size=(6, 20)), 10 * rng.random((6, 20))
    w[2], variance[2] = 1.0, np.median(variance, axis=0)
    found = called(rule, {"w": w, "norm": {"running_var": variance}}, np.ones(6, bool), byzantine=0.17)
    chosen = best_by_loops(w.astype(np.float32), 1, 1 if rule is krum else 5)
    assert 2 not in chosen
    near(found, {"w": w[chosen].mean(axis=0), "norm": {"running_var": variance[chosen].mean(axis=0)}})


@pytest.mark.parametrize("nonsense", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "krum", "multi_krum"])
def test_a_few_senseless_rows_do_no_harm(rule, nonsense):
    """As many as the rule is told of, beside absent ones; a mean would be theirs."""
    present = np.array([1, 1, 1, 0, 1, 1, 1, 1, 1], bool)
    spoilt = jax.tree.map(np.copy, STACKED)
    for leaf in jax.tree.leaves(spoilt):
        leaf[[0, 7]] = nonsense
    options = {"trimmed_mean": {"trim": 0.25}, "median": {}}.get(rule, {"byzantine": 0.25})
    found = called(RULES[rule], spoilt, present, **options)
    for leaf, honest in zip(jax.tree.leaves(found), jax.tree.leaves(STACKED), strict=True):
        honest = honest[[1, 2, 4, 5, 6, 8]]
        assert (leaf >= honest.min(axis=0)).all()
        assert (leaf <= honest.max(axis=0)).all()


@pytest.mark.parametrize("rule", [krum, multi_krum])
def test_a_row_that_is_no_number_is_not_chosen_even_where_it_is_one_of_two(rule):
    for first in (1.0, np.nan):  # where all are no number, what comes out is none either
        rows = {"w": np.array([[first, 2.0], [np.nan, 3.0]])}
        found = called(rule, rows, np.ones(2, bool))["w"]
        np.testing.assert_array_equal(found, [1.0, 2.0] if first == 1.0 else [np.nan, 2.5])


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_the_rows_does_not_matter(rule):
    present, order = PRESENT[2], RNG.permutation(ROWS)
    weight = np.where(present, 5.0, 0.0).astype(np.float32)
    found, turned = (
        compiled(RULES[rule], ())(single(jax.tree.map(lambda leaf, o=o: leaf[o], STACKED)), jnp.asarray(weight[o]))
        for o in (np.arange(ROWS), order)
    )
    near(found, turned, 1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_several_runs_side_by_side_are_each_what_they_are_alone(rule):
    weight = jnp.asarray(PRESENT[:4], jnp.float32)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf, 3 * leaf, leaf**2]), single(STACKED))
    found = jax.jit(jax.vmap(RULES[rule]))(stacked, weight)
    for i in range(4):
        alone = RULES[rule](jax.tree.map(lambda leaf, i=i: leaf[i], stacked), weight[i])
        near(jax.tree.map(lambda leaf, i=i: leaf[i], found), alone, 1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_rows_that_are_split_over_devices_give_the_same_without_loops_or_conditions(rule, mesh):
    """Devices must not exchange anything inside of these (see test_conformance.py); here there are none."""
    split = NamedSharding(mesh, PartitionSpec("clients"))
    present = np.append(PRESENT[2], False)
    stacked = single(jax.tree.map(lambda leaf: np.concatenate([leaf, leaf[:1]]), STACKED))
    weight = jnp.asarray(present, jnp.float32)
    program = jax.jit(RULES[rule], in_shardings=split).lower(stacked, weight).compile()
    near(program(*jax.device_put((stacked, weight), split)), compiled(RULES[rule], ())(stacked, weight))
    text = program.as_text()
    assert " all-" in text
    assert " while(" not in text
    assert " conditional(" not in text


@pytest.mark.parametrize(
    ("aggregation", "rule"),
    [
        ({"rule": "trimmed_mean"}, trimmed_mean),
        ({"rule": "trimmed_mean", "trim": 0.4}, partial(trimmed_mean, trim=0.4)),
        ({"rule": "krum", "byzantine": 0.4}, partial(krum, byzantine=0.4)),
        ({"rule": "multi_krum", "byzantine": 0.4}, partial(multi_krum, byzantine=0.4)),
    ],
)
def test_a_config_names_rule_and_options(aggregation, rule):
    tables = {"data": {"source": "digits", "clients": 5}, "model": {"name": "mlp", "hidden": 2}}
    config = Config(**tables, method={"name": "fedavg"}, aggregation=aggregation)
    method = make_engine(config, DataShape("digits", (1, 1, 1), 2, None)).method
    shapes, _ = jax.eval_shape(lambda key: method.init(key, 5), jax.random.key(0))
    uploads = jax.tree.map(lambda leaf: jnp.asarray(RNG.normal(size=(5, *leaf.shape)), jnp.float32), shapes)
    cohort = Cohort(jnp.arange(5), jnp.arange(1.0, 6.0), 5, 5)
    now = Round(jax.random.key(1), at(0))
    found = jax.jit(lambda uploads: method.aggregate(now, None, (), uploads, cohort)[0])(uploads)
    near(found, jax.jit(rule)(uploads, cohort.weight), 1e-6)


@pytest.mark.parametrize("rule", [krum, multi_krum])
def test_rows_without_numbers_count_for_f_but_are_not_chosen(rule):
    """Four of eight rows diverge; of the others, f = floor(0.3 8) = 2 may be malicious still, and one is."""
    present, byzantine, f = PRESENT[1], 0.3, 2
    half = np.flatnonzero(present)[::2]
    spoilt = jax.tree.map(np.copy, STACKED)
    for leaf in jax.tree.leaves(spoilt):
        leaf[half] = np.nan
    others = np.setdiff1d(np.flatnonzero(present), half)
    spoilt["w"][others[1]] += 1000.0
    ours = jax.tree.map(lambda leaf: leaf[others], spoilt)
    chosen = best_by_loops(rows_of(ours), f, 1 if rule is krum else len(others) - f)
    assert len(others) == len(half) == 4
    assert 1 not in chosen
    near(called(rule, spoilt, present, byzantine=byzantine), jax.tree.map(lambda leaf: leaf[chosen].mean(axis=0), ours))


@pytest.mark.parametrize(
    ("ratio", "aggregation", "field", "allowed"),
    [
        (0.5, {"rule": "trimmed_mean"}, "aggregation.trim", "at least 1/4: the part of 4 participants per round"),
        ([0.1, 0.5], {"rule": "multi_krum"}, "aggregation.byzantine", "at least 1/4"),
        (1.0, {"rule": "multi_krum", "byzantine": 0.12}, "aggregation.byzantine", "at least 1/8"),
        (0.25, {"rule": "trimmed_mean", "trim": 0.49}, "aggregation.trim", 'aggregation.rule = "median"'),
        (0.01, {"rule": "trimmed_mean"}, "aggregation.trim", "the part of 1 participant per round"),
        (0.5, {"rule": "trimmed_mean", "trim": 0.25}, None, None),
        (0.5, {"rule": "trimmed_mean", "trim": 0.0}, None, None),
        (0.5, {"rule": "krum"}, None, None),
    ],
)
def test_a_rule_that_would_leave_out_nobody_is_refused(ratio, aggregation, field, allowed):
    tables = {"data": {"source": "digits", "clients": 8}, "model": {"name": "mlp", "hidden": 2}}
    participation = {"ratio": ratio}
    config = Config(**tables, method={"name": "fedavg"}, aggregation=aggregation, participation=participation)
    data = DataShape("digits", (1, 1, 1), 2, None)
    if field is None:
        make_engine(config, data)
        return
    with pytest.raises(ConfigError, match=allowed) as raised:
        make_engine(config, data)
    assert raised.value.field == field
