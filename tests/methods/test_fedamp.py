"""FedAMP and HeurFedAMP against rounds in NumPy, and their limits."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.method import Cohort
from fedjax_pfl.methods.fedamp import Client, Server, fedamp
from fedjax_pfl.methods.heur_fedamp import heur_fedamp
from fedjax_pfl.methods.local import local
from tests.play import KEY, SOME, N, exchanged, play, update_of
from tests.reference import MLP, client, client_key, held, now, to_numpy, weighted_mean

ROUNDS = 4
AMP = {"alpha": 0.01, "sigma": 0.02, "lam": 0.8}
HEUR = {"self_weight": 0.3, "sigma": 4.0, "lam": 0.8}
FACTORIES = {"amp": (fedamp, AMP), "heur": (heur_fedamp, HEUR)}

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
both = pytest.mark.parametrize("name", FACTORIES)


def vector(w):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(w)])


def amp_weights(models, i, others, alpha, sigma, lam):
    """xi_ij, j by j."""
    xi = {}
    for j in others:
        distance = np.mean((vector(models[i]) - vector(models[j])) ** 2)
        xi[j] = alpha * np.exp(-distance / sigma) / sigma
    total = max(1.0, sum(xi.values()))
    return {j: weight / total for j, weight in xi.items()}


def heur_weights(models, i, others, self_weight, sigma, lam):
    own = vector(models[i])
    cosines = [own @ vector(models[j]) / np.linalg.norm(own) / np.linalg.norm(vector(models[j])) for j in others]
    scores = np.exp(sigma * np.array(cosines))
    return dict(zip(others, (1 - self_weight) * scores / scores.sum(), strict=True))


WEIGHTS = {"amp": amp_weights, "heur": heur_weights}


def mixture(name, models, known, i, **hyper):
    """u_i, and the weight of the other models in it."""
    xi = WEIGHTS[name](models, i, sorted(known - {i}), **{**FACTORIES[name][1], **hyper})
    given = sum(xi.values())
    return weighted_mean([models[i], *(models[j] for j in xi)], [1 - given, *xi.values()]), given


def test_rounds_are_numpys(model, trainer, federation):
    trainer = replace(trainer, lr_decay=0.9)
    method = fedamp(model, trainer, **AMP)
    start, end, cohorts = play(method, federation, who=SOME, rounds=ROUNDS, new=2)
    mlp, models, known = MLP(federation.x, federation.y), [to_numpy(client(start.state.clients, 0)).params] * N, set()
    post, masses = {}, []
    for t, cohort in enumerate(cohorts):
        mixed = {i: mixture("amp", models, known, i) for i in cohort}
        for i, (u, mass) in mixed.items():

            def gradient(w, rows, u=u):
                return jax.tree.map(lambda g, w, u: g + AMP["lam"] * (w - u), mlp.gradient(w, rows), w, u)

            rows, key = held(federation.train, i), client_key(KEY, t, i)
            models[i], _ = mlp.train(models[i], key, t, rows, trainer, gradient=gradient)
            post[i] = models[i]
            masses.append(mass)
        known |= set(cohort)
    assert all(0 < len(cohort) < N - 2 for cohort in cohorts)
    assert min(masses) == 0
    assert len({round(mass, 3) for mass in masses}) > 4
    for i in range(N):
        jax.tree.map(near, client(end.state.clients, i).params, models[i])
        jax.tree.map(near, client(end.state.server.models, i), models[i])
        if i in post:
            near([float(leaf[i]) for leaf in end.post.test], mlp.scores(post[i], held(federation.test, i)))
    np.testing.assert_array_equal(end.state.server.known, [i in known for i in range(N)])
    attention = np.mean([mixture("amp", models, known, i)[1] for i in known])
    near(method.diagnose(end.state.server)["attention"], attention, rtol=1e-3)


@pytest.fixture(scope="module")
def mixtures(model, trainer):
    """(name, models, known, hyperparameters) -> all u_i, and the attention, of models as rows of two leaves."""

    def mix(name, models, known, **hyper):
        factory, given = FACTORIES[name]
        method = factory(model, trainer, **{**given, **hyper})
        rows = {"kernel": jnp.asarray(models[:, :3]), "bias": jnp.asarray(models[:, 3:])}
        server, ids = Server(rows, jnp.asarray(known)), jnp.arange(len(models))
        cohort = Cohort(ids, jnp.ones(len(models)), len(models), len(models))
        # The server mixes what it was sent: of what the clients have it is told nothing.
        u = method.dispatch(now(KEY, 1), server, None, cohort)
        return np.concatenate([u["kernel"], u["bias"]], axis=1), float(method.diagnose(server)["attention"])

    return mix


def as_tree(row):
    return {"kernel": row[:3].astype(np.float64), "bias": row[3:].astype(np.float64)}


MODELS = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
ALL = np.ones(5, bool)


@pytest.mark.parametrize(("name", "hyper"), [("amp", {}), ("amp", {"alpha": 10.0}), ("heur", {})])
def test_mixtures_are_numpys(name, hyper, mixtures):
    """The weights of the others come to less than 1, and in the second case to more, before they are divided."""
    models, known = MODELS / 5, np.array([True, True, False, True, True])
    u, attention = mixtures(name, models, known, **hyper)
    trees = [as_tree(row) for row in models]
    expected, masses = zip(
        *(mixture(name, trees, set(np.flatnonzero(known)), i, **hyper) for i in range(5)), strict=True
    )
    near(u, [np.concatenate([w["kernel"], w["bias"]]) for w in expected])
    assert attention == pytest.approx(np.mean(np.array(masses)[known]), rel=1e-4)
    assert (attention > 0.999) == (hyper != {})
    assert np.ptp(masses) > 0 or name == "heur" or hyper


@both
def test_models_that_are_all_alike_are_their_own_mixture(name, mixtures):
    alike = np.repeat(MODELS[:1], 5, axis=0)
    u, attention = mixtures(name, alike, ALL)
    np.testing.assert_allclose(u, alike, rtol=1e-6)
    assert attention > 0.6


@both
def test_who_has_not_taken_part_is_in_nobodys_mixture(name, mixtures):
    known = np.array([True, False, True, True, False])
    moved = MODELS.copy()
    moved[~known] += 5
    found, attention = mixtures(name, MODELS / 20, known)
    others, _ = mixtures(name, moved / 20, known)
    np.testing.assert_allclose(found[known], others[known], rtol=1e-5)
    assert attention > 0.1
    alone, attention = mixtures(name, MODELS, np.zeros(5, bool))
    np.testing.assert_array_equal(alone, MODELS)
    assert attention == 0


def test_only_who_has_trained_becomes_known(model, trainer):
    """Client 5 has no samples, and the last row is nobody's."""
    method, rows = fedamp(model, trainer), {"kernel": jnp.asarray(MODELS[:3])}
    server = Server({"kernel": jnp.zeros((N, 4))}, jnp.zeros(N, bool))
    cohort = Cohort(jnp.array([2, 5, N]), jnp.array([4.0, 0.0, 0.0]), N, N)
    after, _ = method.aggregate(now(KEY, 0), server, Client(rows, rows), rows, cohort)
    assert np.flatnonzero(after.known).tolist() == [2]
    np.testing.assert_array_equal(after.models["kernel"][2], MODELS[0])


