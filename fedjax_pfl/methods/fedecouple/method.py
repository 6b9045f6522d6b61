"""FedeCouple (Algorithm 1): global-local features, local anchors, and a personal head taught by the global one."""

from functools import partial
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt, Le
from jaxtyping import Array, Bool, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Method, Round, Update
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.fedecouple.teaching import Heads, Teacher, Teaching
from fedjax_pfl.methods.fedecouple.weights import cosine_weights
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.losses import label_loss
from fedjax_pfl.ops.prototypes import Prototypes, Reduction, centre_loss, class_means, class_sums_under
from fedjax_pfl.ops.training import Loss, Trainer, cache_features, is_off, phase_key


class Client(NamedTuple):
    """Personal: theta_i, phi_i of the last participation (or of round 0), and whether they replace what is received."""

    model: Params
    seen: Bool[Array, ""]


def fedecouple(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    lam: Annotated[float, Ge(0)] = 0.8,
    mu: Annotated[float, Ge(0)] = 2.0,
    tau: Annotated[float, Gt(0)] = 2.0,
    head_lr: Annotated[float, Gt(0)] | None = None,
    head_epochs: Annotated[int, Ge(0)] = 5,
    frozen_head_epochs: Annotated[int, Ge(0)] = 1,
    teacher: Teacher = "adapted",
    scale_by_temperature: bool = False,
    head_features: Literal["local", "global"] = "local",
    global_extractor: bool = True,
    anchor_on: Literal["all", "original"] = "all",
    anchor_coverage: Annotated[float, Ge(0), Le(1)] = 1.0,
    anchor_reduction: Reduction = "mse",
    aggregation: Literal["similarity", "size"] = "similarity",
    first: Literal["received", "initial"] = "received",
) -> Method:
    """FedeCouple: extractor and head both have a shared and a personal version.

    Shared: theta, phi. Personal: theta_i, phi_i, from the client's last participation. Headline: POST, which is
    (theta_i, phi_i); with ``head_features="global"`` PRE, (theta, phi_i), as in FedRep. ``training.epochs`` is E_fe.
    The paper states neither learning rate nor batch size. Anchors stay on the client. Clipping treats the gradients of
    both heads as one.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models, given client sizes or the weights of Eq. 7.
      lam: lambda, weight of the distillation (Eq. 3).
      mu: weight of the anchor loss (Eqs. 5, 6).
      tau: temperature of the distillation.
      head_lr: rate of the head phase, decays alike; None: the local rate, the paper's only one. FedPAC's code has 0.1.
      head_epochs: E_cl, epochs of the head phase (GPC).
      frozen_head_epochs: epochs of the extractor under the frozen global head (GLF, Eq. 5); 0 turns them off.
      teacher: whether the global head adapts while it teaches, stays as received, or does not teach (Table IX).
      scale_by_temperature: multiply the distillation by tau^2; the paper has no such factor.
      head_features: whose extractor's features the heads are trained on: the client's own, or the received one's (as in
        FedPAC's code; PRE is then 0.6, 3.0 and 2.0 points below the paper's in three seeds, docs/papers/fedecouple.md).
      global_extractor: whether the client continues from the received extractor or from its own (Table IX).
      anchor_on: whether augmented copies count in the anchors.
      anchor_coverage: share of the client's classes that get an anchor, drawn in each round (GFA; Table IX).
      anchor_reduction: the anchor loss as mean or as sum over the features. The paper sums over samples as well, which
        diverges at its mu = 2.
      aggregation: weights by similarity to the mean model (Eq. 7), or by client size.
      first: a client's own model before its first participation: the received one, or that of round 0. The paper does
        not say; with the latter, a late client is scored and taught with a random head.

    Reference:
      M. Yang et al. FedeCouple: Fine-Grained Balancing of Global-Generalization and Local-Adaptability in Federated
      Learning. 2025. arXiv:2511.09599. Algorithm 1, Eqs. 3-7, section IV-D (augmentation).
    """
    teaching = Teaching(teacher, lam, tau, scale_by_temperature, head_epochs, head_lr)

    def init(key: Key[Array, ""], clients: int) -> tuple[Params, Client]:
        params = model.init(key)
        return params, Client(params, jnp.array(first == "initial"))

    def own(view: Params, client: Client) -> Params:
        return jax.tree.map(partial(jnp.where, client.seen), client.model, view)

    def compute_anchors(key: Key[Array, ""], extractor: Params, data: ClientData) -> Prototypes:
        held = data.original if anchor_on == "original" and data.original is not None else data
        anchors = class_means(class_sums_under(model, extractor, held), held.class_counts)
        draws = jnp.where(anchors.valid, jax.random.uniform(phase_key(key, "anchors"), (model.classes,)), jnp.inf)
        rank = jnp.argsort(jnp.argsort(draws))
        covered = rank.astype(jnp.float32) < jnp.round(anchor_coverage * jnp.sum(anchors.valid, dtype=jnp.float32))
        return anchors._replace(valid=anchors.valid & covered)

    def local(now: Round, view: Params, client: Client, data: ClientData) -> Update:
        own_model = own(view, client)
        seen_by = (own_model if head_features == "local" else view)["extractor"]
        features = cache_features(partial(model.features, seen_by), data)
        head, said = teaching(now, model, train, Heads(own_model["head"], view["head"]), features)
        anchors = compute_anchors(now.key, view["extractor"], data)

        def terms_of(extractor: Params, batch: Batch, head: Params) -> tuple[Array, Array]:
            """The cross-entropy under a head, and the pull to the anchors."""
            z = model.features(extractor, batch.x, batch.mask)
            ce = label_loss(model, z, model.classify(head, z), batch)
            if is_off(mu):
                return ce, jnp.zeros(())
            return ce, mu * centre_loss(z, batch.y, batch.mask, anchors, reduction=anchor_reduction)

        def loss_under(head: Params) -> Loss[Params]:
            return lambda extractor, batch, key: jnp.add(*terms_of(extractor, batch, head))

        def term(number: int) -> Loss[Params]:
            return lambda extractor, batch, key: terms_of(extractor, batch, head)[number]

        extractor = (view if global_extractor else own_model)["extractor"]
        if frozen_head_epochs > 0:
            frozen = loss_under(view["head"])
            said |= train.gradient_ratios(now, loss_under(head), {"frozen_head": frozen}, extractor, data)
            extractor, _ = train(
                now, frozen, extractor, data, phase="frozen head", epochs=frozen_head_epochs, record=False
            )
        extractor, info = train(now, loss_under(head), extractor, data)
        pull = {} if is_off(mu) else {"anchors": term(1)}
        said |= train.gradient_ratios(now, term(0), pull, extractor, data)
        personal = {"extractor": extractor, "head": head}
        return Update(Client(personal, client.seen | (info.steps > 0)), personal, info, diagnostics=said)

    def aggregate(
        now: Round, server: Params, clients: Client, uploads: Params, cohort: Cohort
    ) -> tuple[Params, Client]:
        mean = combine(uploads, cohort.weight)
        if aggregation == "size":
            return mean, clients
        return combine(uploads, cosine_weights(uploads, mean, cohort.weight > 0)), clients

    def personal(view: Params, client: Client) -> Params:
        return {"extractor": view["extractor"], "head": own(view, client)["head"]}

    method = fedavg(model, train, combine)._replace(init=init, local=local, aggregate=aggregate, personal=personal)
    return method._replace(headline="post" if head_features == "local" else "pre", copies="concat")
