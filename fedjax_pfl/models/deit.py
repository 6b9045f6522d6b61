"""DeiT-S (Touvron et al., ICML 2021, arXiv:2012.12877): a small vision transformer that reads an image in patches.

Two parts are left out: the distillation token, which learns from the predictions of a trained teacher (this is the
paper's DeiT-S without distillation), and stochastic depth, which is part of its recipe for ImageNet.
"""

from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp
from annotated_types import Ge
from jaxtyping import Array, Float

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.models.base import Init, Maps, Mask, dense

MLP_RATIO = 4
EPSILON = 1e-6


class Embedding(nn.Module):
    """The class token, followed by a linear embedding of every patch; a position embedding is added to each."""

    patch: int
    width: int
    init_style: Init

    @nn.compact
    def __call__(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch tokens width"]:
        """Applies it to images [batch, h, w, c], whose patches come row by row.

        Raises:
          ValueError: the patches do not tile the image.
        """
        batch, height, width, channels = x.shape
        if height % self.patch or width % self.patch:
            raise ValueError(f"patches of {self.patch}x{self.patch} pixels do not tile {height}x{width} (model.patch)")
        rows, columns, values = height // self.patch, width // self.patch, self.patch * self.patch * channels
        x = x.reshape(batch, rows, self.patch, columns, self.patch, channels).swapaxes(2, 3)
        x = dense(self.width, self.init_style, values, "patches")(x.reshape(batch, rows * columns, values))
        # The paper's code truncates the normal distribution at 100 standard deviations.
        normal = nn.initializers.normal(0.02)
        token = self.param("class_token", normal, (self.width,))
        x = jnp.concatenate([jnp.broadcast_to(token, (batch, 1, self.width)), x], axis=1)
        return x + self.param("positions", normal, (1 + rows * columns, self.width))


class Block(nn.Module):
    """A pre-norm block: self-attention, then two dense layers with a GELU between them, each with a residual."""

    heads: int
    init_style: Init

    @nn.compact
    def __call__(self, x: Float[Array, "batch tokens width"]) -> Float[Array, "batch tokens width"]:
        """Applies the block to [batch, tokens, width]."""
        batch, tokens, width = x.shape
        qkv = self._linear(3 * width, "qkv")(nn.LayerNorm(EPSILON, name="norm1")(x))
        q, k, v = jnp.moveaxis(qkv.reshape(batch, tokens, 3, self.heads, width // self.heads), 2, 0)
        y = jax.nn.dot_product_attention(q, k, v).reshape(batch, tokens, width)
        x = x + self._linear(width, "attention")(y)
        y = self._linear(MLP_RATIO * width, "hidden")(nn.LayerNorm(EPSILON, name="norm2")(x))
        return x + self._linear(width, "out")(nn.gelu(y, approximate=False))

    def _linear(self, features: int, name: str) -> nn.Dense:
        normal, lecun = nn.initializers.normal(0.02), nn.initializers.lecun_normal()
        return nn.Dense(features, kernel_init=normal if self.init_style == "torch" else lecun, name=name)


class DeiT(nn.Module):
    """Embedded patches, blocks, layer normalisation; the feature is the final class token."""

    patch: int
    depth: int
    width: int
    heads: int
    init_style: Init

    @nn.compact
    def __call__(self, x: Float[Array, "batch h w c"], mask: Mask = None) -> tuple[Float[Array, "batch dim"], Maps]:
        """Returns features [batch, width] and, as maps [batch, h / patch, w / patch, width], the patches' tokens.

        There is a map between every two blocks, and none after the last, where only the class token is used.
        """
        shape = x.shape[0], x.shape[1] // self.patch, x.shape[2] // self.patch, self.width
        x = Embedding(self.patch, self.width, self.init_style, name="embedding")(x)
        maps: list[Array] = []
        for block in range(self.depth):
            if block > 0:
                maps.append(x[:, 1:].reshape(shape))
                # The same tokens again, but computed from the map, so that there is a derivative with respect to it.
                x = jnp.concatenate([x[:, :1], maps[-1].reshape(x[:, 1:].shape)], axis=1)
            x = Block(self.heads, self.init_style, name=f"block{block + 1}")(x)
        return nn.LayerNorm(EPSILON, name="norm")(x[:, 0]), tuple(maps)


def deit_s(
    *,
    patch: Annotated[int, Ge(1)] = 4,
    depth: Annotated[int, Ge(1)] = 12,
    width: Annotated[int, Ge(1)] = 384,
    heads: Annotated[int, Ge(1)] = 6,
    init: Init = "torch",
) -> DeiT:
    """DeiT-S without a distillation token: feature dimension 384; extractor 21,338,496 parameters on 32x32x3.

    A vision transformer with normalisation before each layer; the feature is the class token's. Its feature maps are
    the tokens of the patches between every two blocks.

    Args:
      patch: side of a patch, in pixels: 4 gives 8x8 patches for 32x32 pixels, and 7x7 for 28x28. The paper uses 16 for
        224x224.
      depth: number of blocks.
      width: dimension of a token, and so of the feature.
      heads: number of attention heads; a divisor of ``width``.
      init: ``"torch"`` as in the paper's code: kernels from N(0, 0.02^2) and biases zero, except for the patch
        embedding and the head, which are initialised as dense layers of other models (in that code the head is no
        exception); ``"flax"``: Flax's default, Lecun normal. Class token and positions are from N(0, 0.02^2) in both.

    Raises:
      ConfigError: field ``model.heads``.
    """
    if width % heads:
        raise ConfigError("model.heads", heads, f"a divisor of model.width, {width}")
    return DeiT(patch, depth, width, heads, init)
