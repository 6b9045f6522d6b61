"""The local losses on which another method can be based, by the name of the method that they come from."""

from collections.abc import Callable
from typing import Literal

from fedjax_pfl.methods.base_loss import BaseLoss
from fedjax_pfl.methods.fedasam import asam_loss
from fedjax_pfl.methods.fedntd import ntd_loss
from fedjax_pfl.methods.fedprox import fedprox_loss
from fedjax_pfl.methods.moon import moon_loss
from fedjax_pfl.models.base import Model
from fedjax_pfl.ops.training import Scalar

Base = Literal["fedavg", "fedprox", "moon", "fedntd", "fedasam"]


_LOSSES: dict[Base, Callable[..., BaseLoss]] = {
    "fedavg": lambda model: BaseLoss(),
    "fedprox": fedprox_loss,
    "moon": moon_loss,
    "fedntd": ntd_loss,
    "fedasam": asam_loss,
}


def loss_named(name: Base, model: Model, coefficient: Scalar | None) -> BaseLoss:
    """The local loss of this method.

    Args:
      name: name of the method.
      model: extractor and head.
      coefficient: the coefficient of the added term, or rho; None for the method's default. FedAvg has none.

    Raises:
      ValueError: a coefficient is given for FedAvg.
    """
    if coefficient is not None and name == "fedavg":
        raise ValueError('mu must not be given with base "fedavg", whose loss has no coefficient')
    loss = _LOSSES[name]
    return loss(model) if coefficient is None else loss(model, coefficient)
