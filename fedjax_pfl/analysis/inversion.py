"""Gradient inversion: an image whose upload is like one that was seen (DLG and iDLG, with total variation).

Reference:
  L. Zhu, Z. Liu, S. Han. Deep Leakage from Gradients. NeurIPS 2019. arXiv:1906.08935. (DLG)
  B. Zhao, K. R. Mopuri, H. Bilen. iDLG: Improved Deep Leakage from Gradients. arXiv:2001.02610, 2020.
  J. Geiping, H. Bauermeister, H. Dröge, M. Moeller. Inverting Gradients. NeurIPS 2020. arXiv:2003.14053. (The prior.)
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int, Key, Num

# float32's, of a number of size 1: a change of this norm tells nothing.
_ROUNDING = 1e-7

Image = Float[Array, "h w c"]
Upload = dict[str, Float[Array, "..."]]
# pixels, label -> the arrays that a client with this one sample would send
Send = Callable[[Image, Int[Array, ""]], Upload]


class Guess(NamedTuple):
    """What is optimised.

    Attributes:
      pixels: black is 0 and white 1, but nothing keeps them there.
      logits: of the label, [C]; None where the label is known.
    """

    pixels: Image
    logits: Float[Array, " C"] | None


# A guess and its objective.
_Scored = tuple[Guess, Float[Array, ""]]


class Search(NamedTuple):
    """How a guess is improved.

    Attributes:
      optimizer: Adam, or L-BFGS with a line search.
      by_line: whether it is the latter.
      steps: how many, always all of them.
      tv: weight of the total variation.
    """

    optimizer: optax.GradientTransformationExtraArgs
    by_line: bool
    steps: int
    tv: float


class Found(NamedTuple):
    """The best guess of a search.

    Attributes:
      pixels: of the guess, as they are.
      label: the known one, or the likeliest.
      distance: `distance` of its upload to the one that was seen.
      objective: the same and the prior.
    """

    pixels: Image
    label: Int[Array, ""]
    distance: Float[Array, ""]
    objective: Float[Array, ""]


def search(how: str, steps: int, lr: float, tv: float) -> Search:
    """A search by ``"adam"``, whose rate falls from ``lr`` to 0 along a cosine, or by ``"lbfgs"``, without a rate."""
    if how == "lbfgs":
        return Search(optax.lbfgs(), True, steps, tv)
    adam = optax.adam(optax.cosine_decay_schedule(lr, steps))
    return Search(optax.with_extra_args_support(adam), False, steps, tv)


def total_variation(image: Image) -> Float[Array, ""]:
    """The mean difference between neighbours, below each other and beside each other: mean |dy| + mean |dx|.

    A single row or column has neighbours in one direction only; the other one adds 0.
    """
    apart = (jnp.abs(jnp.diff(image, axis=axis)) for axis in (0, 1))
    return sum((jnp.mean(differences) for differences in apart if differences.size), jnp.zeros(()))


def psnr(images: Num[Any, "*n h w c"], targets: Num[Any, "*n h w c"]) -> Float[Array, "*n"]:
    """Peak signal-to-noise ratio of each image in dB, of pixels in [0, 1]: 10 log10(1 / MSE); inf where they agree."""
    mse = jnp.mean((jnp.asarray(images, jnp.float32) - jnp.asarray(targets, jnp.float32)) ** 2, axis=(-3, -2, -1))
    return -10.0 * jnp.log10(mse)


def distance(upload: Upload, seen: Upload, nothing: Upload) -> Float[Array, ""]:
    """How far an upload is from the one that was seen: the mean over the arrays of ||u - u*||^2 / ||u* - u0||^2.

    Arrays of any size and kind, gradients or class means, count alike, and it is 1 for an upload that says nothing.
    Arrays that the sample has not changed, but for rounding, are left out.

    Args:
      upload: u, of a guess.
      seen: u*.
      nothing: u0, what a client without samples would send: u* - u0 is what the sample has changed.
    """
    apart = jnp.stack([jnp.sum((upload[name] - seen[name]) ** 2) for name in seen])
    changed = jnp.stack([jnp.sum((seen[name] - nothing[name]) ** 2) for name in seen])
    tells = changed > _ROUNDING**2
    shares = jnp.where(tells, apart / jnp.where(tells, changed, 1.0), 0.0)
    return jnp.sum(shares) / jnp.maximum(jnp.sum(tells, dtype=jnp.float32), 1.0)


def expected_upload(send: Send, guess: Guess, label: Int[Array, ""] | None) -> Upload:
    """The upload of a guess; where the label is unknown, that of each, weighted by its softmax.

    For one step of SGD on the cross-entropy that is the upload under the soft label, as in DLG: the gradient is linear
    in it.
    """
    if label is not None:
        return send(guess.pixels, label)
    assert guess.logits is not None
    of_each = jax.vmap(send, (None, 0))(guess.pixels, jnp.arange(len(guess.logits)))
    weights = jax.nn.softmax(guess.logits)
    return {name: jnp.tensordot(weights, leaf, axes=1) for name, leaf in of_each.items()}


def invert(
    key: Key[Array, ""],
    send: Send,
    seen: Upload,
    nothing: Upload,
    label: Int[Array, ""] | None,
    *,
    shape: tuple[int, ...],
    classes: int,
    how: Search,
) -> Found:
    """Looks for the image behind an upload, from uniform noise.

    Args:
      key: of the noise.
      send: what the attacker takes a client to send.
      seen: what one has sent.
      nothing: what one without samples would send.
      label: of the image; None where it is looked for, too.
      shape: (h, w, c).
      classes: C.
      how: the search.

    Returns:
      The guess with the smallest objective: of the noise, and of what each step makes of it.
    """
    key_pixels, key_label = jax.random.split(key)
    logits = jax.random.normal(key_label, (classes,)) if label is None else None
    start = Guess(jax.random.uniform(key_pixels, shape), logits)

    def objective(guess: Guess) -> Float[Array, ""]:
        prior = how.tv * total_variation(guess.pixels)
        return prior + distance(expected_upload(send, guess, label), seen, nothing)

    def better(new: _Scored, old: _Scored) -> _Scored:
        # A search that has run away to NaN keeps what it found before.
        found: _Scored = jax.tree.map(lambda a, b: jnp.where(new[1] < old[1], a, b), new, old)
        return found

    def step(_: Int[Array, ""], carry: tuple) -> tuple:
        guess, state, best = carry
        if how.by_line:  # the line search has been here
            found, gradient = optax.value_and_grad_from_state(objective)(guess, state=state)
        else:
            found, gradient = jax.value_and_grad(objective)(guess)
        best = better((guess, found), best)
        extra: Mapping[str, Any] = {"value": found, "grad": gradient, "value_fn": objective}
        with jax.numpy_dtype_promotion("standard"):  # which Optax's Adam relies on
            updates, state = how.optimizer.update(gradient, state, guess, **extra)
        return optax.apply_updates(guess, updates), state, best

    carry = start, how.optimizer.init(start), (start, jnp.array(jnp.inf))
    last, _, scored = lax.fori_loop(0, how.steps, step, carry)
    best, least = better((last, objective(last)), scored)  # a step scores what it begins with
    if label is None:
        assert best.logits is not None
        label = jnp.argmax(best.logits).astype(jnp.int32)
    return Found(best.pixels, label, least - how.tv * total_variation(best.pixels), least)
