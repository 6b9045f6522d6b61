"""FedProto (Tan et al., AAAI 2022), Algorithm 1: personal models that agree on the mean features of each class."""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from annotated_types import Ge
from jaxtyping import Array, Float, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Logits, Method, PerClass, Round, Samples, Update
from fedjax_pfl.methods.local import local as local_alone
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.losses import label_loss
from fedjax_pfl.ops.prototypes import (
    Prototypes,
    centre_loss,
    class_means,
    distances,
    pool_prototypes,
    sums_as_sent,
)
from fedjax_pfl.ops.training import Trainer, is_off

Reading = Literal["head", "prototype"]


def fedproto(
    model: Model,
    train: Trainer,
    *,
    lam: Annotated[float, Ge(0)] = 1.0,
    reading: Reading = "head",
    weighting: Literal["samples", "uniform"] = "samples",
) -> Method:
    """FedProto: clients train on CE + lam MSE(z, P_y) and send class means of their features, but no parameters.

    Shared: P. Personal: w_i. Headline: PRE, the client's unchanged model and the newest P, the point that PFLlib
    evaluates (there by the nearest prototype); with ``reading = "head"`` it is the model of the client's last POST.

    The pull acts on each feature, as in all public code; in the paper it acts on a client's class means. Prototypes
    come from a pass over the samples with the trained model; the official code and PFLlib collect features while the
    model still changes. All classes with a prototype are candidates; the official test routine considers only those
    that a client holds. lam = 0 is Local, bit for bit, and exchanges nothing unless the reading needs P.

    Args:
      model: extractor and head; all clients start from the same parameters.
      train: the local trainer.
      lam: lambda, weight of the pull to P; the paper's is 1 on MNIST and FEMNIST, 0.1 on CIFAR-10.
      reading: what decides: each client's own ``"head"``, as in methods that share weights, or the nearest
        ``"prototype"``, as in the paper. The latter gives a class without a prototype the logit -1e9: it is no answer
        (before there is any prototype, class 0 is), and each of its samples costs a loss of about 1e9. Such a loss says
        that prototypes are missing; it is finite, so that the run is not marked as diverged.
      weighting: P_c as the mean over all ``"samples"``, which is the paper's weights |D_ij| / N_j without a further
        factor 1 / |N_j|, which would shrink P_c; or as the unweighted mean of the clients' means, as in all public
        code.

    Reference:
      Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang. FedProto: Federated Prototype Learning across
      Heterogeneous Clients. AAAI 2022. arXiv:2105.00243.
    """
    if is_off(lam) and reading == "head":
        return local_alone(model, train)._replace(headline="pre")

    def init(key: Key[Array, ""], clients: int) -> tuple[Prototypes, Params]:
        return Prototypes.none(model.classes, model.dim), model.init(key)

    def broadcast(server: Prototypes) -> PerClass:
        return server.as_sent()

    def local(now: Round, view: PerClass, client: Params, data: ClientData) -> Update:
        prototypes = Prototypes.as_received(view)

        def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            z = model.features(params["extractor"], batch.x, batch.mask)
            ce = label_loss(model, z, model.classify(params["head"], z), batch)
            return ce if is_off(lam) else ce + lam * centre_loss(z, batch.y, batch.mask, prototypes)

        params, info = train(now, loss, client, data)
        return Update(params, sums_as_sent(model, params["extractor"], data), info, post=(view, params))

    def aggregate(
        now: Round, server: Prototypes, clients: Params, uploads: PerClass, cohort: Cohort
    ) -> tuple[Prototypes, Params]:
        if weighting == "uniform":
            means, held = jax.vmap(class_means)(uploads.rows, uploads.held)
            uploads = PerClass(held.astype(jnp.float32), means)
        return pool_prototypes(server, uploads), clients

    def personal(view: PerClass, client: Params) -> Params:
        return client if reading == "head" else {**client, "prototypes": Prototypes.as_received(view)}

    def nearest(params: Params, x: Samples) -> Logits:
        prototypes = params["prototypes"]
        apart = distances(model.features(params["extractor"], x), prototypes.mean)
        return jnp.where(prototypes.valid, -apart, -1e9)

    return Method(init, local, aggregate, personal, model.apply if reading == "head" else nearest, broadcast)
