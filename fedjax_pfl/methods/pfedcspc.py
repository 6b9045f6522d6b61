"""pFedCSPC: personal encoders for the clients, and a global model that the server calibrates on all prototypes."""

import math
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt, Le
from jax import lax
from pydantic import Strict

from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.method import Method, PerClass
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import weighted_mean
from fedjax_pfl.ops.calibration import augment_prototypes, augmented_contrast, gather, weighted_contrast
from fedjax_pfl.ops.cluster import kmeans, sample_means
from fedjax_pfl.ops.losses import cross_entropy, masked_mean, proximal
from fedjax_pfl.ops.prototypes import Prototypes, directions, prototype_contrast, update_prototypes
from fedjax_pfl.ops.relations import Penalty, angle_alignment, edge_alignment
from fedjax_pfl.ops.training import Trainer, cache_features, is_off, phase_key


class Server(NamedTuple):
    """Shared: the global model (E_g, H, F), H and F calibrated, and what the server knows of the classes.

    Attributes:
      params: the global model.
      prototypes: u_g, in the space of the encoders; None if no module needs them.
      exemplars: e, in the space of the calibrated projections; likewise.
    """

    params: Params
    prototypes: Prototypes | None
    exemplars: Prototypes | None


class View(NamedTuple):
    """What is sent down to all: H, F, the prototypes u_g if they guide training, and E_g unless each gets its own."""

    encoder: Params | None
    projection: Params
    head: Params
    prototypes: PerClass | None


class Client(NamedTuple):
    """Personal: the encoder of m_k, which the server combines from the participants' encoders."""

    inbox: Params


class Upload(NamedTuple):
    """What is sent up: the trained model, and the prototypes U_k of the classes held with a flag per cluster."""

    params: Params
    prototypes: PerClass | None


