"""The small convolutional networks of the personalised federated learning papers."""

from collections.abc import Callable

import flax.linen as nn
from jaxtyping import Array, Float

from fedjax_pfl.models.base import Init, Maps, Mask, dense, initializers
from fedjax_pfl.models.conv import conv_pool2x2


class ConvPool(nn.Module):
    """Convolution, 2x2 max-pooling, bias, activation.

    Adding a per-channel constant and a monotone activation commute with a maximum, so this equals the usual order
    (bias, activation, pooling) on a quarter of the pixels.
    """

    channels: int
    size: int
    padding: int
    activation: Callable[[Array], Array]
    init_style: Init

    @nn.compact
    def __call__(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch h2 w2 channels"]:
        """Applies the block to [batch, h, w, c].

        Raises:
          ValueError: nothing would be left after pooling.
        """
        if min(x.shape[1:3]) + 2 * self.padding - self.size + 1 < 2:
            height, width = x.shape[1:3]
            raise ValueError(f"a {self.size}x{self.size} convolution and pooling do not fit a {height}x{width} map")
        taps = self.size * self.size * x.shape[-1]
        inits = initializers(self.init_style, taps)
        kernel = self.param("kernel", inits.kernel, (self.size, self.size, x.shape[-1], self.channels))
        bias = self.param("bias", inits.bias, (self.channels,))
        return self.activation(conv_pool2x2(x, kernel, bias, padding=self.padding))


class CNN(nn.Module):
    """Convolution blocks (channels, kernel size, padding), then dense layers; the output of the last is the feature."""

    blocks: tuple[tuple[int, int, int], ...]
    dim: int
    activation: Callable[[Array], Array]
    init_style: Init
    hidden: tuple[int, ...] = ()  # widths of the dense layers before the last

    @nn.compact
    def __call__(self, x: Float[Array, "batch h w c"], mask: Mask = None) -> tuple[Float[Array, "batch dim"], Maps]:
        """Returns features [batch, dim] and the output of every block."""
        maps = []
        for layer, (channels, size, padding) in enumerate(self.blocks):
            x = ConvPool(channels, size, padding, self.activation, self.init_style, name=f"conv{layer + 1}")(x)
            maps.append(x)
        x = x.reshape(x.shape[0], -1)
        for layer, width in enumerate(self.hidden):
            x = self.activation(dense(width, self.init_style, x.shape[-1], f"hidden{layer + 1}")(x))
        return self.activation(dense(self.dim, self.init_style, x.shape[-1], "dense")(x)), tuple(maps)


def cnn2(*, init: Init = "torch") -> CNN:
    """FedAvgCNN of PFLlib: 5x5x32 and 5x5x64 VALID, ReLU, dense 512. 582,026 parameters on 28x28x1 with 10 classes.

    Args:
      init: of all layers: ``"torch"``, uniform in +-1/sqrt(fan-in); ``"flax"``, LeCun normal, biases zero.
    """
    return CNN(((32, 5, 0), (64, 5, 0)), 512, nn.relu, init)


def cnn3(*, init: Init = "torch") -> CNN:
    """FedeCouple's network for 32x32x3: 5x5x16, 5x5x32, 3x3x64, leaky ReLU, dense 128; extractor 106,400 parameters.

    Args:
      init: of all layers: ``"torch"``, uniform in +-1/sqrt(fan-in); ``"flax"``, LeCun normal, biases zero.
    """
    return CNN(((16, 5, 0), (32, 5, 1), (64, 3, 1)), 128, nn.leaky_relu, init)


def cnn2s(*, init: Init = "torch") -> CNN:
    """FedeCouple's network for 28x28x1: 5x5x16, 5x5x32, leaky ReLU, dense 128. Extractor: 115,776 parameters.

    Args:
      init: of all layers: ``"torch"``, uniform in +-1/sqrt(fan-in); ``"flax"``, LeCun normal, biases zero.
    """
    return CNN(((16, 5, 0), (32, 5, 1)), 128, nn.leaky_relu, init)


def cnn_digits(*, init: Init = "torch") -> CNN:
    """For images as small as 8x8: 3x3x16 and 3x3x32 with padding 1, ReLU, dense 64. On 8x8x1: 13,056 and a head.

    Args:
      init: of all layers: ``"torch"``, uniform in +-1/sqrt(fan-in); ``"flax"``, LeCun normal, biases zero.
    """
    return CNN(((16, 3, 1), (32, 3, 1)), 64, nn.relu, init)
