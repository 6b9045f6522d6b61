"""FedFCD (Algorithm 1): clients exchange class means of features, and a head that the server trains on these."""

from functools import partial
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt
from jaxtyping import Array, Float, Int, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Logits, Method, PerClass, Round, Samples, TrainInfo, Update
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.heads import train_head
from fedjax_pfl.ops.losses import label_loss
from fedjax_pfl.ops.prototypes import (
    Prototypes,
    Reduction,
    centre_loss,
    class_means,
    means_as_samples,
    pool_prototypes,
    sums_as_sent,
)
from fedjax_pfl.ops.training import Loss, Scalar, Trainer, cache_features, is_off


class Server(NamedTuple):
    """Shared: phi_g, and the global feature representations (GFR)."""

    head: Params
    representations: Prototypes


class View(NamedTuple):
    """What is sent down: phi_g, or None without fusion; and the GFR, or None if lambda is 0."""

    head: Params | None
    representations: PerClass | None


def fedfcd(
    model: Model,
    train: Trainer,
    *,
    lam: Annotated[float, Ge(0)] = 1.0,
    fusion: bool = True,
    hierarchical: bool = True,
    train_extractor_on: Literal["fused", "local"] = "fused",
    server_lr: Annotated[float, Gt(0)] = 0.01,
    server_epochs: Annotated[int, Ge(0)] = 1,
    server_batch_size: Annotated[int, Ge(1)] = 10,
    reduction: Reduction = "mse",
) -> Method:
    """FedFCD: no client parameters are uploaded, only class means of features; two heads decide together.

    Shared: phi_g, GFR. Personal: theta_i, phi_i. Headline: PRE, with the newest phi_g; POST is with the received one.
    Each of ``training.epochs`` is a pass for the extractor, then one for the head. The paper states no epochs or batch
    sizes.

    Args:
      model: extractor and head; all extractors start from the same parameters.
      train: the local trainer.
      lam: lambda, weight of the pull to the GFR (Eq. 6); the paper's is 1 on Fashion-MNIST and 5 on CIFAR.
      fusion: whether the logits of both heads are added (Eqs. 7, 8), or only the personal head decides.
      hierarchical: whether extractor and head are trained in turns (Eqs. 9, 10), or in one pass.
      train_extractor_on: logits in the extractor's loss: the sum of both heads, or only the personal head, as Eq. 9
        prints; in one pass they are also those in the head's loss.
      server_lr: lr_g, the learning rate of phi_g.
      server_epochs: passes of the server over the class means of a round.
      server_batch_size: class means per step of the server.
      reduction: whether the pull is a mean or a sum over the features.

    Reference:
      K. Li, X. Wang, H. Wang. Hierarchical Optimization Method for Federated Learning with Feature Alignment and
      Decision Fusion. Computers, Materials & Continua, 2024. doi:10.32604/cmc.2024.054484. Algorithm 1, Eqs. 5-10.
    """
    train_server = Trainer(epochs=server_epochs, batch_size=server_batch_size, lr=server_lr)

    def init(key: Key[Array, ""], clients: int) -> tuple[Server, Params]:
        params: Params = model.init(key)
        return Server(params["head"], Prototypes.none(model.classes, model.dim)), params

    def broadcast(server: Server) -> View:
        return View(server.head if fusion else None, None if is_off(lam) else server.representations.as_sent())

    def decide(shared: Params | None, head: Params, z: Float[Array, "batch K"]) -> Logits:
        own = model.classify(head, z)
        return own if shared is None else own + model.classify(shared, z)

    def setup(now: Round, view: View, client: Params, data: ClientData) -> tuple[Params, PerClass]:
        return client, sums_as_sent(model, client["extractor"], data)

    def local(now: Round, view: View, client: Params, data: ClientData) -> Update:
        targets = None if view.representations is None else Prototypes.as_received(view.representations)
        beside = view.head if train_extractor_on == "fused" else None
        deciding = model._replace(classify=partial(decide, view.head))

        def loss(
            theta: Params, batch: Batch, key: Key[Array, ""], *, phi: Params, ce: float = 1.0, pull: Scalar = lam
        ) -> Float[Array, ""]:
            z = model.features(theta, batch.x, batch.mask)
            total = ce * label_loss(model, z, decide(beside, phi, z), batch)
            if targets is not None and not is_off(pull):
                total += pull * centre_loss(z, batch.y, batch.mask, targets, reduction=reduction)
            return total

        def fusion_loss(theta: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            """What the shared head adds to the cross-entropy."""
            z, phi = model.features(theta, batch.x, batch.mask), client["head"]
            own, both = (label_loss(model, z, decide(head, phi, z), batch) for head in (None, beside))
            return both - own

        def in_turns(number: Int[Array, ""], carry: tuple[Params, TrainInfo]) -> tuple[Params, TrainInfo]:
            (client, before), turn = carry, Round(jax.random.fold_in(now.key, number), now.t)
            loss_under = partial(loss, phi=client["head"])
            theta, info = train(turn, loss_under, client["extractor"], data, phase="extractor", epochs=1)
            features = cache_features(partial(model.features, theta), data)
            phi = train_head(turn, deciding, train, client["head"], features, epochs=1)
            return {"extractor": theta, "head": phi}, TrainInfo(before.loss + info.loss, before.steps + info.steps)

        under, theta = partial(loss, phi=client["head"]), client["extractor"]
        terms: dict[str, Loss[Params]] = {} if is_off(lam) else {"lam": partial(under, ce=0.0)}
        terms |= {} if beside is None else {"fusion": fusion_loss}
        said = train.gradient_ratios(now, partial(under, pull=0.0), terms, theta, data)
        if hierarchical:
            begun = client, TrainInfo(jnp.zeros(()), jnp.zeros((), jnp.int32))
            client, (total, steps) = jax.lax.fori_loop(0, train.epochs, in_turns, begun)
            info = TrainInfo(total / max(1, train.epochs), steps)
        else:
            client, info = train(now, lambda w, *rest: loss(w["extractor"], *rest, phi=w["head"]), client, data)
        sent = sums_as_sent(model, client["extractor"], data)
        return Update(client, sent, info, post=(view, client), diagnostics=said)

    def aggregate(
        now: Round, server: Server, clients: Params, uploads: PerClass, cohort: Cohort
    ) -> tuple[Server, Params]:
        pairs = means_as_samples(*jax.vmap(class_means)(uploads.rows, uploads.held), cohort.ids)
        head = train_head(now, model, train_server, server.head, pairs, phase="local")
        return Server(head, pool_prototypes(server.representations, uploads)), clients

    def personal(view: View, client: Params) -> Params:
        return {**client, "shared": view.head}

    def predict(params: Params, x: Samples) -> Logits:
        return decide(params["shared"], params["head"], model.features(params["extractor"], x))

    return Method(init, local, aggregate, personal, predict, broadcast, setup=setup)
