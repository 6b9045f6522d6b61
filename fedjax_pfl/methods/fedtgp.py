"""FedTGP (Zhang et al., AAAI 2024): FedProto whose prototypes the server trains to keep the classes apart."""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt
from jaxtyping import Array, Bool, Float, Key

from fedjax_pfl.data.federated import Batch
from fedjax_pfl.method import Cohort, Method, PerClass, Round
from fedjax_pfl.methods.fedproto import Reading, fedproto
from fedjax_pfl.models.base import Model, Params, dense
from fedjax_pfl.ops.losses import cross_entropy
from fedjax_pfl.ops.prototypes import class_means, distances, mean_over_holders, means_as_samples
from fedjax_pfl.ops.training import Scalar, Trainer, is_off, phase_key


class Server(NamedTuple):
    """Shared: what P = G(E_0) is made from, and which classes a client has ever sent; only P goes down."""

    generator: Params
    known: Bool[Array, " C"]


def fedtgp(
    model: Model,
    train: Trainer,
    *,
    lam: Annotated[float, Ge(0)] = 10.0,
    reading: Reading = "head",
    server_lr: Annotated[float, Gt(0)] = 0.01,
    server_epochs: Annotated[int, Ge(0)] = 100,
    server_batch_size: Annotated[int, Ge(1)] = 10,
    margin_cap: Annotated[float, Ge(0)] = 100.0,
) -> Method:
    """FedTGP: clients as in FedProto; P_c is trained to be the nearest to the class means of c, by a margin.

    Shared: P, by an embedding of each class and two layers. Personal: w_i. Headline: PRE, as in FedProto. The margin is
    min(tau, max_c min_c' ||m_c - m_c'||), where m_c is the unweighted mean of this round's client means of c. A class
    that no client has sent so far has no part: it is no candidate in the server's loss, and nobody is drawn to its P_c
    (the official code keeps it in both). A class sent before, but not in this round, stays a candidate: its P_c moves,
    by itself and with the layers that all P share, where rule R8 would keep it. lam = 0 is Local, as in FedProto.

    Args:
      model: extractor and head.
      train: the local trainer.
      lam: lambda, weight of the pull to P; 10 in the official script.
      reading: as in FedProto; ``"prototype"`` in the official code.
      server_lr: of the server's steps; the local rate in the official code.
      server_epochs: S, passes of the server over the class means of a round.
      server_batch_size: class means per step of the server.
      margin_cap: tau, bound on the margin.

    Reference:
      J. Zhang, Y. Liu, Y. Hua, J. Cao. FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive
      Learning for Data and Model Heterogeneity in Federated Learning. AAAI 2024. arXiv:2401.03230.
    """
    base = fedproto(model, train, lam=lam, reading=reading)
    if is_off(lam) and reading == "head":
        return base
    train_server = Trainer(epochs=server_epochs, batch_size=server_batch_size, lr=server_lr)
    hidden, out = (dense(model.dim, "torch", model.dim, name) for name in ("hidden", "out"))

    def init(key: Key[Array, ""], clients: int) -> tuple[Server, Params]:
        _, client = base.init(key, clients)
        keys = jax.random.split(phase_key(key, "prototypes"), 3)
        embedding = jax.random.normal(keys[0], (model.classes, model.dim))
        layers = {layer.name: layer.init(k, embedding)["params"] for layer, k in ((hidden, keys[1]), (out, keys[2]))}
        return Server({"embedding": embedding, **layers}, jnp.zeros(model.classes, bool)), client

    def generate(generator: Params) -> Float[Array, "C K"]:
        between: Any = hidden.apply({"params": generator["hidden"]}, generator["embedding"])
        prototypes: Any = out.apply({"params": generator["out"]}, jax.nn.relu(between))
        return prototypes

    def broadcast(server: Server) -> PerClass:
        return PerClass(server.known, generate(server.generator))

    def aggregate(
        now: Round, server: Server, clients: Params, uploads: PerClass, cohort: Cohort
    ) -> tuple[Server, Params]:
        counts, sums = uploads
        means, held = jax.vmap(class_means)(sums, counts)
        known = server.known | jnp.any(held, axis=0)
        margin = _margin(means, held, margin_cap)

        def loss(generator: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            distance = distances(batch.x, generate(generator))
            distance += margin * jax.nn.one_hot(batch.y, model.classes)  # only to the prototype of the own class
            return cross_entropy(jnp.where(known, -distance, -1e9), batch.y, batch.mask)

        samples = means_as_samples(means, held, cohort.ids)
        generator, _ = train_server(now, loss, server.generator, samples, record=False)
        return Server(generator, known), clients

    return base._replace(init=init, broadcast=broadcast, aggregate=aggregate)


def _margin(means: Float[Array, "N C K"], held: Bool[Array, "N C"], cap: Scalar) -> Float[Array, ""]:
    """The largest distance of a class's mean to its nearest neighbour, at most the cap; 0 for less than two classes."""
    centres, seen = mean_over_holders(means, held)
    others = seen[:, None] & seen & ~jnp.eye(len(seen), dtype=bool)
    gap = jnp.min(jnp.where(others, distances(centres, centres), jnp.inf), axis=1)
    return jnp.minimum(jnp.max(jnp.where(jnp.isfinite(gap), gap, 0.0)), cap)
