"""FedeCouple (Algorithm 1): global-local features, local anchors, and a personal head taught by the global one."""

from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt, Le

from fedjax_pfl.method import Method
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import cosine_weights, weighted_mean
from fedjax_pfl.ops.distill import distillation
from fedjax_pfl.ops.losses import cross_entropy
from fedjax_pfl.ops.prototypes import Reduction, centre_loss, class_means, class_sums_under
from fedjax_pfl.ops.training import Trainer, cache_features, is_off, phase_key


class Heads(NamedTuple):
    """The two heads that the head phase trains side by side.

    Attributes:
      personal: phi_i, the student.
      teacher: phi_g, a copy of the global head that adapts to the client and is thrown away afterwards.
    """

    personal: Params
    teacher: Params


def fedecouple(
    model: Model,
    train: Trainer,
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

    def init(key):
        params = model.init(key)
        return params, params

    def head_loss(heads, batch, key):
        del key
        logits = model.classify(heads.personal, batch.x)
        loss = cross_entropy(logits, batch.y, batch.mask)
        if teacher == "off" or is_off(lam):
            return loss
        taught = model.classify(heads.teacher, batch.x)
        loss += lam * distillation(logits, taught, batch.mask, temperature=tau, scaled=scale_by_temperature)
        # No gradient of the distillation reaches the teacher, so that one sum serves Eq. 3 and Eq. 4.
        return loss + cross_entropy(taught, batch.y, batch.mask) if teacher == "adapted" else loss

    def train_head(key, t, view, client, data):
        extractor = (client if head_features == "local" else view)["extractor"]
        features = cache_features(lambda x: model.features(extractor, x), data)

        def fixed_teacher_loss(personal, batch, key):
            return head_loss(Heads(personal, view["head"]), batch, key)

        options = {"phase": "head", "epochs": head_epochs}
        if teacher == "adapted":
            heads = Heads(client["head"], view["head"])
            return train(key, t, head_loss, heads, features, **options)[0].personal
        return train(key, t, fixed_teacher_loss, client["head"], features, **options)[0]

    def compute_anchors(key, extractor, data):
        held = data.original if anchor_on == "original" and data.original is not None else data
        anchors = class_means(class_sums_under(model, extractor, held), held.class_counts)
        if is_off(anchor_coverage - 1):
            return anchors
        draws = jnp.where(anchors.valid, jax.random.uniform(phase_key(key, "anchors"), (model.classes,)), jnp.inf)
        rank = jnp.argsort(jnp.argsort(draws))
        covered = rank.astype(jnp.float32) < jnp.round(anchor_coverage * jnp.sum(anchors.valid, dtype=jnp.float32))
        return anchors._replace(valid=anchors.valid & covered)

    def local(key, t, view, client, data):
        head = train_head(key, t, view, client, data)
        anchors = compute_anchors(key, view["extractor"], data)

        def loss_under(head):
            def loss(extractor, batch, key):
                del key
                z = model.features(extractor, batch.x, batch.mask)
                ce = cross_entropy(model.classify(head, z), batch.y, batch.mask)
                if is_off(mu) or is_off(anchor_coverage):
                    return ce
                return ce + mu * centre_loss(z, batch.y, batch.mask, anchors, reduction=anchor_reduction)

            return loss

        extractor = (view if global_extractor else client)["extractor"]
        if frozen_head_epochs > 0:
            options = {"phase": "frozen head", "epochs": frozen_head_epochs}
            extractor, _ = train(key, t, loss_under(view["head"]), extractor, data, **options)
        extractor, info = train(key, t, loss_under(head), extractor, data)
        personal = {"extractor": extractor, "head": head}
        return personal, personal, info

    def aggregate(key, t, server, clients, uploads, cohort):
        del key, t, server
        mean = weighted_mean(uploads, cohort.weight)
        if aggregation == "size":
            return mean, clients
        return weighted_mean(uploads, cosine_weights(uploads, mean, cohort.weight > 0)), clients

    def predict(view, client, x):
        return model.apply({"extractor": view["extractor"], "head": client["head"]}, x)

    return fedavg(model, train)._replace(
        init=init, local=local, aggregate=aggregate, predict=predict, headline="post", augment="concat"
    )
