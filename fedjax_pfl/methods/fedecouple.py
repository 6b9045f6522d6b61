"""FedeCouple (Algorithm 1): global-local features, local anchors, and a personal head taught by the global one."""

from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt, Le
from jaxtyping import Array, Float, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Logits, Method, Round, Samples, Update
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, cosine_weights, weighted_mean
from fedjax_pfl.ops.distill import distillation
from fedjax_pfl.ops.losses import cross_entropy, label_loss
from fedjax_pfl.ops.prototypes import Prototypes, Reduction, centre_loss, class_means, class_sums_under
from fedjax_pfl.ops.training import Loss, Trainer, cache_features, is_off, phase_key


class Heads(NamedTuple):
    """The two heads that the head phase trains side by side: student and teacher."""

    personal: Params
    teacher: Params  # a copy of phi_g that adapts to the client, and is thrown away afterwards


def fedecouple(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    lam: Annotated[float, Ge(0)] = 0.8,
    mu: Annotated[float, Ge(0)] = 2.0,
    tau: Annotated[float, Gt(0)] = 2.0,
    head_epochs: Annotated[int, Ge(0)] = 5,
    frozen_head_epochs: Annotated[int, Ge(0)] = 1,
    teacher: Literal["adapted", "fixed", "off"] = "adapted",
    scale_by_temperature: bool = False,
    head_features: Literal["local", "global"] = "local",
    global_extractor: bool = True,
    anchor_on: Literal["all", "original"] = "all",
    anchor_coverage: Annotated[float, Ge(0), Le(1)] = 1.0,
    anchor_reduction: Reduction = "mse",
    aggregation: Literal["similarity", "size"] = "similarity",
) -> Method:
    """FedeCouple: extractor and head are both shared and both personal.

    Shared: theta, phi. Personal: theta_i, phi_i, from the client's last participation. Headline: POST, (theta_i, phi_i)
    after local training; PRE is (theta, phi_i). ``training.epochs`` is E_fe. The paper states neither learning rate nor
    batch size. Anchors stay on the client. Clipping, where configured, takes the two heads' gradients as one.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models, given client sizes or the weights of Eq. 7.
      lam: lambda, weight of the distillation (Eq. 3).
      mu: weight of the anchor loss (Eqs. 5, 6).
      tau: temperature of the distillation.
      head_epochs: E_cl, epochs of the head phase (GPC).
      frozen_head_epochs: epochs of the extractor under the frozen global head (GLF, Eq. 5); 0 switches them off.
      teacher: the global head adapts while it teaches, or stays as received, or there is no distillation (Table IX).
      scale_by_temperature: multiply the distillation by tau^2; the paper has no such factor.
      head_features: the extractor whose features the heads are trained on: the client's own, as it left it, or the one
        received.
      global_extractor: whether the client goes on from the received extractor or from its own (Table IX).
      anchor_on: whether augmented copies count in the anchors.
      anchor_coverage: share of the client's classes, drawn in each round, that get an anchor (GFA; Table IX).
      anchor_reduction: the anchor loss as mean or as sum over the features. The paper sums over samples as well, which
        diverges at its mu = 2.
      aggregation: weights by similarity to the mean model (Eq. 7), or by client size.

    Reference:
      FedeCouple: Algorithm 1, Eqs. 3-7, section IV-D (augmentation). Its numbers are in benchmarks/papers/.
    """

    def init(key: Key[Array, ""], clients: int) -> tuple[Params, Params]:
        del clients
        params = model.init(key)
        return params, params

    def head_loss(heads: Heads, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
        del key
        logits = model.classify(heads.personal, batch.x)
        loss = cross_entropy(logits, batch.y, batch.mask)
        if teacher == "off" or is_off(lam):
            return loss
        taught = model.classify(heads.teacher, batch.x)
        loss += lam * distillation(logits, taught, batch.mask, temperature=tau, scaled=scale_by_temperature)
        # No gradient of the distillation reaches the teacher, so that one sum serves Eq. 3 and Eq. 4.
        return loss + cross_entropy(taught, batch.y, batch.mask) if teacher == "adapted" else loss

    def train_head(now: Round, view: Params, client: Params, data: ClientData) -> Params:
        extractor = (client if head_features == "local" else view)["extractor"]
        features = cache_features(lambda x: model.features(extractor, x), data)

        def fixed_teacher_loss(personal: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            return head_loss(Heads(personal, view["head"]), batch, key)

        if teacher == "adapted":
            heads = Heads(client["head"], view["head"])
            return train(now, head_loss, heads, features, phase="head", epochs=head_epochs)[0].personal
        return train(now, fixed_teacher_loss, client["head"], features, phase="head", epochs=head_epochs)[0]

    def compute_anchors(key: Key[Array, ""], extractor: Params, data: ClientData) -> Prototypes:
        held = data.original if anchor_on == "original" and data.original is not None else data
        anchors = class_means(class_sums_under(model, extractor, held), held.class_counts)
        draws = jnp.where(anchors.valid, jax.random.uniform(phase_key(key, "anchors"), (model.classes,)), jnp.inf)
        rank = jnp.argsort(jnp.argsort(draws))
        covered = rank.astype(jnp.float32) < jnp.round(anchor_coverage * jnp.sum(anchors.valid, dtype=jnp.float32))
        return anchors._replace(valid=anchors.valid & covered)

    def local(now: Round, view: Params, client: Params, data: ClientData) -> Update:
        head = train_head(now, view, client, data)
        anchors = compute_anchors(now.key, view["extractor"], data)

        def loss_under(head: Params) -> Loss[Params]:
            def loss(extractor: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
                del key
                z = model.features(extractor, batch.x, batch.mask)
                ce = label_loss(model, z, model.classify(head, z), batch)
                if is_off(mu):
                    return ce
                return ce + mu * centre_loss(z, batch.y, batch.mask, anchors, reduction=anchor_reduction)

            return loss

        extractor = (view if global_extractor else client)["extractor"]
        if frozen_head_epochs > 0:
            frozen = loss_under(view["head"])
            extractor, _ = train(now, frozen, extractor, data, phase="frozen head", epochs=frozen_head_epochs)
        extractor, info = train(now, loss_under(head), extractor, data)
        personal = {"extractor": extractor, "head": head}
        return Update(personal, personal, info)

    def aggregate(
        now: Round, server: Params, clients: Params, uploads: Params, cohort: Cohort
    ) -> tuple[Params, Params]:
        del now, server
        mean = combine(uploads, cohort.weight)
        if aggregation == "size":
            return mean, clients
        return combine(uploads, cosine_weights(uploads, mean, cohort.weight > 0)), clients

    def predict(view: Params, client: Params, x: Samples) -> Logits:
        return model.apply({"extractor": view["extractor"], "head": client["head"]}, x)

    return fedavg(model, train, combine)._replace(
        init=init, local=local, aggregate=aggregate, predict=predict, headline="post", copies="concat"
    )
