"""Differential privacy of a run: which methods it works for, and the epsilon after all rounds."""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from fedjax_pfl.engine.traffic import Exchange
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.config import HONEST, Config
from fedjax_pfl.method import Cohort, Method, Round
from fedjax_pfl.models.norm import is_statistic


def without_privacy(config: Config) -> Config:
    """The same config without compression, attacks and privacy."""
    plain = {f"privacy.{field}": None for field in ("clip", "noise", "delta")}
    return config.replace({**plain, **HONEST, "compression.kind": "none", "compression.share": None})


def check_accountant(config: Config) -> None:
    """Checks that the epsilon of a run can be computed.

    Raises:
      ConfigError: the library that computes it is not installed.
    """
    if config.privacy.noise:
        try:
            import dp_accounting  # noqa: F401  # only whether it can be
        except ImportError:
            allowed = '0, or install what computes epsilon: pip install "fedjax_pfl[dp]"'
            raise ConfigError("privacy.noise", config.privacy.noise, allowed) from None


def check_privacy(config: Config, method: Method, exchange: Exchange) -> None:
    """Checks that a method can be private.

    Args:
      config: the run.
      method: the method, without attacks, compression and privacy.
      exchange: shapes of what its clients and server exchange.

    Raises:
      ConfigError: the method's server learns more than an average of updates, or the model has running statistics.
    """
    name = config.method["name"]
    if (why := _why_not(method, exchange, config.data.clients)) is not None:
        allowed = "with privacy.clip, a method that sends back what it got to a server that does nothing but average it"
        raise ConfigError("method.name", name, f"{allowed}, such as fedavg, ditto, fedper or fedrep: {why}")
    if any(is_statistic(path) for path, _ in jax.tree.leaves_with_path(exchange.view)):
        allowed = "one without running statistics with privacy.clip: noise could make a variance negative"
        raise ConfigError("model.name", config.model["name"], allowed)


def _why_not(method: Method, exchange: Exchange, clients: int) -> str | None:
    """The reason why `private` does not work for this method, or None."""
    occasions = {"setup": method.setup, "dispatch": method.dispatch, "calibrate": method.calibrate}
    others = [name for name, given in occasions.items() if given is not None]
    if others or hasattr(exchange.client, "inbox"):
        return "its clients and server tell each other more in a round, or before the first"
    if not exchange.comes_back or method.sends_change:
        return "its uploads are not the received model after training"
    if not _averages(method, clients):
        return "its server uses uploads otherwise than by their mean"
    return None


def _averages(method: Method, clients: int) -> bool:
    """Whether uploads change the server like their mean alone, weighted or not, and leave the clients unchanged."""
    rng = np.random.default_rng(0)

    def filled(tree: PyTree, *rows: int) -> Any:
        def leaf(shape: Any) -> Any:
            full = rng.uniform(0.5, 1.5, (*rows, *shape.shape)) if shape.dtype == jnp.float32 else 0
            return jnp.full((*rows, *shape.shape), full, shape.dtype)

        return jax.tree.map(leaf, tree)

    # Three: weights that depend on how alike uploads are would be the same for both of two.
    weights = jnp.array([1.0, 3.0, 2.0])
    clients = max(clients, len(weights))
    server, client = jax.eval_shape(lambda key: method.init(key, clients), jax.random.key(0))
    server, kept = filled(server), filled(client, len(weights))
    uploads = filled(method.broadcast(server), len(weights))
    now = Round(jax.random.key(0), jnp.array(1, jnp.int32))
    cohort = Cohort(jnp.arange(len(weights)), weights, clients, clients)
    found = method.aggregate(now, server, kept, uploads, cohort)

    def of_mean(weights: Array) -> PyTree:
        one = jax.tree.map(lambda leaf: jnp.average(leaf, axis=0, weights=weights)[None], uploads)
        nobody = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[:1]), kept)
        return method.aggregate(now, server, nobody, one, Cohort(jnp.arange(1), jnp.ones((1,)), clients, clients))[0]

    def same(a: PyTree, b: PyTree) -> bool:
        return all(jax.tree.leaves(jax.tree.map(lambda a, b: np.allclose(a, b, rtol=1e-4, atol=1e-5), a, b)))

    means = (of_mean(weights), of_mean(jnp.ones_like(weights)))
    return any(same(found[0], mean) for mean in means) and same(found[1], kept)


def spent(config: Config, rounds: int) -> dict[str, Any]:
    """The entry of a run's summary on privacy, which protects the presence of all data of one client.

    Epsilon holds for the models of one run, if its noise were exact and secret. Runs with the same seed have the same
    noise, so that two of them can reveal more than one does. To choose a model, or a number of rounds, by scores also
    reveals something of these scores.

    Args:
      config: of the run.
      rounds: how many it has had; fewer than in the config if it was stopped.

    Returns:
      ``epsilon`` at ``delta`` after these rounds, None if there is no bound (``noise`` 0); ``noise`` and ``clip``;
      ``adjacency``: two federations are neighbours if they are equal, except that one client of the first has no data
      in the second.
    """
    privacy, ratio = config.privacy, config.participation.ratio
    assert isinstance(ratio, float)
    bound = epsilon(privacy.noise, ratio, rounds, privacy.target_delta) if privacy.noise else None
    return {
        "epsilon": bound,
        "delta": privacy.target_delta,
        "noise": privacy.noise,
        "clip": privacy.clip,
        "adjacency": "replace_special",
    }


@functools.cache
def epsilon(noise: float, ratio: float, rounds: int, delta: float) -> float:
    """An upper bound on epsilon for Gaussian mechanisms on Poisson samples, one per round, by Renyi divergences.

    Args:
      noise: z, standard deviation divided by sensitivity.
      ratio: the probability with which a client is selected. Drop-outs can only lower it.
      rounds: number of rounds.
      delta: the delta of (epsilon, delta).

    Reference:
      I. Mironov, K. Talwar, L. Zhang. Renyi Differential Privacy of the Sampled Gaussian Mechanism. arXiv:1908.10530.
    """
    import dp_accounting
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of orders that it leaves out, which loosens the bound at most
    try:
        accountant.compose(dp_accounting.PoissonSampledDpEvent(ratio, dp_accounting.GaussianDpEvent(noise)), rounds)
        return float(accountant.get_epsilon(delta))
    finally:
        log.setLevel(level)
