"""Models: an extractor and a linear head. ``MODELS`` is the table that configs name."""

from collections.abc import Callable

import flax.linen as nn

from fedjax_pfl.models.base import Model, Projection, build
from fedjax_pfl.models.char_lstm import char_lstm
from fedjax_pfl.models.cnn import cnn2, cnn2s, cnn3, cnn_digits
from fedjax_pfl.models.deit import deit_s
from fedjax_pfl.models.mlp import mlp
from fedjax_pfl.models.own import Own
from fedjax_pfl.models.projection import cnn_digits_proj, cnn_proj, mlp_proj, resnet18_proj
from fedjax_pfl.models.resnet import resnet18, resnet50

MODELS: dict[str, Callable[..., nn.Module | Own]] = {
    "mlp": mlp,
    "cnn2": cnn2,
    "cnn3": cnn3,
    "cnn2s": cnn2s,
    "cnn_digits": cnn_digits,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "deit_s": deit_s,
    "cnn_proj": cnn_proj,
    "cnn_digits_proj": cnn_digits_proj,
    "mlp_proj": mlp_proj,
    "resnet18_proj": resnet18_proj,
    "char_lstm": char_lstm,
}

__all__ = ["MODELS", "Model", "Own", "Projection", "build"]
