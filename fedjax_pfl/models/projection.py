"""Models whose extractor is an encoder with a projection head on top, for contrastive methods."""

from typing import Annotated

import flax.linen as nn
from annotated_types import Ge
from jaxtyping import Array, Float

from fedjax_pfl.models.base import Init, Maps, Mask, dense
from fedjax_pfl.models.cnn import CNN, cnn_digits
from fedjax_pfl.models.mlp import mlp
from fedjax_pfl.models.resnet import Norm, Stem, resnet18


class ProjectionHead(nn.Module):
    """H: a hidden ReLU layer of the same width as the input, and a linear layer."""

    dim: int
    init_style: Init

    @nn.compact
    def __call__(self, f: Float[Array, "batch width"]) -> Float[Array, "batch dim"]:
        """Applies it to the output of the encoder."""
        width = f.shape[-1]
        hidden = nn.relu(dense(width, self.init_style, width, "hidden")(f))
        return dense(self.dim, self.init_style, width, "out")(hidden)


class Projected(nn.Module):
    """An encoder E, which is an extractor, and a projection head H with ``dim`` outputs; the feature is H(E(x))."""

    encoder: nn.Module
    dim: int
    init_style: Init

    def setup(self) -> None:
        """Names the head's parameters."""
        self.projection = ProjectionHead(self.dim, self.init_style)

    def encode(self, x: Float[Array, "batch ..."], mask: Mask = None) -> Float[Array, "batch width"]:
        """E(x)."""
        return self.encoder(x, mask)[0]

    def project(self, f: Float[Array, "batch width"]) -> Float[Array, "batch dim"]:
        """H(f)."""
        return self.projection(f)

    def __call__(self, x: Float[Array, "batch ..."], mask: Mask = None) -> tuple[Float[Array, "batch dim"], Maps]:
        """Returns H(E(x)) and the feature maps of the encoder."""
        f, maps = self.encoder(x, mask)
        return self.project(f), maps


def cnn_proj(*, init: Init = "torch") -> Projected:
    """FedCSPC's network: 5x5x6 and 5x5x16 VALID, ReLU, dense 120 and 84; H: 84, 256. On 32x32x3: 61,156 + 28,900.

    Args:
      init: of all layers: ``"torch"``, uniform in +-1/sqrt(fan-in); ``"flax"``, LeCun normal, biases zero.
    """
    return Projected(CNN(((6, 5, 0), (16, 5, 0)), 84, nn.relu, init, hidden=(120,)), 256, init)


def cnn_digits_proj(*, projection: Annotated[int, Ge(1)] = 64, init: Init = "torch") -> Projected:
    """``cnn_digits`` and a projection head, 64 -> 64 -> ``projection``. On 8x8x1: 13,056 + 8,320.

    It has both feature maps and a projection head, so that every method but FedBN (normalisation layers) runs on it.

    Args:
      projection: width of the projected feature.
      init: initialisation of all layers.
    """
    return Projected(cnn_digits(init=init), projection, init)


def mlp_proj(
    *, hidden: Annotated[int, Ge(1)] = 100, projection: Annotated[int, Ge(1)] = 64, init: Init = "torch"
) -> Projected:
    """``mlp`` and a projection head, hidden -> hidden -> ``projection``; no feature maps. On 8x8x1: 6,500 + 16,564.

    Args:
      hidden: width of the hidden layers of the MLP and of the projection head.
      projection: width of the projected feature.
      init: initialisation of all layers.
    """
    return Projected(mlp(hidden=hidden, init=init), projection, init)


def resnet18_proj(
    *,
    stem: Stem = "cifar",
    norm: Norm = "group",
    groups: Annotated[int, Ge(1)] = 32,
    projection: Annotated[int, Ge(1)] = 256,
    init: Init = "torch",
) -> Projected:
    """ResNet-18 and a projection head, 512 -> 512 -> ``projection``: 393,984 parameters more at the default.

    Args:
      stem: as in ``resnet18``.
      norm: as in ``resnet18``.
      groups: as in ``resnet18``.
      projection: width of the projected feature.
      init: initialisation of the encoder, as in ``resnet18``, and of the head, as for every dense layer.
    """
    return Projected(resnet18(stem=stem, norm=norm, groups=groups, init=init), projection, init)
