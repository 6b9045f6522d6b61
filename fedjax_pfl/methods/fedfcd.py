"""FedFCD (Algorithm 1): clients exchange class means of features, and a head that the server trains on these."""

from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt
from jax import lax

from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.method import Method, PerClass
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.losses import cross_entropy
from fedjax_pfl.ops.prototypes import (
    Prototypes,
    Reduction,
    centre_loss,
    class_means,
    class_sums_under,
    update_prototypes,
)
from fedjax_pfl.ops.training import Trainer, TrainInfo, cache_features, is_off


class Server(NamedTuple):
    """Shared: phi_g, and the global feature representations (GFR)."""

    head: Params
    representations: Prototypes


class View(NamedTuple):
    """What is sent down."""

    head: Params
    representations: PerClass


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
    """FedFCD: no parameters are exchanged, only class means of features; two heads decide together.

    Shared: phi_g, GFR. Personal: theta_i, phi_i. Headline: PRE, (theta_i, phi_i) with the newest phi_g; POST is with
    the phi_g that was received. ``training.epochs`` counts pairs of passes: one over the extractor, one over the head.
    The paper states neither the epochs and batches of clients nor those of the server.

    Args:
      model: extractor and head; all extractors start from the same parameters.
      train: the local trainer.
      lam: lambda, weight of the pull to the GFR (Eq. 6); the paper's is 1 on Fashion-MNIST and 5 on CIFAR.
      fusion: whether the logits of both heads are added up (Eqs. 7, 8), or the personal head decides alone.
      hierarchical: train extractor and head in turns (Eqs. 9, 10), or in one pass.
      train_extractor_on: the decision whose cross-entropy trains the extractor (in one pass, both).
      server_lr: lr_g of phi_g.
      server_epochs: passes of the server over the class means of a round.
      server_batch_size: class means per step of the server.
      reduction: mean or sum of the pull over the features.

    Reference:
      FedFCD: Algorithm 1, Eqs. 5-10. Its numbers are in benchmarks/papers/.
    """
    train_server = Trainer(epochs=server_epochs, batch_size=server_batch_size, lr=server_lr)

    def init(key):
        params = model.init(key)
        nothing = Prototypes(jnp.zeros((model.classes, model.dim)), jnp.zeros(model.classes, bool))
        return Server(params["head"], nothing), params

    def broadcast(server):
        return View(server.head, PerClass(server.representations.valid, server.representations.mean))

    def decide(view, head, z, *, fused=fusion):
        own = model.classify(head, z)
        return own + model.classify(view.head, z) if fused else own

    def class_features(extractor, data):
        return PerClass(data.class_counts > 0, (class_sums_under(model, extractor, data), data.class_counts))

    def setup(key, view, client, data):
        del key, view
        return client, class_features(client["extractor"], data)

    def local(key, t, view, client, data):
        targets = Prototypes(view.representations.rows, view.representations.held)
        both = fusion and train_extractor_on == "fused"

        def loss(params, batch, key):
            del key
            z = model.features(params["extractor"], batch.x, batch.mask)
            ce = cross_entropy(decide(view, params["head"], z, fused=both), batch.y, batch.mask)
            return ce if is_off(lam) else ce + lam * centre_loss(z, batch.y, batch.mask, targets, reduction=reduction)

        def extractor_pass(key, client):
            def loss_under_heads(extractor, batch, key):
                return loss({**client, "extractor": extractor}, batch, key)

            extractor, info = train(key, t, loss_under_heads, client["extractor"], data, phase="extractor", epochs=1)
            return {**client, "extractor": extractor}, info

        def head_pass(key, client):
            def head_loss(head, batch, key):
                del key
                return cross_entropy(decide(view, head, batch.x), batch.y, batch.mask)

            features = cache_features(lambda x: model.features(client["extractor"], x), data)
            return {**client, "head": train(key, t, head_loss, client["head"], features, phase="head", epochs=1)[0]}

        def epoch(number, carry):
            client, before = carry
            key_epoch = jax.random.fold_in(key, number)
            client, info = extractor_pass(key_epoch, client)
            return head_pass(key_epoch, client), TrainInfo(before.loss + info.loss, before.steps + info.steps)

        if hierarchical:
            nothing = TrainInfo(jnp.zeros(()), jnp.zeros((), jnp.int32))
            client, (total, steps) = lax.fori_loop(0, train.epochs, epoch, (client, nothing))
            info = TrainInfo(total / max(1, train.epochs), steps)
        else:
            client, info = train(key, t, loss, client, data)
        return client, class_features(client["extractor"], data), info

    def aggregate(key, t, server, clients, uploads, cohort):
        sums, counts = uploads.rows

        def loss(head, batch, key):
            del key
            return cross_entropy(model.classify(head, batch.x), batch.y, batch.mask)

        pairs = _class_mean_pairs(sums, counts, cohort.ids)
        head, _ = train_server(key, t, loss, server.head, pairs)
        new = class_means(jnp.sum(sums, axis=0), jnp.sum(counts, axis=0))
        return Server(head, update_prototypes(server.representations, new)), clients

    def predict(view, client, x):
        return decide(view, client["head"], model.features(client["extractor"], x))

    def trained(view, client, upload):
        del upload
        return view, client

    return Method(init, local, aggregate, predict, broadcast=broadcast, trained=trained, setup=setup)


def _class_mean_pairs(sums, counts, ids) -> ClientData:
    """What the server trains on: the pairs (LFR_ik, k) as though they were the samples of a client.

    Args:
      sums: class sums of each client, [clients, C, K].
      counts: samples of each client and class, [clients, C].
      ids: of the clients; they order the pairs, which the placement must not.
    """
    clients, classes = counts.shape
    means, held = jax.vmap(class_means)(sums, counts)
    rank = (ids[:, None] * classes + jnp.arange(classes)).reshape(-1)
    return ClientData(
        x=means.reshape(clients * classes, -1),
        y=jnp.tile(jnp.arange(classes), clients),
        index=jnp.argsort(jnp.where(held.reshape(-1), rank, jnp.iinfo(rank.dtype).max)),
        count=jnp.sum(held, dtype=jnp.int32),
        class_counts=jnp.sum(held, axis=0, dtype=jnp.float32),
    )
