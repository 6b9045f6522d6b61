"""The recurrent network of the Shakespeare benchmark, which reads characters."""

from typing import Annotated, Any

import flax.linen as nn
import jax.numpy as jnp
from annotated_types import Ge
from jaxtyping import Array, Float, UInt8

from fedjax_pfl.models.base import Init, Maps, Mask, initializers


class CharLSTM(nn.Module):
    """Embedded tokens, two LSTM layers; the feature is the last hidden state of the second.

    It has a ``vocabulary`` (the tokens are 0 ... vocabulary - 1), by which it is told from models that read images.
    """

    vocabulary: int
    embedding: int
    hidden: int
    init_style: Init

    @nn.compact
    def __call__(self, x: UInt8[Array, "batch length"], mask: Mask = None) -> tuple[Float[Array, "batch dim"], Maps]:
        """Returns features [batch, hidden] and no feature maps: there is no spatial layer."""
        cell: dict[str, Any] = {}  # Flax: recurrent kernels orthogonal, the others LeCun normal, biases zero
        table = nn.linear.default_embed_init
        if self.init_style == "torch":
            # All of PyTorch's LSTM is uniform in +-1/sqrt(hidden), and its embedding standard normal. It has two biases
            # per gate, whose sum starts wider and moves twice as fast; Flax has one.
            kernel, bias = initializers("torch", self.hidden)
            cell = {"kernel_init": kernel, "recurrent_kernel_init": kernel, "bias_init": bias}
            table = nn.initializers.normal(1.0)
        z = nn.Embed(self.vocabulary, self.embedding, embedding_init=table, name="embedding_layer")(x.astype(jnp.int32))
        for layer in ("lstm1", "lstm2"):
            z = nn.RNN(nn.OptimizedLSTMCell(self.hidden, **cell, name=layer))(z)
        return z[:, -1], ()


def char_lstm(
    *, embedding: Annotated[int, Ge(1)] = 8, hidden: Annotated[int, Ge(1)] = 256, init: Init = "torch"
) -> CharLSTM:
    """Next character: 80 symbols embedded in 8 numbers each, two LSTM layers of 256 (text only, such as leaf:).

    Args:
      embedding: numbers per symbol.
      hidden: units of each LSTM layer, which is the feature dimension.
      init: of all layers, as in PyTorch (``"torch"``) or as in Flax (``"flax"``).
    """
    return CharLSTM(80, embedding, hidden, init)
