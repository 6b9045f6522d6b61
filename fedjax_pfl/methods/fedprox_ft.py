"""FedProx-FT: FedProx, with the global model fine-tuned on each client before it is evaluated."""

from typing import Annotated

from annotated_types import Ge, Gt

from fedjax_pfl.method import Method
from fedjax_pfl.methods.fedprox import fedprox
from fedjax_pfl.methods.finetuned import finetuned
from fedjax_pfl.models.base import Model
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.finetune import Scope
from fedjax_pfl.ops.training import Trainer


def fedprox_ft(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    mu: Annotated[float, Ge(0)] = 0.01,
    finetune_epochs: Annotated[int, Ge(0)] = 5,
    finetune_lr: Annotated[float, Gt(0)] | None = None,
    finetune_scope: Scope = "full",
) -> Method:
    """FedProx-FT: FedProx's global model, fine-tuned by plain cross-entropy (no proximal term) before evaluation.

    Shared: w. Personal: nothing that is kept. Headline: PRE. It differs from FedAvg-FT only in the global model; mu = 0
    is FedAvg-FT, bit for bit.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models.
      mu: strength of the proximal term in the rounds.
      finetune_epochs: E_ft.
      finetune_lr: eta_ft; the local learning rate unless given. It decays as that does.
      finetune_scope: ``"full"``, ``"head"`` or ``"extractor"``.

    Reference:
      FedProx (arXiv:1812.06127) with the fine-tuning of FedAvg-FT.
    """
    proximal = fedprox(model, train, combine, mu=mu)
    return finetuned(proximal, model, train, epochs=finetune_epochs, lr=finetune_lr, scope=finetune_scope)
