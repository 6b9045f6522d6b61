"""An approximation of FedCRL (Huang et al., arXiv 2404.17916, v1), not the method: rebuilt from its abstract."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Gt
from jaxtyping import Array, Float, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Method, Round, Update
from fedjax_pfl.methods.fedproc import Sent, Server, fedproc
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, interpolate, weighted_mean
from fedjax_pfl.ops.losses import cross_entropy, regularized
from fedjax_pfl.ops.prototypes import Prototypes, prototype_contrast, sums_as_sent
from fedjax_pfl.ops.training import LossTotals, Trainer, is_off


class Client(NamedTuple):
    """Personal: w_i, and k_i in [0, 1], the share of the global model in the model that the next round starts from."""

    params: Params
    share: Float[Array, ""]


def fedcrl_approx(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    lam: Annotated[float, Ge(0)] = 1.0,
    temperature: Annotated[float, Gt(0)] = 0.5,
    weigh_by_loss: bool = True,
) -> Method:
    """An approximation of FedCRL: a contrast with global prototypes, and a mix of local and global model by the loss.

    Shared: w, P. Personal: w_i, k_i. Headline: POST, w_i; PRE is the model that a round starts from, w_i + k_i (w -
    w_i).

    Neither text nor code of FedCRL (later FedCoSR) was at hand beyond the abstract: never report this method as FedCRL.
    The abstract says that the server averages parameters and class means of features, that clients contrast their
    features with these means, and that a local aggregation is weighted by that loss. The rule k_i = contrast /
    (contrast + CE), of the round's mean losses, and all numbers are ours. k_i is 1 until one of the client's classes
    has a prototype, and does not change in a round without a step. With lam = 0 and k_i held at 1 it is FedAvg, bit for
    bit.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models.
      lam: lambda, weight of the contrast.
      temperature: tau, by which the cosines of the contrast are divided.
      weigh_by_loss: whether k_i follows the losses; otherwise it stays at 1.

    Reference:
      C. Huang, X. Chen, Y. Zhang, H. Wang. FedCRL: Personalized Federated Learning with Contrastive Shared
      Representations for Label Heterogeneity in Non-IID Data. arXiv:2404.17916, 2024.
    """
    base = fedproc(model, train, combine)

    def init(key: Key[Array, ""], clients: int) -> tuple[Server, Client]:
        server, _ = base.init(key, clients)
        return server, Client(server.params, jnp.ones(()))

    def mixed(view: Sent, client: Client) -> Params:
        return interpolate(client.params, view.params, client.share)

    def local(now: Round, view: Sent, client: Client, data: ClientData) -> Update:
        prototypes = Prototypes.as_received(view.per_class)

        def loss(params: Params, batch: Batch) -> tuple[Float[Array, ""], tuple[Float[Array, ""], ...]]:
            z = model.features(params["extractor"], batch.x, batch.mask)
            ce = cross_entropy(model.classify(params["head"], z), batch.y, batch.mask)
            contrast = prototype_contrast(z, batch.y, batch.mask, prototypes, temperature=temperature)
            total = regularized(model, ce, z, batch.mask)
            total = total if is_off(lam) else total + lam * contrast
            return total, (total, ce, contrast)

        def step(carry: tuple, batch: Batch, key: Key[Array, ""]) -> tuple:
            params, opt_state, totals = carry
            (_, losses), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch)
            updates, opt_state = optimizer.update(gradient, opt_state, params)
            totals = tuple(so_far.after(mean, batch) for so_far, mean in zip(totals, losses, strict=True))
            return optax.apply_updates(params, updates), opt_state, totals

        params = mixed(view, client)
        optimizer = train.optimizer(now.t, params)
        start = params, optimizer.init(params), (LossTotals.none(),) * 3
        params, _, totals = train.over_batches(now, step, start, data)
        info, (ce, _), (contrast, _) = (train.info(each, data) for each in totals)
        contrasted = (info.steps > 0) & jnp.any(prototypes.valid & (data.class_counts > 0))
        share = jnp.where(contrasted, contrast / (contrast + ce + 1e-12), client.share)
        own = Client(params, share if weigh_by_loss else client.share)
        upload = Sent(params, sums_as_sent(model, params["extractor"], data))
        post = view._replace(params=params), own
        return Update(own, upload, info, post, {"global_share": own.share})

    def personalize(now: Round, view: Sent, client: Client, data: ClientData) -> tuple[Sent, Client]:
        return view._replace(params=mixed(view, client)), client

    return base._replace(init=init, local=local, personalize=personalize, headline="post")
