"""Any method, with the model that is scored for each client fine-tuned before a PRE evaluation."""

from typing import NamedTuple

from jaxtyping import PyTree

from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.method import Method, Round
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.finetune import Scope, finetune
from fedjax_pfl.ops.training import Scalar, Trainer


class Tuned(NamedTuple):
    """Takes the place of a view: the model that fine-tuning has made of the view and the client."""

    params: Params


def finetuned(method: Method, model: Model, train: Trainer, *, epochs: int, lr: Scalar | None, scope: Scope) -> Method:
    """The method with its PRE models fine-tuned on the client's samples by plain cross-entropy before they are scored.

    Training, the global model and POST are unchanged.

    Args:
      method: the method to which fine-tuning is added.
      model: the model of the method.
      train: the local trainer.
      epochs: E_ft; with 0 nothing changes.
      lr: eta_ft, which decays as the rate of local training does; None for that.
      scope: what is trained: ``"full"``, ``"head"`` or ``"extractor"``.

    Raises:
      ValueError: the method's predict is not ``model.apply`` itself, so that its model may be more than an extractor
        with a head.
    """
    if method.predict is not model.apply:
        more = "it answers by more than an extractor with a head, which is what fine-tuning trains"
        raise ValueError(f"{more} (its predict is not model.apply itself)")

    def personalize(now: Round, view: PyTree, client: PyTree, data: ClientData) -> tuple[Tuned, PyTree]:
        view, client = method.personalize(now, view, client, data)
        params = method.personal(view, client)
        return Tuned(finetune(now, model, train, params, data, epochs=epochs, lr=lr, scope=scope)), client

    def personal(view: PyTree, client: PyTree) -> Params:
        return view.params if isinstance(view, Tuned) else method.personal(view, client)

    return method._replace(personalize=personalize, personal=personal)
