"""FedALA (Zhang et al., AAAI 2023), Algorithm 1: clients start from a learned mix of their own and the global model."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt, Le
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Method, Round, Update
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.models.norm import is_statistic
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.layers import join_layers, last_layers, split_layers
from fedjax_pfl.ops.losses import supervised
from fedjax_pfl.ops.training import Scalar, Trainer, permutation, phase_key

WINDOW = 10  # epochs whose losses decide whether the first adaptation has converged (official code)


class Client(NamedTuple):
    """Personal: the mixed layers of w_i, their weights A_i, and the number of the client's participations."""

    upper: Params
    mix: Params
    visits: Int[Array, ""]


class Adaptation(NamedTuple):
    """Progress of the adaptation of A_i: epochs done, A_i, and the mean losses of the last epochs, newest first."""

    epochs: Int[Array, ""]
    mix: Params
    losses: Float[Array, " window"]


def fedala(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    mixed_layers: Annotated[int, Ge(1)] = 1,
    share: Annotated[float, Gt(0), Le(1)] = 0.8,
    mix_lr: Annotated[float, Ge(0)] = 1.0,
    threshold: Annotated[float, Ge(0)] = 0.1,
    most_epochs: Annotated[int, Ge(1)] = 50,
) -> Method:
    """FedALA: the last layers start from A_i * w + (1 - A_i) * w_i, with A_i learned on a share of the samples.

    Shared: w. Personal: the last layers of w_i, and A_i in [0, 1], one weight per parameter of these layers, initially
    1. Headline: PRE, the model right after the mixing. All clients are scored in this way, but only participants keep
    their A_i (in the official code all clients do, and the mixed layers, too).

    In its first participation a client has no model of its own and takes w. Before its second participation A_i is
    trained until it converges, and before each later one for one epoch. The paper counts layers, the official code
    tensors (its 2 are the head). The official code stops by the losses of last batches, without a bound; here the mean
    losses of epochs decide. With ``training.drop_last``, A_i stays as it is if the client's share of samples fills no
    batch.

    Args:
      model: extractor and head.
      train: the local trainer; its batch size is also used for the mixing.
      combine: the server's rule for averaging models.
      mixed_layers: p, how many of the last layers are mixed, including the head.
      share: s, the share of the client's samples on which A_i is trained, drawn anew in each round; paper: 0.8.
      mix_lr: eta_A, the learning rate of A_i; 0 leaves A_i at 1, which is FedAvg.
      threshold: A_i has converged when the standard deviation of the losses of ten epochs is below this value.
      most_epochs: bound on the number of epochs until A_i has converged.

    Raises:
      ValueError: the model has fewer layers than ``mixed_layers``.

    Reference:
      J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan. FedALA: Adaptive Local Aggregation for Personalized
      Federated Learning. AAAI 2023. arXiv:2212.01197.
    """
    names = last_layers(model, mixed_layers)
    base = fedavg(model, train, combine)

    def init(key: Key[Array, ""], clients: int) -> tuple[Params, Client]:
        params, _ = base.init(key, clients)
        _, upper = split_layers(params, names)
        return params, Client(upper, jax.tree.map(jnp.ones_like, upper), jnp.zeros((), jnp.int32))

    def adapt(now: Round, view: Params, client: Client, data: ClientData) -> tuple[Params, Params]:
        """The model from which the client starts, and the A_i with which it is mixed."""
        lower, received = split_layers(view, names)
        samples = _sample(phase_key(now.key, "sample"), data, share)

        def mixed(mix: Params) -> Params:
            # Not w_i + a * (w - w_i), which for a = 1 is w up to rounding only.
            upper = jax.tree.map(lambda a, w, w_i: a * w + (1.0 - a) * w_i, mix, received, client.upper)
            return join_layers(lower, upper)

        def step(carry: tuple, batch: Batch, key: Key[Array, ""]) -> tuple:
            mix, total, seen = carry
            loss, gradient = jax.value_and_grad(lambda mix: supervised(model, mixed(mix), batch))(mix)

            def moved(path: tuple, a: Array, g: Array) -> Array:
                return a if is_statistic(path) else jnp.clip(a - mix_lr * g, 0.0, 1.0)

            size = jnp.sum(batch.mask)
            return jax.tree.map_with_path(moved, mix, gradient), total + size * loss, seen + size

        def epoch(at: Adaptation) -> Adaptation:
            key = jax.random.fold_in(phase_key(now.key, "mix"), at.epochs)
            start = at.mix, jnp.zeros(()), jnp.zeros(())
            mix, total, seen = train.over_batches(Round(key, now.t), step, start, samples, phase="mix", epochs=1)
            return Adaptation(at.epochs + 1, mix, jnp.roll(at.losses, 1).at[0].set(total / jnp.maximum(seen, 1.0)))

        def unfinished(at: Adaptation) -> Bool[Array, ""]:
            most = jnp.select([client.visits == 0, client.visits == 1], [0, most_epochs], 1)
            converged = (at.epochs > WINDOW) & (jnp.std(at.losses) < threshold)
            return (at.epochs < most) & ~converged

        begin = Adaptation(jnp.zeros((), jnp.int32), client.mix, jnp.zeros(WINDOW))
        mix = lax.while_loop(unfinished, epoch, begin).mix
        return mixed(mix), mix

    def local(now: Round, view: Params, client: Client, data: ClientData) -> Update:
        start, mix = adapt(now, view, client, data)
        update = base.local(now, start, (), data)
        _, upper = split_layers(update.upload, names)
        return update._replace(client=Client(upper, mix, client.visits + 1))

    def personalize(now: Round, view: Params, client: Client, data: ClientData) -> tuple[Params, Client]:
        return adapt(now, view, client, data)[0], client

    return base._replace(init=init, local=local, personalize=personalize)


def _sample(key: Key[Array, ""], data: ClientData, share: Scalar) -> ClientData:
    """A random share of the client's samples, at least one; ``class_counts`` remain those of all its samples."""
    order = permutation(key, data.count, data.capacity)
    count = jnp.round(share * data.count.astype(jnp.float32)).astype(jnp.int32)
    return data.reordered(order)._replace(count=jnp.clip(count, jnp.minimum(data.count, 1), data.count))
