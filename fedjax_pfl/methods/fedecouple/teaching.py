"""GPC: the personal head learns from the labels and from the global head, which adapts (FedeCouple, Eqs. 3, 4)."""

from functools import partial
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Diagnostics, Round
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.distill import distillation
from fedjax_pfl.ops.losses import cross_entropy
from fedjax_pfl.ops.training import Loss, Scalar, Trainer, is_off

Teacher = Literal["adapted", "fixed", "off"]


class Heads(NamedTuple):
    """The two heads that are trained side by side: student and teacher."""

    personal: Params
    teacher: Params  # a copy of phi_g that adapts to the client, and is thrown away afterwards


class Teaching(NamedTuple):
    """The training of the personal head.

    On every batch both heads take one step at the same time, the personal one by Eq. 3 and the teacher by Eq. 4. This
    is our reading of lines that say only that the two are minimised.

    Attributes:
      teacher: whether the global head adapts while it teaches, stays as received, or does not teach.
      lam: lambda, weight of the distillation.
      temperature: tau.
      scaled: whether the distillation is multiplied by tau^2.
      epochs: E_cl.
      lr: learning rate of both heads; None for the trainer's rate.
    """

    teacher: Teacher
    lam: Scalar
    temperature: Scalar
    scaled: bool
    epochs: int
    lr: Scalar | None = None

    def __call__(
        self, now: Round, model: Model, train: Trainer, heads: Heads, features: ClientData
    ) -> tuple[Params, Diagnostics]:
        """The personal head after its epochs on the features, and the strength of the teacher's pull at the end."""

        def parts(personal: Params, batch: Batch, teacher: Params) -> tuple[Array, Array, Array]:
            """Cross-entropy of the student, distillation, cross-entropy of the teacher."""
            logits = model.classify(personal, batch.x)
            ce, nothing = cross_entropy(logits, batch.y, batch.mask), jnp.zeros(())
            if self.teacher == "off" or is_off(self.lam):
                return ce, nothing, nothing
            taught = model.classify(teacher, batch.x)
            lesson = distillation(logits, taught, batch.mask, temperature=self.temperature, scaled=self.scaled)
            adapting = cross_entropy(taught, batch.y, batch.mask) if self.teacher == "adapted" else nothing
            return ce, self.lam * lesson, adapting

        def loss(heads: Heads, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            # No gradient of the distillation reaches the teacher, so that one sum serves Eq. 3 and Eq. 4.
            ce, lesson, adapting = parts(heads.personal, batch, heads.teacher)
            return ce + lesson + adapting

        def fixed_teacher_loss(personal: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            return loss(Heads(personal, heads.teacher), batch, key)

        phase = partial(train, phase="head", epochs=self.epochs, lr=self.lr, record=False)
        if self.teacher == "adapted":
            heads, _ = phase(now, loss, heads, features)
        else:
            head, _ = phase(now, fixed_teacher_loss, heads.personal, features)
            heads = heads._replace(personal=head)

        def part(number: int) -> Loss[Params]:
            return lambda personal, batch, key: parts(personal, batch, heads.teacher)[number]

        terms = {} if self.teacher == "off" or is_off(self.lam) else {"distillation": part(1)}
        return heads.personal, train.gradient_ratios(now, part(0), terms, heads.personal, features)
