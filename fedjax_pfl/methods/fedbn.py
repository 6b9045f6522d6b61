"""FedBN (Li et al., ICLR 2021): normalisation layers stay with the clients, all other layers are averaged."""

import jax
from jaxtyping import Array, Float, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Method, Round, Update
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.models.norm import STATISTICS
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.losses import supervised
from fedjax_pfl.ops.training import Trainer


def fedbn(model: Model, train: Trainer, combine: Combine = weighted_mean) -> Method:
    """FedBN: participants train all layers jointly; scale, shift and running statistics of normalisation stay local.

    Shared: all other layers. Personal: the normalisation layers. Headline: PRE, the averaged layers with each client's
    own normalisation.

    The paper is about batch normalisation (``norm = "batch"`` of ``resnet18``), for clients whose inputs differ. Scale
    and shift of any other kind of normalisation stay on the client, too. The paper averages uniformly; here the average
    is weighted by n_i.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging layers.

    Raises:
      ValueError: the model has no normalisation layer.

    Reference:
      X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou. FedBN: Federated Learning on Non-IID Features via Local Batch
      Normalization. ICLR 2021. arXiv:2102.07623.
    """
    if not jax.tree.leaves(_split(jax.eval_shape(model.init, jax.random.key(0)))[1]):
        raise ValueError("it needs a model with normalisation layers, such as resnet18")

    def init(key: Key[Array, ""], clients: int) -> tuple[Params, Params]:
        return _split(model.init(key))

    def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
        return supervised(model, params, batch)

    def local(now: Round, view: Params, client: Params, data: ClientData) -> Update:
        params, info = train(now, loss, _join(view, client), data)
        layers, normalisation = _split(params)
        return Update(normalisation, layers, info)

    def aggregate(
        now: Round, server: Params, clients: Params, uploads: Params, cohort: Cohort
    ) -> tuple[Params, Params]:
        return combine(uploads, cohort.weight), clients

    return Method(init, local, aggregate, _join, model.apply)


def _split(params: Params) -> tuple[Params, Params]:
    """(layers, normalisation): two trees like the parameters, each with None where the other has a leaf.

    A layer with a ``scale`` or with running statistics is normalisation: Flax gives the name ``scale`` to the factor of
    all its normalisation layers, and ``norm.py`` does the same.
    """
    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    normalisation = {path[:-1] for path in paths if getattr(path[-1], "key", None) in ("scale", *STATISTICS)}

    def part(*, normalising: bool) -> Params:
        return jax.tree.map_with_path(
            lambda path, leaf: leaf if (path[:-1] in normalisation) == normalising else None, params
        )

    return part(normalising=False), part(normalising=True)


def _join(layers: Params, normalisation: Params) -> Params:
    """The parameters that `_split` has split."""
    return jax.tree.map(lambda a, b: b if a is None else a, layers, normalisation, is_leaf=lambda leaf: leaf is None)
