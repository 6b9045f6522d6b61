"""Ditto (Li et al., ICML 2021): FedAvg, plus a personal model on each client that is tied to the global model."""

from typing import Annotated

from annotated_types import Ge
from jaxtyping import Array, Float, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Method, Round, Update
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.losses import proximal, supervised
from fedjax_pfl.ops.training import Trainer, is_off


def ditto(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    lam: Annotated[float, Ge(0)] = 1.0,
    personal_epochs: Annotated[int, Ge(0)] | None = None,
) -> Method:
    """Ditto: the global branch is FedAvg; the personal branch trains v_i on CE + (lam / 2) ||v_i - w^t||^2.

    Shared: w. Personal: v_i. Headline: POST (equal to the next round's PRE).

    w^t is the model that was received. Both branches see the same batches (the official code alternates single steps of
    the two). Participants are sampled uniformly and averaged by n_i, as in FedAvg (the official code samples them by
    n_i and weights all equally). Stable for lr * lam < 2. lam = 0 trains v_i as Local does.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models.
      lam: strength of the tie; the paper's grid is 0.1, 1, 2.
      personal_epochs: epochs of the personal branch; as many as local training unless given.

    Reference:
      T. Li, S. Hu, A. Beirami, V. Smith. Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021.
      arXiv:2012.04221.
    """
    base = fedavg(model, train, combine)

    def init(key: Key[Array, ""], clients: int) -> tuple[Params, Params]:
        server, _ = base.init(key, clients)
        return server, server

    def local(now: Round, view: Params, client: Params, data: ClientData) -> Update:
        def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            ce = supervised(model, params, batch)
            return ce if is_off(lam) else ce + proximal(params, view, lam)

        branch = base.local(now, view, (), data)
        personal, _ = train(now, loss, client, data, epochs=personal_epochs, record=False)
        return branch._replace(client=personal)

    def personal(view: Params, client: Params) -> Params:
        return client

    return base._replace(init=init, local=local, personal=personal, headline="post")
