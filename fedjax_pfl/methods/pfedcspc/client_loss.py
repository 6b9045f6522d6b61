"""What a client minimises: L_base + kappa L_align (pFedCSPC, Eq. 18), and a cross-entropy on the encoder's features."""

from collections.abc import Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from fedjax_pfl.data.federated import Batch
from fedjax_pfl.method import PerClass
from fedjax_pfl.methods.base_loss import BaseLoss
from fedjax_pfl.methods.pfedcspc.initial import project
from fedjax_pfl.methods.pfedcspc.relations import Alignment
from fedjax_pfl.models.base import Model, Params, initializers
from fedjax_pfl.ops.losses import cross_entropy, label_loss
from fedjax_pfl.ops.prototypes import Prototypes
from fedjax_pfl.ops.training import Loss, is_off, phase_key

TERMS = ("base", "kappa", "encoder_ce")


class ClientLoss(NamedTuple):
    """L_base with what is added to it.

    Attributes:
      align: PTA, what the global prototypes add; None for nothing.
      encoder_ce: weight of the cross-entropy of a second classifier, linear on the encoder's features; 0 for none.
      base: L_base, as a change of plain cross-entropy.
    """

    align: Alignment | None
    encoder_ce: float
    base: BaseLoss

    def with_classifier(self, key: Key[Array, ""], model: Model, params: Params) -> Params:
        """Params with the second classifier, [d, C] and drawn as PyTorch's, if there is to be one.

        It is part of the model (``encoder_head``): trained, sent and averaged as the rest is. It predicts nothing.
        """
        if is_off(self.encoder_ce):
            return params
        assert model.projection is not None
        width, classes = model.projection.width, model.classes
        draw = initializers("torch", width)
        kernel = draw.kernel(phase_key(key, "encoder head kernel"), (width, classes))
        bias = draw.bias(phase_key(key, "encoder head bias"), (classes,))
        return {**params, "encoder_head": {"kernel": kernel, "bias": bias}}

    def from_start(
        self, model: Model, start: Params, last: Params, prototypes: PerClass | None, *, terms: Collection[str] = TERMS
    ) -> Loss[Params]:
        """The loss of training that begins at ``start``.

        Args:
          model: of ``start``.
          start: the model that L_base is told of as the received one.
          last: the client's last local model, or else ``start``.
          prototypes: u_g, as sent.
          terms: which of them to take: L_base, or what is added to it, by the name of its coefficient.
        """

        added = None if self.base.term is None else self.base.term(start, last)

        def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            assert model.projection is not None
            f = model.projection.encode(params["extractor"], batch.x, batch.mask)
            z = project(model, params["extractor"]["projection"], f)
            found = []
            if "base" in terms:
                logits = model.classify(params["head"], z)
                found.append(label_loss(model, z, logits, batch))
                found += [] if added is None else [added(params, z, logits, batch)]
            if "encoder_ce" in terms and not is_off(self.encoder_ce):
                labels = cross_entropy(model.classify(params["encoder_head"], f), batch.y, batch.mask)
                found.append(self.encoder_ce * labels)
            if "kappa" in terms and self.align is not None and prototypes is not None:
                u = Prototypes.as_received(prototypes)
                found.append(self.align.weight * self.align(f, batch.y, batch.mask, u))
            total: Float[Array, ""] = jax.tree.reduce(jnp.add, found)
            return total

        # L_base may take the gradient elsewhere; the terms by themselves are looked at where they are.
        return loss if self.base.around is None or len(terms) < len(TERMS) else self.base.around(loss)

    def separate_terms(
        self, model: Model, start: Params, last: Params, prototypes: PerClass | None
    ) -> tuple[Loss[Params], dict[str, Loss[Params]]]:
        """L_base, and each term that is added to it, by name."""
        present = {"kappa": self.align is not None, "encoder_ce": not is_off(self.encoder_ce)}
        base, *added = (self.from_start(model, start, last, prototypes, terms=[name]) for name in TERMS)
        return base, {name: term for name, term in zip(TERMS[1:], added, strict=True) if present[name]}