def pfedcspc(
    model: Model,
    train: Trainer,
    *,
    kappa: Annotated[float, Ge(0)] = 0.1,
    eta: Annotated[float, Ge(0)] = 0.1,
    pmi: Literal["every", "eval", "off"] = "eval",
    tau_p: Annotated[float, Gt(0)] = 0.5,
    calibrate: bool = True,
    clusters: Annotated[int, Ge(1)] = 3,
    repeats: Annotated[int, Ge(1)] = 5,
    share: Annotated[float, Gt(0), Le(1)] = 0.8,
    kmeans_steps: Annotated[int, Ge(0)] = 20,
    augmented: Annotated[int, Ge(0)] = 5,
    margin: Annotated[float, Ge(0)] = 1.0,
    tau_l: Annotated[float, Gt(0)] = 0.5,
    tau_g: Annotated[float, Gt(0)] = 0.5,
    edge: Penalty = "abs",
    kp_weight: Annotated[float, Ge(0), Le(1)] = 0.5,
    kp_norm: Literal["minmax", "softmax", "none"] = "minmax",
    base: Literal["fedavg", "fedprox"] = "fedavg",
    mu: Annotated[float, Ge(0)] = 0.01,
    server_lr: Annotated[float, Gt(0)] = 0.01,
    server_lr_drops: Annotated[tuple[int, ...], Strict(False)] = (40,),
    server_epochs: Annotated[int, Ge(0)] = 100,
    server_epochs_per_drop: Annotated[int, Ge(1)] = 30,
    server_batch_size: Annotated[int, Ge(1)] = 100,
    server_weight_decay: Annotated[float, Ge(0)] = 1e-5,
) -> Method:
    """pFedCSPC: one method for a better global model and for better personal ones.

    Clients train guided by global prototypes, and cluster their features into prototypes. The server retrains
    projection head and classifier of the averaged model on the prototypes of all, and combines a personal initial model
    m_k for each client from the encoders of all; local adaptation makes the personal model of it.

    Shared: w_g, u_g, e. Personal: the encoder of m_k. Headline: PRE, m_k after local adaptation; with another ``pmi``
    than ``eval``, where PRE is not adapted, POST. The paper's global accuracy is ``global``, its I_local is
    ``i_local``. With every module off it is FedAvg, and POST is FedAvg-FT.

    Args:
      model: encoder, projection head and classifier.
      train: the local trainer.
      kappa: weight of the alignment with the global prototypes (PTA); the paper's grid is 0.01, 0.05, 0.1, 0.5.
      eta: weight of both contrastive losses of the server; the same grid.
      pmi: what personal initial models are for. ``eval``: for evaluation alone, where they are adapted by
        ``training.epochs`` before PRE; training starts from the global model. ``every``: training starts from them in
        every round, and PRE is not adapted. ``off``: there are none. The paper does not say. Its ablation of the global
        model does without them and ends at the figure of the whole method, which speaks for ``eval``.
      tau_p: temperature of the weights of PMI, not in the paper.
      calibrate: whether the server retrains H and F (CA).
      clusters: j, clusters per class (CPM).
      repeats: n_repeat, prototypes per cluster.
      share: r, the share of a cluster's samples in a prototype. One prototype per class: 1 of each of these (TPG).
      kmeans_steps: Lloyd's steps.
      augmented: n_aug, pairs of augmented samples per prototype (PA); 0 leaves their loss out.
      margin: alpha of their loss.
      tau_l: temperature of the contrast with the global prototypes.
      tau_g: temperature of the contrast between the clients' prototypes.
      edge: how the edge alignment measures a difference; the paper's L2 norm of a number is its absolute value.
      kp_weight: lambda, weight of the exemplars in the global model's prediction (KP), not in the paper.
      kp_norm: how logits and similarities are brought to one scale, per sample; not in the paper.
      base: the client's loss that the alignment is added to (Table VI).
      mu: strength of FedProx's term.
      server_lr: learning rate of the server in the first rounds, not in the paper. FedCSPC's code has 0.1 in the first
        6 rounds, then 0.01, and 0.001 from round 40 on. With 0.1 our global model stays behind FedAvg's on CIFAR-10.
      server_lr_drops: rounds from which on it is a tenth of what it was; (6, 40) in FedCSPC's code.
      server_epochs: passes over the prototypes.
      server_epochs_per_drop: passes after which the learning rate is a tenth of what it was, within a round.
      server_batch_size: prototypes per step.
      server_weight_decay: L2 coefficient of the server.

    Raises:
      ValueError: the model has no projection head.

    Reference:
      pFedCSPC (IEEE TNNLS 2025): Eqs. 2-18. The server's training is that of its predecessor FedCSPC's code, but for
      the learning rate. The paper's numbers are in benchmarks/papers/.
    """
    if model.projection is None:
        raise ValueError("it needs a model with a projection head, such as cnn_proj or resnet18_proj")
    encode, project_batch, dim = model.projection
    guided, known = not is_off(kappa), not is_off(kp_weight)
    uses_prototypes = guided or known or calibrate or pmi != "off"
    train_server = Trainer(batch_size=server_batch_size, weight_decay=server_weight_decay)

    def project(theta, f):
        """H on points that may be arranged in any way, [..., dim]."""
        return project_batch(theta, f.reshape(-1, dim)).reshape(*f.shape[:-1], model.dim)

    def init(key):
        params = model.init(key)
        none = jnp.zeros(model.classes, bool)
        prototypes = Prototypes(jnp.zeros((model.classes, dim)), none) if uses_prototypes else None
        exemplars = Prototypes(jnp.zeros((model.classes, model.dim)), none) if uses_prototypes else None
        client = () if pmi == "off" else Client(params["extractor"]["encoder"])
        return Server(params, prototypes, exemplars), client

    def broadcast(server):
        extractor, prototypes = server.params["extractor"], server.prototypes
        return View(
            encoder=None if pmi == "every" else extractor["encoder"],
            projection=extractor["projection"],
            head=server.params["head"],
            prototypes=PerClass(prototypes.valid, prototypes.mean) if guided else None,
        )

    def join(encoder, view):
        return {"extractor": {"encoder": encoder, "projection": view.projection}, "head": view.head}

    def adapt(key, t, view, start, data):
        """Local training on L_base + kappa L_align (Eqs. 5-7, 18)."""

        def align(f, y, mask):
            prototypes = Prototypes(view.prototypes.rows, view.prototypes.held)
            node = prototype_contrast(f, y, mask, prototypes, temperature=tau_l)
            angle = angle_alignment(f, y, mask, prototypes)
            return node + angle + edge_alignment(f, y, mask, prototypes, penalty=edge)

        def loss(params, batch, key):
            del key
            f = encode(params["extractor"], batch.x, batch.mask)
            logits = model.classify(params["head"], project(params["extractor"], f))
            total = cross_entropy(logits, batch.y, batch.mask)
            if base == "fedprox" and not is_off(mu):
                total += proximal(params, start, mu)
            return total + kappa * align(f, batch.y, batch.mask) if guided else total

        return train(key, t, loss, start, data)

    def prototypes_of(key, encoder, data):
        """CPM: cluster the features of each class, and average random shares of each cluster (Eqs. 8, 9)."""
        data = data if data.original is None else data.original
        features = cache_features(lambda x: encode({"encoder": encoder}, x), data)
        key_centres, key_draws = jax.random.split(phase_key(key, "prototypes"))
        options = {"classes": model.classes, "clusters": clusters, "steps": kmeans_steps}
        groups = kmeans(key_centres, features.x, features.y, data.valid, **options)
        means = sample_means(key_draws, features.x, groups, repeats=repeats, share=share)
        return PerClass(data.class_counts > 0, (means, groups.size > 0))

    def local(key, t, view, client, data):
        start = join(client.inbox if pmi == "every" else view.encoder, view)
        params, info = adapt(key, t, view, start, data)
        prototypes = prototypes_of(key, params["extractor"]["encoder"], data) if uses_prototypes else None
        return client, Upload(params, prototypes), info

    def aggregate(key, t, server, clients, uploads, cohort):
        params = weighted_mean(uploads.params, cohort.weight)
        if not uses_prototypes:
            return server._replace(params=params), clients
        means, exists = uploads.prototypes.rows
        u = means.reshape(*means.shape[:2], -1, dim)
        valid = jnp.repeat(exists & uploads.prototypes.held[..., None], repeats, axis=2)
        if pmi != "off":
            weights = initialization_weights(uploads.params, u, valid, cohort.weight > 0)
            encoders = uploads.params["extractor"]["encoder"]
            clients = Client(jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, axes=1), encoders))
        if calibrate:
            params = calibration(key, t, params, u, valid, cohort.ids)
        prototypes = update_prototypes(server.prototypes, _mean_over_clients(u, valid))
        exemplars = update_prototypes(server.exemplars, _mean_over_clients(project(params["extractor"], u), valid))
        return Server(params, prototypes, exemplars), clients

    def initialization_weights(params, u, valid, present):
        """PMI: p_k^{k'} falls with the loss of client k's prototypes under the heads of client k' (Eq. 4), [K, K']."""
        y = jnp.broadcast_to(jnp.arange(model.classes)[None, :, None], valid.shape).reshape(-1)

        def losses_under(heads):
            projection, head = heads
            logits = model.classify(head, project({"projection": projection}, u.reshape(-1, dim)))
            losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1).reshape(len(valid), -1)
            return jax.vmap(masked_mean)(losses, valid.reshape(len(valid), -1).astype(losses.dtype))

        losses = lax.map(losses_under, (params["extractor"]["projection"], params["head"]))
        return jax.nn.softmax(jnp.where(present[:, None], -losses / tau_p, -1e9), axis=0).T

    def calibration(key, t, params, u, valid, ids):
        """CSPC: with E_g frozen, H and F learn to tell the classes of all clients' prototypes (Eqs. 10-13, 17)."""
        corpus = gather(u, valid, ids)
        rows = jnp.arange(len(corpus.y), dtype=jnp.int32)
        data = ClientData(rows, corpus.y, rows, corpus.count, jnp.sum(valid, axis=(0, 2), dtype=jnp.float32))

        def loss(trained, batch, key):
            projection, head = trained

            def projected(u):
                return project({"projection": projection}, u)

            z = projected(corpus.u[batch.x])
            total = cross_entropy(model.classify(head, z), batch.y, batch.mask)
            if is_off(eta):
                return total
            contrast = weighted_contrast(z, batch.y, corpus.client[batch.x], batch.mask, temperature=tau_g)
            if augmented > 0:
                samples = augment_prototypes(key, corpus, batch.x, pairs=augmented)
                positive, negative = projected(samples.positive), projected(samples.negative)
                contrast += augmented_contrast(z, positive, negative, batch.mask * samples.exists, margin=margin)
            return total + eta * contrast

        lr = server_lr * 0.1 ** sum((t >= drop).astype(jnp.float32) for drop in server_lr_drops)

        def epochs_at_one_rate(number, trained):
            epochs = jnp.minimum(server_epochs_per_drop, server_epochs - number * server_epochs_per_drop)
            rate = lr * 0.1 ** number.astype(jnp.float32)
            return train_server(jax.random.fold_in(key, number), t, loss, trained, data, epochs=epochs, lr=rate)[0]

        heads = params["extractor"]["projection"], params["head"]
        drops = math.ceil(server_epochs / server_epochs_per_drop)
        projection, head = lax.fori_loop(0, drops, epochs_at_one_rate, heads)
        return {"extractor": {**params["extractor"], "projection": projection}, "head": head}

    def predict(view, client, x):
        return model.apply(join(view.encoder if pmi == "off" else client.inbox, view), x)

    def personal(view, client, params):
        """(view, client) from which ``predict`` takes this model."""
        extractor = params["extractor"]
        view = view._replace(projection=extractor["projection"], head=params["head"])
        if pmi == "off":
            return view._replace(encoder=extractor["encoder"]), client
        return view, Client(extractor["encoder"])

    def personalize(key, t, view, client, data):
        if pmi != "eval":
            return view, client
        return personal(view, client, adapt(key, t, view, join(client.inbox, view), data)[0])

    def trained(view, client, upload):
        return personal(view, client, upload.params)

    def global_predict(server, x):
        """KP: logits and similarities to the exemplars, on one scale (Eq. 15)."""
        z = model.features(server.params["extractor"], x)
        logits = model.classify(server.params["head"], z)
        if not known:
            return logits
        similarity = jnp.matmul(directions(z), directions(server.exemplars.mean).T)
        valid = server.exemplars.valid
        least = jnp.min(jnp.where(valid, similarity, jnp.inf), axis=1, keepdims=True)
        similarity = jnp.where(valid, similarity, jnp.where(jnp.any(valid), least, 0.0))
        return (1 - kp_weight) * normalise(logits) + kp_weight * normalise(similarity)

    def normalise(scores):
        if kp_norm == "softmax":
            return jax.nn.softmax(scores)
        if kp_norm == "none":
            return scores
        least, most = jnp.min(scores, axis=1, keepdims=True), jnp.max(scores, axis=1, keepdims=True)
        return (scores - least) / (most - least + 1e-8)

    return Method(
        init,
        local,
        aggregate,
        predict,
        broadcast=broadcast,
        personalize=personalize,
        trained=trained,
        global_predict=global_predict,
        headline="pre" if pmi == "eval" else "post",
    )


def _mean_over_clients(points, valid) -> Prototypes:
    """The mean over the clients that hold a class of each client's mean (Eqs. 14, 16).

    Args:
      points: M places per client and class, [K, C, M, d].
      valid: which of these hold one, [K, C, M].
    """
    number = jnp.sum(valid, axis=2, dtype=points.dtype)
    own = jnp.sum(jnp.where(valid[..., None], points, 0.0), axis=2) / jnp.maximum(number, 1.0)[..., None]
    holders = jnp.sum(number > 0, axis=0, dtype=points.dtype)
    # The mean of a client without the class is zero.
    return Prototypes(jnp.sum(own, axis=0) / jnp.maximum(holders, 1.0)[:, None], holders > 0)
