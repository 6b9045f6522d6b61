"""FedETF (Li et al., ICCV 2023): a fixed simplex instead of the head, and extractors that are trained for it."""

from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt
from jax import lax
from jaxtyping import Array, Float, Int, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Logits, Method, Round, Samples, Update
from fedjax_pfl.models.base import Model, Params, dense
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.losses import balanced_cross_entropy, cross_entropy, regularized
from fedjax_pfl.ops.prototypes import l2_normalize
from fedjax_pfl.ops.training import Trainer, cache_features, phase_key

ETF = Float[Array, "d C"]


def fedetf(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    gamma: Annotated[float, Ge(0)] = 1.0,
    projection_dim: Annotated[int, Ge(2)] | None = None,
    scale: Annotated[float, Gt(0)] = 1.0,
    finetune_loops: Annotated[int, Ge(0)] = 20,
    finetune_epochs: Annotated[int, Ge(0)] = 3,
    etf_lr: Annotated[float, Gt(0)] = 0.1,
    projection_lr: Annotated[float, Gt(0)] = 0.05,
) -> Method:
    """FedETF: logits s V' mu of the normalised projection mu of z; theta, projection and s are trained on balanced CE.

    Shared: theta, projection, s; V stays as it was drawn, and is not counted. Personal: nothing that is kept.
    Headline: PRE, which is measured after fine-tuning: one more local training, then V_i and the projection in turns,
    by plain CE on fixed features.

    With ``run.eval_every = training.rounds`` only the last global model is fine-tuned, as in the paper. A class that a
    client lacks counts as a class with a single sample, as in the official code. That code leaves s out of its
    predictions, which are the same as long as s > 0, and keeps the momentum of the local optimisers from round to
    round. The model's own linear head is not used.

    Args:
      model: extractor; its head is neither trained nor sent.
      train: the local trainer; in fine-tuning its momentum and weight decay also apply to the projection, but not to
        V_i.
      combine: the server's rule for averaging theta, projection and s.
      gamma: strength of the class prior in training; 0 for plain CE.
      projection_dim: d, at least C; C unless given. Official: C for the ResNets, 64 for the CNN.
      scale: s of round 0; it hardly grows at a small rate. Official: 1 for the ResNets, 10 for the CNN.
      finetune_loops: number of turns of fine-tuning.
      finetune_epochs: epochs of each half of a turn.
      etf_lr: learning rate of V_i; it and ``projection_lr`` decay as the local rate, and are constant in the official
        code.
      projection_lr: learning rate of the projection.

    Raises:
      ValueError: there is one class only, or d is less than the number of classes.

    Reference:
      Z. Li, X. Shang, R. He, T. Lin, C. Wu. No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning
      with Synthetic and Fixed Classifier. ICCV 2023. arXiv:2303.10058.
    """
    if model.classes < 2:
        raise ValueError("a simplex needs two classes or more")
    dim = model.classes if projection_dim is None else projection_dim
    if dim < model.classes:
        raise ValueError(f"projection_dim = {dim} is less than the {model.classes} classes")
    projection = dense(dim, "torch", model.dim, "projection")

    def init(key: Key[Array, ""], clients: int) -> tuple[Params, ETF]:
        projected = projection.init(phase_key(key, "projection"), jnp.zeros((1, model.dim)))
        etf = _simplex(phase_key(key, "etf"), dim, model.classes)
        extractor = model.init(key)["extractor"]
        s = jnp.full((), scale, jnp.float32)
        return {"extractor": extractor, "projection": projected["params"], "scale": s, "etf": etf}, etf

    def broadcast(server: Params) -> Params:
        return {name: part for name, part in server.items() if name != "etf"}

    def decide(params: Params, z: Float[Array, "batch K"]) -> Logits:
        projected: Any = projection.apply({"params": params["projection"]}, z)
        logits: Logits = params["scale"] * (l2_normalize(projected) @ params["etf"])
        return logits

    def trained(now: Round, view: Params, etf: ETF, data: ClientData, phase: str) -> Update:
        def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            z = model.features(params["extractor"], batch.x, batch.mask)
            logits = decide({**params, "etf": etf}, z)
            ce = balanced_cross_entropy(logits, batch.y, batch.mask, data.class_counts, strength=gamma)
            return regularized(model, ce, z, batch.mask)

        params, info = train(now, loss, view, data, phase=phase, record=phase == "local")
        return Update(etf, params, info)

    def local(now: Round, view: Params, client: ETF, data: ClientData) -> Update:
        return trained(now, view, client, data, "local")

    def aggregate(now: Round, server: Params, clients: ETF, uploads: Params, cohort: Cohort) -> tuple[Params, ETF]:
        return {**server, **combine(uploads, cohort.weight)}, clients

    def personal(view: Params, client: ETF) -> Params:
        return {**view, "etf": client}

    def predict(params: Params, x: Samples) -> Logits:
        return decide(params, model.features(params["extractor"], x))

    def personalize(now: Round, view: Params, client: ETF, data: ClientData) -> tuple[Params, ETF]:
        tuned = trained(now, view, client, data, "finetune").upload
        features = cache_features(partial(model.features, tuned["extractor"]), data)
        plain = replace(train, momentum=0.0, weight_decay=0.0)
        fit_etf, fit_projection = (partial(fit, epochs=finetune_epochs, record=False) for fit in (plain, train))

        def loss(part: Params, batch: Batch, key: Key[Array, ""], *, others: Params) -> Float[Array, ""]:
            return cross_entropy(decide({**others, **part}, batch.x), batch.y, batch.mask)

        def turn(number: Int[Array, ""], parts: tuple[Params, Params]) -> tuple[Params, Params]:
            etf, projected = parts
            now_turn = Round(jax.random.fold_in(now.key, number), now.t)
            under = partial(loss, others={**tuned, **projected})
            etf, _ = fit_etf(now_turn, under, etf, features, phase="etf", lr=etf_lr)
            under = partial(loss, others={**tuned, **etf})
            projected, _ = fit_projection(now_turn, under, projected, features, phase="projection", lr=projection_lr)
            return etf, projected

        start = {"etf": client}, {"projection": tuned["projection"]}
        etf, projected = lax.fori_loop(0, finetune_loops, turn, start)
        return {**tuned, **projected}, etf["etf"]

    return Method(init, local, aggregate, personal, predict, broadcast, personalize=personalize, global_predict=predict)


def _simplex(key: Key[Array, ""], dim: int, classes: int) -> ETF:
    """V = sqrt(C / (C - 1)) U (I - 11' / C), U with orthonormal columns: C unit vectors as far apart as possible."""
    orthonormal, _ = jnp.linalg.qr(jax.random.normal(key, (dim, classes)))
    centred = orthonormal - jnp.mean(orthonormal, axis=1, keepdims=True)
    return jnp.sqrt(classes / (classes - 1)) * centred
