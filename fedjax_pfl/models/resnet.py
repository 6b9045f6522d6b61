"""ResNet-18 and ResNet-50 (He et al., CVPR 2016, arXiv:1512.03385), with group or batch normalisation."""

import functools
import math
from collections.abc import Callable
from typing import Annotated, Literal

import flax.linen as nn
import jax.numpy as jnp
from annotated_types import Ge
from jaxtyping import Array, Float

from fedjax_pfl.models.base import Init, Maps, Mask
from fedjax_pfl.models.conv import conv2d, max_pool3x3
from fedjax_pfl.models.norm import EPSILON, BatchNorm

Stem = Literal["cifar", "imagenet"]
Norm = Literal["group", "batch"]


class ConvNorm(nn.Module):
    """A convolution without a bias, padded by half the kernel, and normalisation."""

    channels: int
    size: int
    stride: int
    norm: Norm
    groups: int
    init_style: Init

    @nn.compact
    def __call__(self, x: Float[Array, "batch h w c"], mask: Mask) -> Float[Array, "batch h2 w2 channels"]:
        """Applies both to [batch, h, w, c]."""
        init = nn.initializers.lecun_normal()
        if self.init_style == "torch":
            init = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
        kernel = self.param("kernel", init, (self.size, self.size, x.shape[-1], self.channels))
        pads = (self.size // 2, self.size // 2)
        x = conv2d(x, kernel, strides=(self.stride, self.stride), padding=(pads, pads))
        if self.norm == "batch":
            return BatchNorm(name="norm")(x, mask)
        return nn.GroupNorm(math.gcd(self.groups, self.channels), epsilon=EPSILON, name="norm")(x)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes."""

    channels: int
    stride: int
    conv: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x: Float[Array, "batch h w c"], mask: Mask) -> Float[Array, "batch h2 w2 channels"]:
        """Applies the block to [batch, h, w, c]."""
        y = nn.relu(self.conv(self.channels, 3, self.stride, name="conv1")(x, mask))
        y = self.conv(self.channels, 3, 1, name="conv2")(y, mask)
        if self.stride > 1 or x.shape[-1] != self.channels:
            x = self.conv(self.channels, 1, self.stride, name="shortcut")(x, mask)
        return nn.relu(x + y)


class Bottleneck(nn.Module):
    """A 3x3 convolution (with the stride) between two 1x1 convolutions; the last has four times the channels."""

    channels: int
    stride: int
    conv: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x: Float[Array, "batch h w c"], mask: Mask) -> Float[Array, "batch h2 w2 channels"]:
        """Applies the block to [batch, h, w, c]."""
        outputs = 4 * self.channels
        y = nn.relu(self.conv(self.channels, 1, 1, name="conv1")(x, mask))
        y = nn.relu(self.conv(self.channels, 3, self.stride, name="conv2")(y, mask))
        y = self.conv(outputs, 1, 1, name="conv3")(y, mask)
        if self.stride > 1 or x.shape[-1] != outputs:
            x = self.conv(outputs, 1, self.stride, name="shortcut")(x, mask)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Stages of blocks; each stage after the first halves the resolution; the feature is the mean over all pixels."""

    channels: tuple[int, ...]
    blocks: tuple[int, ...]
    stem: Stem
    norm: Norm
    groups: int
    init_style: Init
    block: type[BasicBlock | Bottleneck] = BasicBlock

    @nn.compact
    def __call__(self, x: Float[Array, "batch h w c"], mask: Mask = None) -> tuple[Float[Array, "batch dim"], Maps]:
        """Returns features [batch, channels of the last map] and the output of every stage."""
        conv = functools.partial(ConvNorm, norm=self.norm, groups=self.groups, init_style=self.init_style)
        if self.stem == "cifar":
            x = nn.relu(conv(self.channels[0], 3, 1, name="stem")(x, mask))
        else:
            x = max_pool3x3(nn.relu(conv(self.channels[0], 7, 2, name="stem")(x, mask)))
        maps = []
        for stage, (channels, blocks) in enumerate(zip(self.channels, self.blocks, strict=True)):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = self.block(channels, stride, conv, name=f"stage{stage + 1}_block{block + 1}")(x, mask)
            maps.append(x)
        return jnp.mean(x, axis=(1, 2)), tuple(maps)


def resnet18(
    *, stem: Stem = "cifar", norm: Norm = "group", groups: Annotated[int, Ge(1)] = 32, init: Init = "torch"
) -> ResNet:
    """ResNet-18: feature dimension 512; extractor 11,168,832 parameters on 32x32x3, 11,176,512 with ImageNet's stem.

    Args:
      stem: ``"cifar"``, 3x3 with stride 1, for images of about 32x32; ``"imagenet"``, 7x7 with stride 2 and a 3x3
        max-pooling with stride 2, for 64x64 and more.
      norm: group normalisation, or batch normalisation with running statistics that are part of the extractor
        (``norm.py``; 9,600 numbers more).
      groups: number of groups of the group normalisation; in each layer, its greatest common divisor with the number of
        channels. Not used with ``norm = "batch"``.
      init: ``"torch"`` as in torchvision's ResNet: kernels from N(0, 2 / fan_out); ``"flax"``: Flax's default, Lecun
        normal.
    """
    return ResNet((64, 128, 256, 512), (2, 2, 2, 2), stem, norm, groups, init)


def resnet50(
    *, stem: Stem = "cifar", norm: Norm = "group", groups: Annotated[int, Ge(1)] = 32, init: Init = "torch"
) -> ResNet:
    """ResNet-50: feature dimension 2048; extractor 23,500,352 parameters on 32x32x3, 23,508,032 with ImageNet's stem.

    If a bottleneck halves the resolution, its 3x3 convolution has the stride, as in torchvision; in the paper the first
    1x1 convolution has it.

    Args:
      stem: as in ``resnet18``.
      norm: as in ``resnet18``; batch normalisation has 53,120 numbers more.
      groups: as in ``resnet18``.
      init: as in ``resnet18``.
    """
    return ResNet((64, 128, 256, 512), (3, 4, 6, 3), stem, norm, groups, init, Bottleneck)
