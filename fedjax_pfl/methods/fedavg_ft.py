"""FedAvg-FT: FedAvg, with the global model fine-tuned on each client before it is evaluated."""

from typing import Annotated

from annotated_types import Ge, Gt

from fedjax_pfl.method import Method
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.finetuned import finetuned
from fedjax_pfl.models.base import Model
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.finetune import Scope
from fedjax_pfl.ops.training import Trainer


def fedavg_ft(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    finetune_epochs: Annotated[int, Ge(0)] = 5,
    finetune_lr: Annotated[float, Gt(0)] | None = None,
    finetune_scope: Scope = "full",
) -> Method:
    """FedAvg-FT: FedAvg; each client fine-tunes the aggregated model before evaluation, and then discards the result.

    Shared: w. Personal: nothing that is kept. Headline: PRE, which is measured after fine-tuning.

    State the scope and the epochs next to every number: fine-tuning the head only and fine-tuning everything differ by
    several points. With ``run.eval_every = training.rounds`` only the last global model is fine-tuned, as in FedRep's
    paper.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models.
      finetune_epochs: E_ft; 0 gives FedAvg's PRE exactly.
      finetune_lr: eta_ft; the local learning rate unless given. It decays as that does.
      finetune_scope: ``"full"``, ``"head"`` (only the last layer, on cached features) or ``"extractor"``.

    Reference:
      The fine-tuning baseline of Collins et al. (ICML 2021, arXiv:2102.07078) and Xu et al. (ICLR 2023,
      arXiv:2306.11867).
    """

    averaging = fedavg(model, train, combine)
    return finetuned(averaging, model, train, epochs=finetune_epochs, lr=finetune_lr, scope=finetune_scope)
