"""FedCPD: FedRep whose extractor is taught by its own past, level by level, and drawn to class prototypes."""

from typing import Annotated, Literal, NamedTuple

import jax.numpy as jnp
from annotated_types import Ge, Gt
from jaxtyping import Array, Bool

from fedjax_pfl.method import Method, PerClass
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import weighted_mean
from fedjax_pfl.ops.feature_distillation import feature_distillation, init_distiller
from fedjax_pfl.ops.heads import train_head
from fedjax_pfl.ops.losses import cross_entropy
from fedjax_pfl.ops.prototypes import (
    Prototypes,
    Reduction,
    centre_loss,
    class_means,
    class_sums_under,
    prototype_contrast,
    update_prototypes,
)
from fedjax_pfl.ops.training import Trainer, cache_features, is_off, phase_key


class Server(NamedTuple):
    """Shared: {theta}, or {theta, phi} on FedAvg, and the global prototypes P; None if no term needs them."""

    params: Params
    prototypes: Prototypes | None


class Shared(NamedTuple):
    """What is sent down and, with class sums in the place of the means, up."""

    params: Params
    per_class: PerClass | None


class Teacher(NamedTuple):
    """For the distillation of feature maps.

    Attributes:
      extractor: theta_i as the client left it in its last round.
      exists: whether there was one, [].
      distiller: psi_i, the weights of attention and fusion.
    """

    extractor: Params
    exists: Bool[Array, ""]
    distiller: Params


class Client(NamedTuple):
    """Personal: phi_i (None on FedAvg), and the teacher; None if the term is off."""

    head: Params | None
    teacher: Teacher | None


def fedcpd(
    model: Model,
    train: Trainer,
    *,
    alpha: Annotated[float, Ge(0)] = 1.0,
    beta: Annotated[float, Ge(0)] = 1.0,
    gamma: Annotated[float, Ge(0)] = 0.1,
    tau: Annotated[float, Gt(0)] = 0.5,
    head_epochs: Annotated[int, Ge(0)] = 1,
    base: Literal["fedrep", "fedavg"] = "fedrep",
    reduction: Reduction = "mse",
) -> Method:
    """FedCPD: feature distillation, prototype alignment and prototype contrast, on top of FedRep.

    Shared: theta, P. Personal: phi_i, the last theta_i, psi_i. Headline: PRE; its fall behind the POST of the round
    before is the paper's forgetting. With all coefficients 0 it is FedRep. ``training.epochs`` is the extractor's.
    Clipping, where configured, takes theta and psi_i as one.

    Args:
      model: extractor and head; gamma > 0 asks for feature maps.
      train: the local trainer.
      alpha: weight of the alignment, the distance to the prototype of the own class.
      beta: weight of the contrast, the own class's prototype against all others.
      gamma: weight of the distillation from the client's last extractor.
      tau: temperature of the contrast.
      head_epochs: epochs of the head phase.
      base: the method that the terms are added to; ``"fedavg"`` shares the head and trains the model as one (Fig. 2).
      reduction: the alignment as mean or, as the paper writes it, as sum over the features.

    Raises:
      ValueError: gamma > 0 and the model has no feature maps.

    Reference:
      FedCPD. Its numbers are in benchmarks/papers/; it states neither the coefficients nor tau, which were chosen on
      validation samples (benchmarks/README.md).
    """
    uses_prototypes = not (is_off(alpha) and is_off(beta))
    uses_teacher = not is_off(gamma)
    if uses_teacher and not model.maps:
        raise ValueError("its distillation (gamma > 0) needs a model with feature maps")

    def init(key):
        params = model.init(key)
        nothing = Prototypes(jnp.zeros((model.classes, model.dim)), jnp.zeros(model.classes, bool))
        shared, head = (params, None) if base == "fedavg" else ({"extractor": params["extractor"]}, params["head"])
        server = Server(shared, nothing if uses_prototypes else None)
        if not uses_teacher:
            return server, Client(head, None)
        distiller = init_distiller(phase_key(key, "distiller"), model.maps)
        return server, Client(head, Teacher(params["extractor"], jnp.array(False), distiller))

    def broadcast(server):
        prototypes = server.prototypes
        return Shared(server.params, None if prototypes is None else PerClass(prototypes.valid, prototypes.mean))

    def whole(params, head):
        return params if base == "fedavg" else {**params, "head": head}

    def local(key, t, view, client, data):
        head = client.head
        if base == "fedrep":
            features = cache_features(lambda x: model.features(view.params["extractor"], x), data)
            head = train_head(key, t, model, train, head, features, epochs=head_epochs)
        prototypes = Prototypes(view.per_class.rows, view.per_class.held) if uses_prototypes else None
        teacher = client.teacher

        def loss(trained, batch, key):
            del key
            params, distiller = whole(trained[0], head), trained[1]
            z, maps = model.features_and_maps(params["extractor"], batch.x, batch.mask)
            total = cross_entropy(model.classify(params["head"], z), batch.y, batch.mask)
            if not is_off(alpha):
                total += alpha * centre_loss(z, batch.y, batch.mask, prototypes, reduction=reduction)
            if not is_off(beta):
                total += beta * prototype_contrast(z, batch.y, batch.mask, prototypes, temperature=tau)
            if uses_teacher:
                _, taught = model.features_and_maps(teacher.extractor, batch.x)
                distance = feature_distillation(distiller, maps, taught, batch.mask)
                total += gamma * jnp.where(teacher.exists, distance, 0.0)
            return total

        distiller = teacher.distiller if uses_teacher else None
        (params, distiller), info = train(key, t, loss, (view.params, distiller), data)
        client = Client(head, Teacher(params["extractor"], jnp.array(True), distiller) if uses_teacher else None)
        if not uses_prototypes:
            return client, Shared(params, None), info
        sums = class_sums_under(model, params["extractor"], data)
        return client, Shared(params, PerClass(data.class_counts, sums)), info

    def aggregate(key, t, server, clients, uploads, cohort):
        del key, t
        prototypes = server.prototypes
        if uses_prototypes:
            counts, sums = (jnp.sum(leaf, axis=0) for leaf in uploads.per_class)
            prototypes = update_prototypes(prototypes, class_means(sums, counts))
        return Server(weighted_mean(uploads.params, cohort.weight), prototypes), clients

    def predict(view, client, x):
        return model.apply(whole(view.params, client.head), x)

    def trained(view, client, upload):
        return view._replace(params=upload.params), client

    def global_predict(server, x):
        return model.apply(server.params, x)

    return Method(
        init,
        local,
        aggregate,
        predict,
        broadcast=broadcast,
        trained=trained,
        global_predict=global_predict if base == "fedavg" else None,
    )
