"""Distillation of feature maps, level by level, with attention and fusion across levels (FedCPD).

Both students of a level, the map F and the attended map A = CBAM(F), are fused with the next deeper level before they
are compared with the teacher's. What is learnt for this belongs to a client and is never exchanged.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key

from fedjax_pfl.models.base import Params, initializers
from fedjax_pfl.models.conv import conv2d
from fedjax_pfl.ops.losses import masked_mean

Maps = Sequence[Float[Array, "batch _ _ _"]]

REDUCTION = 16  # of the channels, in the channel gate
WINDOW = 7  # of the spatial gate, in pixels


def init_distiller(key: Key[Array, ""], shapes: Sequence[tuple[int, int, int]]) -> Params:
    """Weights of attention and fusion for feature maps of these (h, w, c), from the first level to the deepest.

    The fusion starts as the identity: teacher = student gives a loss of zero. No layer has a bias.
    """
    # The width of the widest level. With fewer channels, the fusion could not start as the identity there.
    middle = max(channels for _, _, channels in shapes)

    def gates(key: Key[Array, ""], channels: int) -> Params:
        key_reduce, key_expand, key_spatial = jax.random.split(key, 3)
        hidden, taps = max(1, channels // REDUCTION), 2 * WINDOW**2
        return {
            "reduce": initializers("torch", channels).kernel(key_reduce, (channels, hidden)),
            "expand": initializers("torch", hidden).kernel(key_expand, (hidden, channels)),
            "spatial": initializers("torch", taps).kernel(key_spatial, (WINDOW, WINDOW, 2, 1)),
        }

    def fusion(channels: int) -> Params:
        widen = jnp.zeros((3, 3, channels, middle)).at[1, 1].set(jnp.eye(channels, middle))
        return {"cv1": jnp.zeros((channels, middle)), "cv2": widen.swapaxes(2, 3), "cv3": widen}

    keys = jax.random.split(key, len(shapes))
    return [
        {"gates": gates(key, channels), "attended": fusion(channels), "plain": fusion(channels)}
        for key, (_, _, channels) in zip(keys, shapes, strict=True)
    ]


def feature_distillation(
    distiller: Params, student: Maps, teacher: Maps, mask: Float[Array, " batch"]
) -> Float[Array, ""]:
    """L_fd: mean squared distance of the fused student's maps to the teacher's, F and A, summed over the levels.

    Args:
      distiller: from :func:`init_distiller`.
      student: feature maps, from the first level to the deepest.
      teacher: the same of the teacher; no gradient flows into them, nor through the gates that attend to them.
      mask: 1 for a sample, 0 for padding.
    """

    def attend(maps: Maps) -> list[Array]:
        return [_cbam(level["gates"], x) for level, x in zip(distiller, maps, strict=True)]

    pairs = (("plain", student, teacher), ("attended", attend(student), attend(teacher)))
    distances = [
        jnp.mean((fused - lax.stop_gradient(target)) ** 2, axis=(1, 2, 3))
        for kind, maps, targets in pairs
        for fused, target in zip(_fuse([level[kind] for level in distiller], maps), targets, strict=True)
    ]
    return masked_mean(jnp.sum(jnp.stack(distances), axis=0), mask)


def _cbam(gates: Params, x: Float[Array, "batch h w c"]) -> Float[Array, "batch h w c"]:
    """The map after a gate per channel, then one per pixel (Woo et al., ECCV 2018, arXiv:1807.06521)."""
    pooled = jnp.stack([jnp.mean(x, axis=(1, 2)), jnp.max(x, axis=(1, 2))])
    channel = jnp.sum(jax.nn.relu(pooled @ gates["reduce"]) @ gates["expand"], axis=0)
    x = x * jax.nn.sigmoid(channel)[:, None, None, :]
    across = jnp.stack([jnp.mean(x, axis=3), jnp.max(x, axis=3)], axis=-1)
    return x * jax.nn.sigmoid(conv2d(across, gates["spatial"], padding="SAME"))


def _fuse(levels: list[Params], maps: Maps) -> list[Array]:
    """X* of each level: Cv2(up(Cv1' X') + Cv1 X + Cv3 X), where X' and Cv1' belong to the next deeper level."""
    fused = []
    for number, (level, x) in enumerate(zip(levels, maps, strict=True)):
        # Cv1 X + Cv3 X is one convolution: a 1x1 kernel is the middle of a 3x3 kernel.
        middle = jnp.pad(level["cv1"][None, None], ((1, 1), (1, 1), (0, 0), (0, 0)))
        total = conv2d(x, middle + level["cv3"], padding="SAME")
        if number + 1 < len(maps):
            deeper = maps[number + 1] @ levels[number + 1]["cv1"]
            total = total + jax.image.resize(deeper, (*x.shape[:3], deeper.shape[3]), "bilinear")
        fused.append(conv2d(total, level["cv2"], padding="SAME"))
    return fused
