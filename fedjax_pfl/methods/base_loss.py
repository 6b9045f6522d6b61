"""Local losses of base methods, as changes of the cross-entropy: FedAvg and pFedCSPC can train on any of them."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, PyTree

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Logits, Method, Round, TrainInfo, Update
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine
from fedjax_pfl.ops.losses import label_loss
from fedjax_pfl.ops.training import Loss, Trainer

# params, z, logits, batch -> what is added to the cross-entropy, its coefficient included
Term = Callable[[Params, Float[Array, "batch K"], Logits, Batch], Float[Array, ""]]


class BaseLoss(NamedTuple):
    """A local loss, as a change of the plain cross-entropy; without any change it is the cross-entropy itself.

    Attributes:
      term: received, last -> the term that is added, given the model from which training starts and the client's last
        local model; None if nothing is added.
      around: a loss -> the loss whose gradient a step uses instead; None for the loss itself.
      keeps_last: whether the term needs the last local model. If not, and in a client's first participation, ``last``
        is the received model.
    """

    term: Callable[[Params, Params], Term] | None = None
    around: Callable[[Loss[Params]], Loss[Params]] | None = None
    keeps_last: bool = False


class Last(NamedTuple):
    """Personal: the client's last local model, and whether it has trained one."""

    params: Params
    known: Bool[Array, ""]

    def or_received(self, received: Params) -> Params:
        """The last local model, or the received model if the client has not trained yet."""
        return jax.tree.map(lambda own, w: jnp.where(self.known, own, w), self.params, received)

    def replaced(self, params: Params, info: TrainInfo) -> "Last":
        """The state after training; a client without samples has not trained."""
        return Last(params, self.known | (info.steps > 0))


def fedavg_on(base: BaseLoss, model: Model, train: Trainer, combine: Combine) -> Method:
    """FedAvg whose clients train on this loss."""
    averaging = fedavg(model, train, combine)

    def init(key: Key[Array, ""], clients: int) -> tuple[Params, PyTree]:
        server, nothing = averaging.init(key, clients)
        return server, Last(server, jnp.array(False)) if base.keeps_last else nothing

    def local(now: Round, view: Params, client: PyTree, data: ClientData) -> Update:
        last = client.or_received(view) if base.keeps_last else view
        term = None if base.term is None else base.term(view, last)

        def loss(
            params: Params, batch: Batch, key: Key[Array, ""], *, labels: bool = True, added: bool = True
        ) -> Float[Array, ""]:
            z = model.features(params["extractor"], batch.x, batch.mask)
            logits = model.classify(params["head"], z)
            found = label_loss(model, z, logits, batch) if labels else jnp.zeros(())
            return found + term(params, z, logits, batch) if added and term is not None else found

        params, info = train(now, loss if base.around is None else base.around(loss), view, data)
        terms: dict[str, Loss[Params]] = {} if term is None else {"term": partial(loss, labels=False)}
        # At the received model, where training starts, a pull towards it has no gradient.
        said = train.gradient_ratios(now, partial(loss, added=False), terms, params, data)
        own = client.replaced(params, info) if base.keeps_last else client
        return Update(own, params, info, diagnostics=said)

    return averaging._replace(init=init, local=local)
