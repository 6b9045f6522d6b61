"""CA: cross-silo prototypical calibration, what a server learns from all clients' prototypes (pFedCSPC, IV-C2)."""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Diagnostics, Round
from fedjax_pfl.methods.pfedcspc.contrast import augmented_contrast, weighted_contrast
from fedjax_pfl.methods.pfedcspc.corpus import augment_prototypes, gather
from fedjax_pfl.methods.pfedcspc.initial import project
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.losses import cross_entropy
from fedjax_pfl.ops.training import Scalar, Trainer, is_off


@dataclass(frozen=True)
class Calibrator:
    """How the server trains projection head and classifier on the prototypes of all clients (Eqs. 10-13, 17).

    Numeric fields but the counts may be traced values.

    Attributes:
      eta: weight of both contrastive losses.
      augmented: n_aug, pairs of augmented samples per prototype; 0 leaves their loss out.
      margin: alpha of their loss.
      temperature: tau_g, of the contrast between the clients' prototypes.
      lr: learning rate in the first rounds.
      lr_drops: rounds from which on it is a tenth of what it was.
      epochs: passes over the prototypes.
      epochs_per_drop: passes after which the learning rate is a tenth of what it was, within a round.
      batch_size: prototypes per step.
      weight_decay: L2 coefficient.
      diagnose: whether the pull of the contrastive losses is measured, for the record.
    """

    eta: Scalar
    augmented: int
    margin: Scalar
    temperature: Scalar
    lr: Scalar
    lr_drops: tuple[int, ...]
    epochs: int
    epochs_per_drop: int
    batch_size: int
    weight_decay: Scalar
    diagnose: bool

    @property
    def diagnostics(self) -> tuple[str, ...]:
        """Names of the diagnostics of a call."""
        return ("gradient_ratio_eta",) if self.diagnose and not is_off(self.eta) else ()

    def __call__(
        self,
        now: Round,
        model: Model,
        params: Params,
        u: Float[Array, "K C M d"],
        valid: Bool[Array, "K C M"],
        ids: Int[Array, " K"],
    ) -> tuple[Params, Diagnostics]:
        """The global model with H and F retrained; all else is frozen.

        Args:
          now: the round, and the server's key in it.
          model: projects and classifies.
          params: the averaged model.
          u: the prototypes of K clients, M places per class.
          valid: which of these hold one.
          ids: of the clients.

        Returns:
          The model, and how strongly eta times both contrastive losses pull beside the cross-entropy before the first
          step (`Trainer.gradient_ratios`).
        """
        train = Trainer(batch_size=self.batch_size, weight_decay=self.weight_decay, diagnose=self.diagnose)
        corpus = gather(u, valid, ids)
        rows = jnp.arange(len(corpus.y), dtype=jnp.int32)
        data = ClientData(rows, corpus.y, rows, corpus.count, jnp.sum(valid, axis=(0, 2), dtype=jnp.float32))

        def loss(
            trained: tuple[Params, Params], batch: Batch, key: Key[Array, ""], *, labels: float = 1.0, eta: Scalar
        ) -> Float[Array, ""]:
            projection, head = trained
            points, with_pairs = corpus.u[batch.x][:, None], self.augmented > 0 and not is_off(eta)
            if with_pairs:
                samples = augment_prototypes(key, corpus, batch.x, pairs=self.augmented)
                points = jnp.concatenate([points, samples.positive, samples.negative], axis=1)
            # One pass of H for all points: an accelerator then needs a quarter fewer kernels per step.
            projected = project(model, projection, points)
            z = projected[:, 0]
            total = labels * cross_entropy(model.classify(head, z), batch.y, batch.mask)
            if is_off(eta):
                return total
            contrast = weighted_contrast(z, batch.y, corpus.client[batch.x], batch.mask, temperature=self.temperature)
            if with_pairs:
                positive, negative = jnp.split(projected[:, 1:], 2, axis=1)
                mask = batch.mask * samples.exists
                contrast += augmented_contrast(z, positive, negative, mask, margin=self.margin)
            return total + eta * contrast

        lr = self.lr * 0.1 ** sum((now.t >= drop).astype(jnp.float32) for drop in self.lr_drops)

        def epochs_at_one_rate(number: Int[Array, ""], trained: tuple[Params, Params]) -> tuple[Params, Params]:
            epochs = jnp.minimum(self.epochs_per_drop, self.epochs - number * self.epochs_per_drop)
            rate = lr * 0.1 ** number.astype(jnp.float32)
            turn = Round(jax.random.fold_in(now.key, number), now.t)
            return train(turn, partial(loss, eta=self.eta), trained, data, epochs=epochs, lr=rate, record=False)[0]

        heads = params["extractor"]["projection"], params["head"]
        rates = math.ceil(self.epochs / self.epochs_per_drop)
        projection, head = lax.fori_loop(0, rates, epochs_at_one_rate, heads)
        terms = {} if is_off(self.eta) else {"eta": partial(loss, labels=0.0, eta=self.eta)}
        said = train.gradient_ratios(now, partial(loss, eta=0.0), terms, heads, data)
        return {**params, "extractor": {**params["extractor"], "projection": projection}, "head": head}, said
