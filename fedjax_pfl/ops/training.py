"""Local training: epochs of mini-batches over one client's samples."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int, Key, PyTree, Shaped

from fedjax_pfl.data.federated import Batch, ClientData, Count
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.method import Diagnostics, Round, TrainInfo
from fedjax_pfl.models.norm import is_statistic, without_statistics
from fedjax_pfl.models.randomness import within_step
from fedjax_pfl.ops.packing import SMALL, pack
from fedjax_pfl.ops.padding import look_for_mask

Carry = TypeVar("Carry")
Params = TypeVar("Params")
Scalar = float | Float[Array, ""]
# params, batch, key -> the mean loss over the batch, []
Loss = Callable[[Params, Batch, Key[Array, ""]], Float[Array, ""]]


def is_off(coefficient: Scalar | int) -> bool:
    """Whether a coefficient is known to be 0 when the method is built, so that its term can be left out (rule R12)."""
    return isinstance(coefficient, int | float) and coefficient == 0


def phase_key(key: Key[Array, ""], phase: str) -> Key[Array, ""]:
    """The key of one named phase of a client's round (rule R12); adding a phase does not change the other keys."""
    return jax.random.fold_in(key, np.uint32(zlib.crc32(phase.encode())))


def permutation(key: Key[Array, ""], count: Count, capacity: int) -> Int[Array, " capacity"]:
    """A random order of the positions 0 ... count - 1, followed by the padding.

    The random number of a position does not depend on the capacity, so more padding does not change the order.
    """
    draws = jax.random.uniform(key, (capacity,))
    return jnp.argsort(jnp.where(jnp.arange(capacity) < count, draws, jnp.inf))


