"""HeurFedAMP (Huang et al., AAAI 2021): FedAMP whose mixtures follow the angles between the models."""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Le
from jaxtyping import Array, Bool, Float

from fedjax_pfl.method import Method
from fedjax_pfl.methods.fedamp import Pairs, drawn_together
from fedjax_pfl.models.base import Model
from fedjax_pfl.ops.training import Trainer


def heur_fedamp(
    model: Model,
    train: Trainer,
    *,
    self_weight: Annotated[float, Ge(0), Le(1)] = 0.5,
    sigma: Annotated[float, Ge(0)] = 25.0,
    lam: Annotated[float, Ge(0)] = 0.1,
) -> Method:
    """HeurFedAMP: FedAMP with a fixed xi_ii, and xi_ij = (1 - xi_ii) softmax_j(sigma cos(w_i, w_j)) of the others.

    Shared: only the u_i. Personal: w_i. Headline: POST.

    Angles separate models of many parameters better than distances do; all else is as in FedAMP. As long as no other
    client has taken part, xi_ii is 1.

    Args:
      model: extractor and head.
      train: the local trainer.
      self_weight: xi_ii, from 1 / N to 0.5.
      sigma: sharpness of the softmax; 0 weights all others alike; try 5, 25 and 100.
      lam: strength of the pull, lambda / alpha_k in the paper; stable for lr * lam < 2. 0 is Local.

    Reference:
      Y. Huang, L. Chu, Z. Zhou, L. Wang, J. Liu, J. Pei, Y. Zhang. Personalized Cross-Silo Federated Learning on
      Non-IID Data. AAAI 2021. arXiv:2007.03797.
    """

    def attention(pairs: Pairs, others: Bool[Array, "K N"]) -> Float[Array, "K N"]:
        cosine = pairs.products / jnp.maximum(jnp.sqrt(pairs.own * pairs.all), 1e-8)
        return (1.0 - self_weight) * jax.nn.softmax(sigma * cosine, axis=1, where=others)

    return drawn_together(model, train, attention, lam)
