"""Fed-RoD (Chen and Chao, ICLR 2022): a generic head on balanced losses, and a personal head added to its logits."""

from typing import Annotated

from annotated_types import Ge
from jax import lax
from jaxtyping import Array, Float, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Logits, Method, Round, Samples, Update
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.losses import balanced_cross_entropy, cross_entropy, regularized
from fedjax_pfl.ops.training import Trainer


def fedrod(
    model: Model, train: Trainer, combine: Combine = weighted_mean, *, strength: Annotated[float, Ge(0)] = 1.0
) -> Method:
    """Fed-RoD: theta and G train on the balanced softmax of G(z), P on the plain one of G(z) + P(z), G(z) and z fixed.

    Shared: theta, G. Personal: P, a linear head. Headline: PRE, which predicts with both heads; the global model uses
    only G.

    The reported loss is the sum of both losses. A class that a client does not hold counts in its prior as if it had
    one sample; public codes take log 0, and so exclude it from the client's softmax. P starts as G does, as in these
    codes; PRE of a client that has never taken part therefore adds the logits of an untrained head. The paper's
    hypernetwork, which gives new clients a P, is left out.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models.
      strength: factor on the prior log n_ic in the loss of theta and G. With 0 these are FedAvg's, up to rounding (a
        limit on the gradient's norm, off by default, would also include the gradient of P).

    Reference:
      H.-Y. Chen, W.-L. Chao. On Bridging Generic and Personalized Federated Learning for Image Classification.
      ICLR 2022. arXiv:2107.00778.
    """
    base = fedavg(model, train, combine)

    def init(key: Key[Array, ""], clients: int) -> tuple[Params, Params]:
        server, _ = base.init(key, clients)
        return server, server["head"]

    def local(now: Round, view: Params, client: Params, data: ClientData) -> Update:
        def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            z = model.features(params["extractor"], batch.x, batch.mask)
            generic = model.classify(params["head"], z)
            balanced = balanced_cross_entropy(generic, batch.y, batch.mask, data.class_counts, strength=strength)
            both = lax.stop_gradient(generic) + model.classify(params["personal"], lax.stop_gradient(z))
            return regularized(model, balanced, z, batch.mask) + cross_entropy(both, batch.y, batch.mask)

        params, info = train(now, loss, personal(view, client), data)
        shared = {name: part for name, part in params.items() if name != "personal"}
        return Update(params["personal"], shared, info)

    def personal(view: Params, client: Params) -> Params:
        return {**view, "personal": client}

    def predict(params: Params, x: Samples) -> Logits:
        z = model.features(params["extractor"], x)
        return model.classify(params["head"], z) + model.classify(params["personal"], z)

    return base._replace(init=init, local=local, personal=personal, predict=predict)
