"""The multi-layer perceptron of the federated learning benchmarks."""

from typing import Annotated

import flax.linen as nn
from annotated_types import Ge
from jaxtyping import Array, Float

from fedjax_pfl.models.base import Init, Maps, Mask, dense


class MLP(nn.Module):
    """Flattened samples and one hidden ReLU layer, as PFLlib's DNN (784-100-10 on MNIST)."""

    hidden: int
    init_style: Init

    @nn.compact
    def __call__(self, x: Float[Array, "batch ..."], mask: Mask = None) -> tuple[Float[Array, "batch dim"], Maps]:
        """Returns features [batch, hidden] and no feature maps: there is no spatial layer."""
        x = x.reshape(x.shape[0], -1)
        return nn.relu(dense(self.hidden, self.init_style, x.shape[-1], "hidden_layer")(x)), ()


def mlp(*, hidden: Annotated[int, Ge(1)] = 100, init: Init = "torch") -> MLP:
    """One hidden layer of ``hidden`` ReLU units: 784-100-10 on 28x28 images.

    Args:
      hidden: number of units, which is the feature dimension.
      init: of all layers: ``"torch"``, uniform in +-1/sqrt(fan-in); ``"flax"``, LeCun normal, biases zero.
    """
    return MLP(hidden, init)