def _batches(samples: Count, batch_size: int, drop_last: bool) -> Count:
    """The number of batches in an epoch over this number of samples."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


def scan_batches(
    key: Key[Array, ""],
    step: Callable[[Carry, Batch, Key[Array, ""]], Carry],
    carry: Carry,
    data: ClientData,
    *,
    epochs: int | Int[Array, ""] | None = None,
    steps: int | Int[Array, ""] | None = None,
    batch_size: int,
    drop_last: bool = False,
) -> Carry:
    """Folds a step over the mini-batches of a client, with a fresh permutation in each epoch (rules R1, R12).

    A client runs its own number of steps. If it runs side by side with larger clients, its carry then stays unchanged
    until the largest client is done.

    Args:
      key: the randomness of this phase.
      step: (carry, batch, key) -> carry; the carry may be any tree, for instance several models.
      carry: the carry before the first step.
      data: the client's samples.
      epochs: number of passes over the samples; either this or ``steps`` must be given.
      steps: number of steps, in as many passes as they need; the last pass may be cut short.
      batch_size: B; the last, short batch is padded and masked.
      drop_last: leave out the short batch instead, as PFLlib does; a client with fewer than B samples does not train.

    Returns:
      The carry after the last step.
    """
    assert (epochs is None) != (steps is None), "either epochs or steps"
    in_epoch = _batches(data.count, batch_size, drop_last)
    # Side by side, all clients run as many steps as the largest, and each keeps its carry after its own last step. With
    # separate bounds, the loop over epochs would need a selection, too, and the compiler would not know its length.
    side_by_side = data.most is not None and steps is None
    equal = isinstance(data.count, np.integer)  # one number for all clients (`Cohorts.equal`): nobody has to wait
    if steps is not None:
        epochs = jnp.where(in_epoch > 0, -(-steps // jnp.maximum(in_epoch, 1)), 0)

    def epoch(number: Int[Array, ""], carry: Carry) -> Carry:
        key_epoch = jax.random.fold_in(key, number)
        key_order, key_steps = jax.random.split(key_epoch)
        seen = data.in_epoch(phase_key(key_epoch, "augment"))
        order = permutation(key_order, data.count, data.capacity)
        batch_at = seen.batches(order, min(batch_size, data.capacity))

        def batch_step(number: Int[Array, ""], carry: Carry) -> Carry:
            batch = batch_at(number)
            key_step = jax.random.fold_in(key_steps, number)
            with within_step(lambda: phase_key(key_step, "dropout")):
                new = step(carry, batch, key_step)
            if not side_by_side or equal:
                return new
            return jax.tree.map(lambda new, old: jnp.where(number < in_epoch, new, old), new, carry)

        longest = _batches(data.longest, batch_size, drop_last)
        left = in_epoch if steps is None else jnp.minimum(in_epoch, steps - number * in_epoch)
        return lax.fori_loop(0, longest if side_by_side else left, batch_step, carry)

    return lax.fori_loop(0, epochs, epoch, carry)


class LossTotals(NamedTuple):
    """Running totals over mini-batches; `Trainer.info` turns them into means.

    Attributes:
      total: sum of the batches' mean losses, each multiplied by the number of samples in the batch.
      steps: number of batches.
    """

    total: Float[Array, ""]
    steps: Int[Array, ""]

    @classmethod
    def none(cls) -> "LossTotals":
        """Before the first batch."""
        return cls(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))

    def after(self, loss: Float[Array, ""], batch: Batch) -> "LossTotals":
        """The totals after one more batch with this mean loss."""
        return LossTotals(self.total + jnp.sum(batch.mask) * loss, self.steps + 1)


def _one_number(value: Any) -> Any:
    """What a loss has returned, checked."""
    if value is None or jnp.shape(value) != ():
        returned = "None" if value is None else f"an array {list(jnp.shape(value))}"
        raise ConfigError("what the loss returns", returned, "one number, []: masked_mean(values, batch.mask)")
    return value


@dataclass(frozen=True)
class Trainer:
    """Local training: mini-batch SGD on a loss, over any sub-tree of the parameters.

    Parameters that are not passed as ``params`` are frozen: no gradient, weight decay or momentum reaches them (rule
    R3). The optimiser starts afresh at every call (rule R2). Running statistics take their update from the loss
    unchanged; none of the numbers below applies to them (``models/norm.py``). Numeric fields may be traced values, so
    that a sweep can map over them with ``vmap``.

    Attributes:
      epochs: E, local epochs.
      batch_size: B, samples per mini-batch.
      lr: eta, the learning rate in round 0.
      lr_decay: factor on the learning rate per round.
      momentum: heavy-ball coefficient.
      weight_decay: coefficient of the L2 term added to the gradient, before momentum, as in PyTorch's SGD.
      clip_norm: largest global norm of a gradient; None for no clipping.
      drop_last: leave out an epoch's last, short batch.
      diagnose: whether `gradient_ratios` are computed.
    """

    epochs: int = 1
    batch_size: int = 10
    lr: Scalar = 0.005
    lr_decay: Scalar = 1.0
    momentum: Scalar = 0.0
    weight_decay: Scalar = 0.0
    clip_norm: Scalar | None = None
    drop_last: bool = False
    diagnose: bool = False

    def __call__(
        self,
        now: Round,
        loss: Loss[Params],
        params: Params,
        data: ClientData,
        *,
        phase: str = "local",
        epochs: int | Int[Array, ""] | None = None,
        steps: int | Int[Array, ""] | None = None,
        lr: Scalar | None = None,
        record: bool = True,
    ) -> tuple[Params, TrainInfo]:
        """Trains ``params`` on one client's samples.

        Args:
          now: the round, and the client's key in it.
          loss: (params, batch, key) -> mean loss of the batch.
          params: what is trained.
          data: the client's samples.
          phase: name of this phase. Two phases of a round draw different batches; the same phase draws the same ones.
          epochs: number of epochs, instead of the configured one.
          steps: number of steps instead of epochs, in as many epochs as they need.
          lr: learning rate, instead of the configured one; it decays in the same way.
          record: whether the loss is recorded; this costs kernels in every step on an accelerator.

        Returns:
          The trained params, and the mean loss (NaN if it is not recorded) and number of steps. For a client without
          samples, ``params`` unchanged.
        """
        # With clipping nothing is packed, because packing would change the order in which the norm is summed up.
        packed, unpack = pack(params, largest=SMALL if self.clip_norm is None else 0)
        optimizer = self.optimizer(now.t, packed, lr=lr)

        def step(carry: tuple, batch: Batch, key: Key[Array, ""]) -> tuple:
            packed, opt_state, totals = carry
            if not self.drop_last:  # else no batch is padded
                look_for_mask(phase, lambda batch: _one_number(loss(unpack(packed), batch, key)), batch)
            value, gradient = jax.value_and_grad(lambda packed: _one_number(loss(unpack(packed), batch, key)))(packed)
            updates, opt_state = optimizer.update(gradient, opt_state, packed)
            totals = totals.after(value, batch) if record else totals._replace(steps=totals.steps + 1)
            return optax.apply_updates(packed, updates), opt_state, totals

        start = packed, optimizer.init(packed), LossTotals.none()
        packed, _, totals = self.over_batches(now, step, start, data, phase=phase, epochs=epochs, steps=steps)
        info = self.info(totals, data)
        return unpack(packed), info if record else info._replace(loss=jnp.nan * info.loss)

    def info(self, totals: LossTotals, data: ClientData) -> TrainInfo:
        """The mean loss over the samples seen (0 if there are none), and the number of steps."""
        in_epoch = _batches(data.count, self.batch_size, self.drop_last)
        samples_in_epoch = in_epoch * self.batch_size if self.drop_last else data.count
        epochs, left = jnp.divmod(totals.steps, jnp.maximum(in_epoch, 1))
        samples = epochs * samples_in_epoch + left * self.batch_size
        return TrainInfo(totals.total / jnp.maximum(samples.astype(jnp.float32), 1.0), totals.steps)

    def over_batches(
        self,
        now: Round,
        step: Callable[[Carry, Batch, Key[Array, ""]], Carry],
        carry: Carry,
        data: ClientData,
        *,
        phase: str = "local",
        epochs: int | Int[Array, ""] | None = None,
        steps: int | Int[Array, ""] | None = None,
    ) -> Carry:
        """Folds a method's own step over the mini-batches on which a call with the same phase would train.

        For methods whose steps are not SGD on one loss; they can use :meth:`optimizer` in their step.

        Args:
          now: the round, and the client's key in it.
          step: (carry, batch, key) -> carry.
          carry: the carry before the first step.
          data: the client's samples.
          phase: name of this phase.
          epochs: number of epochs, instead of the configured one.
          steps: number of steps, instead of epochs.

        Returns:
          The carry after the last step.
        """
        if steps is None and epochs is None:
            epochs = self.epochs
        return scan_batches(
            phase_key(now.key, phase),
            step,
            carry,
            data,
            epochs=epochs,
            steps=steps,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
        )

    def gradient_ratios(
        self, now: Round, loss: Loss[Params], terms: Mapping[str, Loss[Params]], params: Params, data: ClientData
    ) -> Diagnostics:
        """The strength of each term of a loss, relative to the loss without the terms: ||grad term|| / ||grad loss||.

        Computed on one mini-batch of the client, without running statistics, as a diagnostic only. Without
        ``run.diagnostics`` it returns an empty dictionary.

        Args:
          now: the round, and the client's key in it.
          loss: (params, batch, key) -> the loss without the terms.
          terms: name -> (params, batch, key) -> the term, including its coefficient.
          params: the parameters at which the gradients are computed.
          data: the client's samples.

        Returns:
          ``gradient_ratio_NAME`` of each term.
        """
        if not self.diagnose:
            return {}

        def measure(ratios: Diagnostics, batch: Batch, key: Key[Array, ""]) -> Diagnostics:
            def norm(of: Loss[Params]) -> Float[Array, ""]:
                return optax.tree.norm(without_statistics(jax.grad(of)(params, batch, key)))

            whole = jnp.maximum(norm(loss), 1e-12)
            return {f"gradient_ratio_{name}": norm(term) / whole for name, term in terms.items()}

        nothing = {f"gradient_ratio_{name}": jnp.zeros((), jnp.float32) for name in terms}
        return self.over_batches(now, measure, nothing, data, phase="diagnostics", steps=1)

    def rate(self, t: Int[Array, ""], *, lr: Scalar | None = None) -> Float[Array, ""]:
        """The learning rate of round t: ``lr``, or the configured one if it is None, times lr_decay^t."""
        return (self.lr if lr is None else lr) * self.lr_decay ** t.astype(jnp.float32)

    def optimizer(self, t: Int[Array, ""], params: PyTree, *, lr: Scalar | None = None) -> optax.GradientTransformation:
        """SGD of round t, with the configured momentum, weight decay and clipping; it applies to parameters only.

        Args:
          t: the round, on which the decayed learning rate depends.
          params: the tree that will be updated, in which running statistics are told from parameters.
          lr: learning rate, instead of the configured one; it decays in the same way.
        """
        parts = []
        if self.clip_norm is not None:
            parts.append(optax.clip_by_global_norm(self.clip_norm))
        if not is_off(self.weight_decay):
            parts.append(optax.add_decayed_weights(self.weight_decay))
        parts.append(optax.sgd(self.rate(t, lr=lr), momentum=None if is_off(self.momentum) else self.momentum))
        sgd = optax.chain(*parts)
        statistics = jax.tree.map_with_path(lambda path, _: is_statistic(path), params)
        if not any(jax.tree.leaves(statistics)):
            return sgd
        # The gradient of running statistics is the amount to subtract from them (models/norm.py).
        return optax.partition({False: sgd, True: optax.scale(-1.0)}, statistics)


def effective_steps(steps: Int[Array, "*clients"], momentum: Scalar) -> Float[Array, "*clients"]:
    """The length of SGD's path along a constant gradient g, in units of eta g: tau steps, or more with momentum.

    With rho the momentum: [tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho) (FedNova, arXiv:2007.07481, section 4).

    Args:
      steps: tau, the number of steps, starting from a velocity of zero.
      momentum: heavy-ball coefficient, in [0, 1).
    """
    tau = steps.astype(jnp.float32)
    if is_off(momentum):
        return tau
    return (tau - momentum * (1.0 - momentum**tau) / (1.0 - momentum)) / (1.0 - momentum)


def cache_features(
    features: Callable[[Shaped[Array, "batch ..."]], Float[Array, "batch dim"]],
    data: ClientData,
    *,
    batch_size: int = 128,
) -> ClientData:
    """The client's samples as features of a frozen extractor, computed once, for example to train a head on them.

    The positions stay the same, so that the same phase draws the same batches as on the samples themselves. An epoch of
    the head then needs no forward pass of the extractor. Augmented images use the augmentation drawn for the round.

    Args:
      features: x [batch, ...] -> z [batch, dim], the frozen extractor.
      data: the client's samples.
      batch_size: samples per forward pass.

    Returns:
      The same client with x = z, [capacity, dim].
    """
    z = data.map(lambda x, positions: features(x), batch_size=batch_size)
    positions = jnp.arange(data.capacity, dtype=jnp.int32)
    return data._replace(x=z, y=data.labels, index=positions, original=None, augmentation=None)
