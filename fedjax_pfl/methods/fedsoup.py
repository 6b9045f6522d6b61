"""FedSoup (Chen et al., MICCAI 2023), Algorithm 1: local models averaged with past global ones that have helped."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge
from jaxtyping import Array, Float, Int, Key

from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.method import Method, Round, Update
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.training import Trainer


class Pool(NamedTuple):
    """Personal: the mean of the global models that the client has accepted, and their number."""

    mean: Params
    size: Int[Array, ""]


def fedsoup(
    model: Model, train: Trainer, combine: Combine = weighted_mean, *, start_round: Annotated[int, Ge(0)] = 75
) -> Method:
    """FedSoup: after local training, w_i becomes the mean of itself and a pool of global models that the client keeps.

    Shared: w. Personal: the pool, as mean and size. Headline: POST, w_i after the averaging, which is also what is
    sent; the global model is for clients outside the federation.

    The received model joins the pool if the mean with it classifies more validation samples correctly than the mean
    without it; at a tie, or without validation samples, it does not join. (The public code selects on test samples. Its
    local training after the last round is left out.) POST on validation samples is a little optimistic, since they
    have chosen the pool. Running statistics are averaged with the parameters; in the public code they stay local.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models.
      start_round: the first round, counted from 0, in which clients average. For T rounds set it to 0.75 T, as in the
        paper, or to 0.5 T. A run that ends before this round is FedAvg; if it is early, the first global models hold
        training back. The default is for ``training.rounds`` at its default, 100.

    Reference:
      M. Chen, M. Jiang, Q. Dou, Z. Wang, X. Li. FedSoup: Improving Generalization and Personalization in Federated
      Learning via Selective Model Interpolation. MICCAI 2023. arXiv:2307.10507.
    """
    base = fedavg(model, train, combine)

    def init(key: Key[Array, ""], clients: int) -> tuple[Params, Pool]:
        server, _ = base.init(key, clients)
        return server, Pool(server, jnp.zeros((), jnp.int32))

    def right(params: Params, data: ClientData | None) -> Float[Array, ""]:
        """Number of samples that the model classifies correctly."""
        if data is None:
            return jnp.zeros(())
        answers = data.map(lambda x, _: jnp.argmax(model.apply(params, x), axis=1))
        return jnp.sum(jnp.where(answers == data.labels, data.valid, 0.0))

    def local(now: Round, view: Params, client: Pool, data: ClientData) -> Update:
        update = base.local(now, view, (), data)
        number = client.size.astype(jnp.float32)
        added = jax.tree.map(lambda mean, w: (number * mean + w) / (number + 1.0), client.mean, view)
        without = jax.tree.map(lambda own, mean: (own + number * mean) / (number + 1.0), update.upload, client.mean)
        with_it = jax.tree.map(lambda own, mean: (own + (number + 1.0) * mean) / (number + 2.0), update.upload, added)
        averages = (now.t >= start_round) & (update.info.steps > 0)
        accepts = averages & (right(with_it, data.validation) > right(without, data.validation))

        def choose(own: Array, without: Array, with_it: Array) -> Array:
            return jnp.where(accepts, with_it, jnp.where(averages, without, own))

        mean = jax.tree.map(lambda new, old: jnp.where(accepts, new, old), added, client.mean)
        pool = Pool(mean, client.size + accepts.astype(jnp.int32))
        upload = jax.tree.map(choose, update.upload, without, with_it)
        return Update(pool, upload, update.info, diagnostics={"pool": pool.size.astype(jnp.float32)})

    return base._replace(init=init, local=local, headline="post", selects=True)
