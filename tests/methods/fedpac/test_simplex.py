"""Quadratic programs over the simplex, against the best of all supports, an exact solver, and the conditions."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import nnls

from fedjax_pfl.methods.fedpac.simplex import simplex_qp

LARGEST, MATRICES = 6, 12


def single(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


def best_on_the_simplex(q):
    """min a'Qa by stationary points on every support; a vertex of the solutions is the only one on its support."""
    scale, values = np.trace(q) / len(q) or 1.0, []
    for size in range(1, len(q) + 1):
        for support in map(list, itertools.combinations(range(len(q)), size)):
            part, ones = q[np.ix_(support, support)], np.ones((size, 1))
            system = np.block([[part / scale, ones], [ones.T, np.zeros((1, 1))]])
            a = np.linalg.lstsq(system, np.append(np.zeros(size), 1.0), rcond=None)[0][:size]
            if a.min() > -1e-9:
                a = np.maximum(a, 0) / np.maximum(a, 0).sum()
                values.append((a @ part @ a, support, a))
    value, support, a = min(values, key=lambda found: found[0])
    weights = np.zeros(len(q))
    weights[support] = a
    return value, weights


def full_rank(rng):
    return rng.normal(size=(LARGEST, LARGEST + 2)) + rng.integers(2)


def uneven_rows(rng):
    return full_rank(rng) * 10 ** rng.uniform(-3, 3, (LARGEST, 1))


# Kind -> the G of Q = GG', and how far above the optimum, relative to the mean diagonal, the result may be.
KINDS = {
    "full rank": (full_rank, 1e-6),
    "tiny": (lambda rng: 1e-6 * full_rank(rng), 1e-6),
    "huge": (lambda rng: 1e6 * full_rank(rng), 1e-6),
    "uneven rows": (uneven_rows, 1e-6),
    # In a valley of the objective the weights creep towards the best.
    "rank 3": (lambda rng: rng.normal(size=(LARGEST, 3)), 1e-3),
    "rank 1": (lambda rng: rng.normal(size=(LARGEST, 1)), 1e-5),
}
solve = jax.jit(jax.vmap(simplex_qp))


@pytest.mark.parametrize("m", range(1, LARGEST + 1))
@pytest.mark.parametrize("kind", KINDS)
def test_the_quadratic_program_is_solved_as_by_trying_all_supports(kind, m):
    draw, tolerance = KINDS[kind]
    rng = np.random.default_rng(m)
    factors = np.array([draw(rng) for _ in range(MATRICES)])
    q = (factors @ factors.transpose(0, 2, 1)).astype(np.float32)
    # What stands in the rows and columns of the absent must not matter.
    present = np.array([rng.permutation(LARGEST) < m for _ in range(MATRICES)])
    found = np.asarray(solve(jnp.asarray(q), jnp.asarray(present)), np.float64)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-6)
    assert (found >= 0).all()
    assert (found[~present] == 0).all()
    for matrix, here, a in zip(q.astype(np.float64), present, found, strict=True):
        matrix, a = matrix[np.ix_(here, here)], a[here]
        best, weights = best_on_the_simplex(matrix)
        scale = np.trace(matrix) / m
        assert -1e-6 <= (a @ matrix @ a - best) / scale <= tolerance
        if kind == "full rank":
            np.testing.assert_allclose(a, weights, atol=1e-5)


def test_a_matrix_of_zeros_weighs_all_present_the_same_and_nobody_gets_nothing():
    present = np.array([[1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]], bool)
    found = solve(jnp.zeros((3, LARGEST, LARGEST)), jnp.asarray(present))
    np.testing.assert_allclose(found, present / np.maximum(present.sum(axis=1, keepdims=True), 1), rtol=1e-6)
    full = single(np.broadcast_to(np.eye(LARGEST), (3, LARGEST, LARGEST)))
    assert not solve(full, jnp.zeros((3, LARGEST), bool)).any()


# With all that are wrong exchanged, the coordinates that may be positive come round again and again.
CIRCLING = [[45, 10, 8, 18, -4], [10, 30, 14, -15, 6], [8, 14, 21, -1, 17], [18, -15, -1, 26, -1], [-4, 6, 17, -1, 18]]


def test_where_exchanging_all_at_once_goes_round_in_circles_the_last_alone_is_exchanged():
    q, present = np.zeros((LARGEST, LARGEST)), np.arange(LARGEST) < 5
    q[:5, :5] = CIRCLING
    found = solve(*(jnp.asarray(np.broadcast_to(part, (3, *part.shape))) for part in (np.float32(q), present)))
    np.testing.assert_allclose(found[0, :5], best_on_the_simplex(q[:5, :5])[1], atol=1e-5)


def fedpacs(clients, beta, spread):
    """Q of four clients as FedPAC builds it: variances on the diagonal, and products of differences of class means."""
    rng = np.random.default_rng(1)
    samples = rng.integers(20, 600, clients)
    share = rng.dirichlet(np.full(10, beta), clients)
    means = np.maximum(rng.normal(size=(10, 32)) + spread * rng.normal(size=(clients, 10, 32)), 0)
    h = (share[:, :, None] * means).reshape(clients, -1)
    return np.array([np.diag(32 / samples) + (own - h) @ (own - h).T for own in h[:4]])


@pytest.mark.parametrize(("beta", "spread"), [(0.3, 0.2), (0.1, 0.05)])
def test_the_weights_of_a_hundred_clients_are_an_exact_solvers(beta, spread):
    """NNLS with a Cholesky factor is exact."""
    q, clients = fedpacs(100, beta, spread), 100
    found = jax.jit(jax.vmap(simplex_qp))(single(q), jnp.ones((4, clients), bool))
    for matrix, a in zip(q, np.asarray(found, np.float64), strict=True):
        factor = np.linalg.cholesky(matrix)
        x, _ = nnls(factor.T, np.linalg.solve(factor, np.ones(clients)), maxiter=100 * clients)
        assert 4 < np.count_nonzero(x) < clients / 2
        assert 0.5 * np.abs(a - x / x.sum()).sum() < 1e-5
        slope = matrix @ a
        assert slope.min() > (1 - 2e-5) * (a @ slope)


def test_steps_go_on_until_the_conditions_hold_and_no_longer():
    q, everyone = single(fedpacs(100, 0.1, 0.05)[0]), jnp.ones(100, bool)
    solve = jax.jit(simplex_qp, static_argnames=("most",))
    after = {most: np.asarray(solve(q, everyone, most=most)) for most in (0, 2, 30, 100)}
    for most, distance in ((0, 0.1), (2, 1e-3)):
        assert 0.5 * np.abs(after[most] - after[100]).sum() > distance
        assert after[most].sum() == pytest.approx(1, abs=1e-6)
    np.testing.assert_array_equal(after[30], after[100])


def test_the_weights_of_fifty_clients_meet_the_optimality_conditions():
    clients, q = 50, fedpacs(50, 0.3, 0.2)
    a = np.asarray(jax.jit(jax.vmap(simplex_qp))(single(q), jnp.ones((4, clients), bool)), np.float64)
    slope = np.einsum("ijk,ik->ij", q, a)
    level = np.sum(a * slope, axis=1, keepdims=True)
    # No weight where the slope is above the level, no slope below it.
    assert (slope / level - 1 > -1e-5).all()
    assert (np.abs(a * (slope / level - 1)) < 1e-5).all()
    assert ((a > 1e-3).sum(axis=1) > 5).all()