def test_a_model_that_has_diverged_is_in_nobodys_mixture(model, trainer):
    method, everyone = fedamp(model, trainer, **AMP), Cohort(jnp.arange(5), jnp.ones(5), 5, 5)
    server = Server({"kernel": jnp.zeros((5, 4))}, jnp.zeros(5, bool))
    for broken in (np.nan, np.inf):
        rows = {"kernel": jnp.asarray(MODELS / 20).at[1, 2].set(broken)}
        after, _ = method.aggregate(now(KEY, 0), server, Client(rows, rows), rows, everyone)
        u = method.dispatch(now(KEY, 1), after, None, everyone)
        assert np.flatnonzero(~after.known).tolist() == [1]
        without = Server(jax.tree.map(lambda leaf: leaf.at[1].set(9.0), rows), after.known)
        expected = method.dispatch(now(KEY, 1), without, None, everyone)
        for i in (0, 2, 3, 4):
            near(u["kernel"][i], expected["kernel"][i])
        assert np.isfinite(method.diagnose(after)["attention"])


def test_models_far_apart_are_left_alone_and_near_ones_count_alike(mixtures):
    far, attention = mixtures("amp", MODELS, ALL, sigma=1e-3)
    near(far, MODELS)
    assert attention < 1e-6
    alike, attention = mixtures("amp", MODELS, ALL, alpha=1e3, sigma=1e6)
    near(alike, MODELS + 1e-3 * (MODELS.sum(0) - 5 * MODELS))
    assert attention == pytest.approx(4e-3, rel=1e-3)


def test_a_running_statistic_is_mixed_but_not_compared(model, trainer):
    rows = {"kernel": jnp.asarray(MODELS / 10), "norm": {"running_mean": jnp.asarray(MODELS) * 100}}
    ids = jnp.arange(5)
    cohort, server = Cohort(ids, jnp.ones(5), 5, 5), Server(rows, jnp.asarray(ALL))
    u = fedamp(model, trainer, **AMP).dispatch(now(KEY, 1), server, None, cohort)
    near(u["norm"]["running_mean"], 1000 * u["kernel"], atol=1e-3)
    assert not np.allclose(u["kernel"], rows["kernel"], atol=1e-3)


def test_without_the_pull_it_is_local_bit_for_bit(model, trainer, federation):
    expected = update_of(local(model, trainer), federation, 2)
    for factory, off in ((fedamp, {"alpha": 0.0}), (heur_fedamp, {"lam": 0.0})):
        found = update_of(factory(model, trainer, **off), federation, 2)
        jax.tree.map(np.testing.assert_array_equal, (found.client.params, found.info), (expected.client, expected.info))


@pytest.fixture(scope="module")
def trained(model, trainer, federation):
    """factory -> a function of a hyperparameter and u_i: the head that client 2 makes of the initial model."""

    def of(factory, name):
        @jax.jit
        def head(value, inbox):
            method = factory(model, trainer, **{name: value})
            data = client_data(federation.x, federation.y, client(federation.train, 2))
            return method.local(now(KEY, 0), (), Client(model.init(KEY), inbox), data).upload["head"]["kernel"]

        return head

    return of


def test_both_pull_alike(model, trained):
    here = model.init(KEY)
    elsewhere = jax.tree.map(lambda leaf: leaf + 3, here)
    amp, heur = trained(fedamp, "alpha"), trained(heur_fedamp, "lam")
    still, drawn = amp(jnp.array(0.1), here), amp(jnp.array(0.1), elsewhere)
    assert np.abs(drawn - still).max() > 0.1
    near(heur(jnp.array(0.1), elsewhere), drawn)


@both
def test_one_model_goes_down_and_one_comes_back(name, model, trainer, federation):
    parameters = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, KEY)))
    factory, hyper = FACTORIES[name]
    assert exchanged(factory(model, trainer, **hyper), federation) == (parameters, parameters, 2 * parameters)
