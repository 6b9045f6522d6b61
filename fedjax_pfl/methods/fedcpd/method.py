"""FedCPD: FedRep whose extractor is taught by its own past, level by level, and drawn to class prototypes."""

from functools import partial
from typing import Annotated, Literal, NamedTuple

import jax.numpy as jnp
from annotated_types import Ge, Gt
from jaxtyping import Array, Float, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Logits, Method, PerClass, Round, Samples, Update
from fedjax_pfl.methods.fedcpd.teacher import Teacher, taught
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.heads import train_head
from fedjax_pfl.ops.losses import label_loss
from fedjax_pfl.ops.prototypes import (
    Prototypes,
    Reduction,
    centre_loss,
    pool_prototypes,
    prototype_contrast,
    sums_as_sent,
)
from fedjax_pfl.ops.training import Scalar, Trainer, cache_features, is_off, phase_key


class Server(NamedTuple):
    """Shared: {theta}, or {theta, phi} on FedAvg, and the global prototypes P; None if no term needs them."""

    params: Params
    prototypes: Prototypes | None


class View(NamedTuple):
    """What is sent down and, with class sums in the place of the means, up."""

    params: Params
    per_class: PerClass | None


class Client(NamedTuple):
    """Personal: phi_i (None on FedAvg), and the teacher; None if the term is off."""

    head: Params | None
    teacher: Teacher | None


def fedcpd(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
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
    Clipping treats theta and psi_i as one vector. With several epochs, a teacher's maps are computed once (`taught`).

    Args:
      model: extractor and head; gamma > 0 asks for feature maps.
      train: the local trainer.
      combine: how the server averages theta, and phi where it is shared.
      alpha: weight of the alignment, the distance to the prototype of the own class.
      beta: weight of the contrast, the own class's prototype against all others.
      gamma: weight of the distillation from the client's last extractor; in 8 rounds no effect up to 1, 100 diverges.
      tau: temperature of the contrast.
      head_epochs: epochs of the head phase, before the extractor's; the paper's text alternates in each iteration.
      base: the method that the terms are added to; ``"fedavg"`` shares the head and trains the model as one (Fig. 2).
      reduction: the alignment as mean or, as the paper writes it, as sum over the features.

    Raises:
      ValueError: gamma > 0 and the model has no feature maps.

    Reference:
      K. Jin et al. FedCPD: Personalized Federated Learning with Prototype-Enhanced Representation and Memory
      Distillation. IJCAI 2025. It states no alpha, beta, gamma or tau: ours are chosen by validation
      (benchmarks/accuracy.md), which does not tell gamma = 0.1 from 0.
    """
    weights: dict[str, Scalar] = {"alpha": alpha, "beta": beta, "gamma": gamma}
    on = {name: weight for name, weight in weights.items() if not is_off(weight)}
    if "gamma" in on and not model.maps:
        raise ValueError("its distillation (gamma > 0) needs a model with feature maps")

    def init(key: Key[Array, ""], clients: int) -> tuple[Server, Client]:
        params: Params = model.init(key)
        shared, head = (params, None) if base == "fedavg" else ({"extractor": params["extractor"]}, params["head"])
        prototypes = Prototypes.none(model.classes, model.dim) if on.keys() & {"alpha", "beta"} else None
        teacher = Teacher.none(phase_key(key, "distiller"), params["extractor"], model.maps) if "gamma" in on else None
        return Server(shared, prototypes), Client(head, teacher)

    def broadcast(server: Server) -> View:
        return View(server.params, None if server.prototypes is None else server.prototypes.as_sent())

    def whole(params: Params, head: Params | None) -> Params:
        return params if base == "fedavg" else {**params, "head": head}

    def local(now: Round, view: View, client: Client, data: ClientData) -> Update:
        head, teacher = client
        if base == "fedrep":
            features = cache_features(lambda x: model.features(view.params["extractor"], x), data)
            head = train_head(now, model, train, head, features, epochs=head_epochs)
        prototypes = None if view.per_class is None else Prototypes.as_received(view.per_class)
        psi = None if teacher is None else teacher.distiller
        samples, look = taught(model, teacher, data, epochs=train.epochs)

        def loss(
            w: Params, batch: Batch, key: Key[Array, ""], *, psi: Params, ce: float = 1.0, on: dict[str, Scalar] = on
        ) -> Float[Array, ""]:
            params, (x, distance) = whole(w, head), look(batch)
            z, maps = model.features_and_maps(params["extractor"], x, batch.mask)
            total = ce * label_loss(model, z, model.classify(params["head"], z), batch)
            if prototypes is not None and "alpha" in on:
                total += on["alpha"] * centre_loss(z, batch.y, batch.mask, prototypes, reduction=reduction)
            if prototypes is not None and "beta" in on:
                total += on["beta"] * prototype_contrast(z, batch.y, batch.mask, prototypes, temperature=tau)
            return total + on["gamma"] * distance(psi, maps) if "gamma" in on else total

        alone = {name: partial(loss, psi=psi, ce=0.0, on={name: weight}) for name, weight in on.items()}
        said = train.gradient_ratios(now, partial(loss, psi=psi, on={}), alone, view.params, samples)
        (params, psi), info = train(now, lambda w, *rest: loss(w[0], *rest, psi=w[1]), (view.params, psi), samples)
        client = Client(head, None if teacher is None else Teacher(params["extractor"], jnp.array(True), psi))
        per_class = None if prototypes is None else sums_as_sent(model, params["extractor"], data)
        return Update(client, View(params, per_class), info, diagnostics=said)

    def aggregate(now: Round, server: Server, clients: Client, uploads: View, cohort: Cohort) -> tuple[Server, Client]:
        prototypes = server.prototypes
        if prototypes is not None and uploads.per_class is not None:
            prototypes = pool_prototypes(prototypes, uploads.per_class)
        return Server(combine(uploads.params, cohort.weight), prototypes), clients

    def personal(view: View, client: Client) -> Params:
        return whole(view.params, client.head)

    def global_predict(server: Server, x: Samples) -> Logits:
        return model.apply(server.params, x)

    shared_model = global_predict if base == "fedavg" else None
    return Method(init, local, aggregate, personal, model.apply, broadcast=broadcast, global_predict=shared_model)
