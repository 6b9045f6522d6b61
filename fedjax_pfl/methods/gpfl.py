"""GPFL (Zhang et al., ICCV 2023), Algorithm 1: a conditional valve makes a global and a personal feature of one."""

from typing import Annotated, Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from annotated_types import Ge
from jaxtyping import Array, Float, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Logits, Method, Round, Samples, Update
from fedjax_pfl.models.base import Model, Params, dense
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.losses import cross_entropy, label_loss, masked_mean, proximal
from fedjax_pfl.ops.prototypes import l2_normalize
from fedjax_pfl.ops.training import Trainer, is_off, phase_key


class Shared(NamedTuple):
    """Sent down and up: theta, the class embeddings G, [C, K], and the parameters of the conditional valve V."""

    extractor: Params
    embeddings: Float[Array, "C K"]
    valve: Params


class Client(NamedTuple):
    """Personal: phi_i, and pi_i, the client's shares of the classes, [C]; 1 / C each before its first participation."""

    head: Params
    shares: Float[Array, " C"]


class Valve(nn.Module):
    """V(z, u) = ReLU(z (1 + gamma(u)) + beta(u)), where gamma and beta are each a linear layer, ReLU and LayerNorm."""

    @nn.compact
    def __call__(self, z: Float[Array, "batch K"], u: Float[Array, " K"]) -> Float[Array, "batch K"]:
        """Applies it to features z under the conditional input u."""
        gamma, beta = (self._layer(u, name) for name in ("gamma", "beta"))
        return nn.relu(z * (1.0 + gamma) + beta)

    def _layer(self, u: Float[Array, " K"], name: str) -> Float[Array, " K"]:
        hidden = nn.relu(dense(len(u), "torch", len(u), name)(u))
        normed: Array = nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, name=f"{name}_norm")(hidden)
        return normed


def gpfl(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    lam: Annotated[float, Ge(0)] = 0.01,
    mu: Annotated[float, Ge(0)] = 0.1,
    magnitude: Literal["frobenius", "mean_norm"] = "frobenius",
) -> Method:
    """GPFL: a valve makes of each feature a personal one, for the client's head, and one near its class's embedding.

    Shared: theta, G, V. Personal: phi_i. Headline: PRE, phi_i on V(theta(x), u_i) under the newest theta, G and V. The
    conditional inputs are the mean of the received G, u_g, and its mean weighted by the client's labels, u_i (in POST,
    too). The official code takes the client's own last G, or else the global one before (at first zeros), and counts
    full batches only. The default mu shrinks G and V within tens of rounds until V no longer depends on u_i, and lam
    then pulls features towards 0: in long runs PRE falls far below POST, with either inputs, but not with mu = 0.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging theta, G and V.
      lam: weight of the distance of global features to the received G of their classes; official: 0.01, ResNet: 1e-4.
      mu: weight of half the squares of all parameters in G and V. Official: 0.1 for CNNs, 0 for ResNet-18, as decay.
      magnitude: how it is measured: by the norm over the whole batch (official), or the mean of the samples' norms.

    Reference:
      J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, J. Cao, H. Guan. GPFL: Simultaneously Learning Global and
      Personalized Feature Information for Personalized Federated Learning. ICCV 2023. arXiv:2308.10279.
    """
    valve = Valve()
    alike = jnp.full((model.classes,), 1.0 / model.classes)

    def under(valve_params: Params, z: Float[Array, "batch K"], u: Float[Array, " K"]) -> Float[Array, "batch K"]:
        turned: Any = valve.apply({"params": valve_params}, z, u)
        return turned

    def init(key: Key[Array, ""], clients: int) -> tuple[Shared, Client]:
        params = model.init(key)
        embeddings = jax.random.normal(phase_key(key, "embeddings"), (model.classes, model.dim))
        valve_params = valve.init(phase_key(key, "valve"), embeddings, embeddings[0])["params"]
        return Shared(params["extractor"], embeddings, valve_params), Client(params["head"], alike)

    def local(now: Round, view: Shared, client: Client, data: ClientData) -> Update:
        shares, received = _shares(data, client), view.embeddings
        personal_input, global_input = _mean(received, shares), _mean(received, alike)

        def loss(trained: tuple[Shared, Params], batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            (theta, embeddings, v), phi = trained
            z = model.features(theta, batch.x, batch.mask)
            z_global = under(v, z, global_input)
            cosines = jnp.matmul(l2_normalize(z_global), l2_normalize(embeddings).T)
            total = label_loss(model, z, model.classify(phi, under(v, z, personal_input)), batch)
            total += cross_entropy(cosines, batch.y, batch.mask)
            if not is_off(lam):
                total += lam * _size(z_global - received[batch.y], batch.mask, magnitude)
            if not is_off(mu):
                total += proximal((embeddings, v), jax.tree.map(jnp.zeros_like, (embeddings, v)), mu)
            return total

        (shared, head), info = train(now, loss, (view, client.head), data)
        own = Client(head, shares)
        return Update(own, shared, info, post=(shared._replace(embeddings=received), own))

    def aggregate(
        now: Round, server: Shared, clients: Client, uploads: Shared, cohort: Cohort
    ) -> tuple[Shared, Client]:
        return combine(uploads, cohort.weight), clients

    def personal(view: Shared, client: Client) -> Params:
        condition = _mean(view.embeddings, client.shares)
        return {"extractor": view.extractor, "head": client.head, "valve": view.valve, "condition": condition}

    def predict(params: Params, x: Samples) -> Logits:
        z = model.features(params["extractor"], x)
        return model.classify(params["head"], under(params["valve"], z, params["condition"]))

    def personalize(now: Round, view: Shared, client: Client, data: ClientData) -> tuple[Shared, Client]:
        return view, client._replace(shares=_shares(data, client))

    return Method(init, local, aggregate, personal, predict, personalize=personalize)


def _shares(data: ClientData, client: Client) -> Float[Array, " C"]:
    total = jnp.sum(data.class_counts)
    return jnp.where(total > 0, data.class_counts / jnp.maximum(total, 1.0), client.shares)


def _mean(embeddings: Float[Array, "C K"], shares: Float[Array, " C"]) -> Float[Array, " K"]:
    return jnp.sum(shares[:, None] * embeddings, axis=0)


def _size(apart: Float[Array, "batch K"], mask: Float[Array, " batch"], how: str) -> Float[Array, ""]:
    """The magnitude of the differences of a batch; its gradient is finite at zero."""
    squares = jnp.sum(apart**2, axis=1)
    if how == "frobenius":
        return jnp.sqrt(jnp.sum(squares * mask) + 1e-12)
    return masked_mean(jnp.sqrt(squares + 1e-12), mask)
