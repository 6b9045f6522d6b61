"""How FedPA's server trains the generator: hard features, which the clients' heads still know."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int, Key, PyTree

from fedjax_pfl.method import Round
from fedjax_pfl.methods.fedpa.generator import Generator, diversity
from fedjax_pfl.models.base import Mask, Model, Params
from fedjax_pfl.models.norm import is_statistic
from fedjax_pfl.ops.losses import cross_entropies
from fedjax_pfl.ops.prototypes import Prototypes, centre_loss
from fedjax_pfl.ops.training import Scalar, phase_key

WEIGHT_DECAY, LR_DECAY = 1e-2, 0.98  # of its optimiser, per step and per round (public code)


class Trained(NamedTuple):
    """The generator's parameters, running statistics among them, and the state of its optimiser."""

    params: Params
    optimizer: PyTree


class Evidence(NamedTuple):
    """What the server trains its generator on.

    Attributes:
      heads: phi_i of K clients; every leaf has K rows.
      counts: samples of each class that these have trained on in this round, [K, C]; zeros for one that was absent.
      prototypes: P, of the last round.
    """

    heads: Params
    counts: Float[Array, "K C"]
    prototypes: Prototypes


@dataclass(frozen=True)
class GeneratorTraining:
    """Trains the generator to make features that the clients' heads know, far from prototypes and from each other.

    Attributes:
      model: its heads classify features.
      network: the generator.
      noise: d_e, numbers in [0, 1) that a feature is made of.
      steps: Adam's steps in a round.
      batch_size: features per step.
      lr: of Adam in round 0.
      repulsion: weight of the distance to the prototypes.
    """

    model: Model
    network: Generator
    noise: int
    steps: int
    batch_size: int
    lr: Scalar
    repulsion: Scalar

    def init(self, key: Key[Array, ""]) -> Trained:
        """The generator before round 0."""
        y = jnp.zeros((1,), jnp.int32)
        params = self.network.init(key, self.draw(key, y), y)["params"]
        return Trained(params, self._adam(jnp.zeros((), jnp.int32), params).init(params))

    def draw(self, key: Key[Array, ""], y: Int[Array, " batch"]) -> Float[Array, "batch noise"]:
        """The noise of features of these labels."""
        return jax.random.uniform(key, (len(y), self.noise))

    def generate(
        self, params: Params, noise: Float[Array, "batch noise"], y: Int[Array, " batch"], mask: Mask = None
    ) -> Float[Array, "batch K"]:
        """Features of these labels."""
        z: Any = self.network.apply({"params": params}, noise, y, mask)
        return z

    def __call__(self, now: Round, trained: Trained, evidence: Evidence, fidelity: Scalar) -> Trained:
        """The generator after the steps of a round; ``fidelity`` is a_t, the weight of the heads' losses."""
        heads, counts, prototypes = evidence
        # Each participant counts as if it had one more sample of each class, so as to have some weight in all.
        smoothed = jnp.where(jnp.any(counts > 0, axis=1, keepdims=True), counts + 1.0, 0.0)
        class_weights = smoothed / jnp.maximum(jnp.sum(smoothed, axis=0), 1.0)
        class_logits = jnp.where(jnp.any(counts > 0, axis=0), 0.0, -jnp.inf)
        everything = jnp.ones(self.batch_size)

        def loss(params: Params, noise: Float[Array, "batch noise"], y: Int[Array, " batch"]) -> Float[Array, ""]:
            z = self.generate(params, noise, y, everything)
            of_clients = jax.vmap(lambda phi: cross_entropies(self.model.classify(phi, z), y))(heads)
            known = jnp.sum(jnp.mean(class_weights[:, y] * of_clients, axis=1))
            hard = centre_loss(z, y, everything, prototypes)
            return fidelity * known - self.repulsion * hard + diversity(noise, z, y)

        optimizer = self._adam(now.t, trained.params)

        def step(number: Int[Array, ""], trained: Trained) -> Trained:
            key_y, key_noise = jax.random.split(jax.random.fold_in(phase_key(now.key, "generator"), number))
            y = jax.random.categorical(key_y, class_logits, shape=(self.batch_size,))
            gradient = jax.grad(loss)(trained.params, self.draw(key_noise, y), y)
            with jax.numpy_dtype_promotion("standard"):  # Adam raises a float to the power of an integer
                updates, state = optimizer.update(gradient, trained.optimizer, trained.params)
            return Trained(optax.apply_updates(trained.params, updates), state)

        taught = lax.fori_loop(0, self.steps, step, trained)
        # Where nobody took a step there is no class to draw, and the generator stays as it is.
        return jax.tree.map(partial(jnp.where, jnp.any(counts > 0)), taught, trained)

    def _adam(self, t: Int[Array, ""], params: Params) -> optax.GradientTransformation:
        """PyTorch's Adam: weight decay is part of the gradient; running statistics take their update as it is."""
        rate = self.lr * LR_DECAY ** t.astype(jnp.float32)
        adam = optax.chain(optax.add_decayed_weights(WEIGHT_DECAY), optax.scale_by_adam(), optax.scale(-rate))
        statistics = jax.tree.map_with_path(lambda path, _: is_statistic(path), params)
        return optax.partition({False: adam, True: optax.scale(-1.0)}, statistics)
