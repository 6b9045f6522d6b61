"""FedRep (Collins et al., ICML 2021), Algorithm 1: first the personal head, then the shared extractor."""

from typing import Annotated

from annotated_types import Ge
from jaxtyping import Array, Float, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Method, Round, Update
from fedjax_pfl.methods.fedper import fedper
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.heads import train_head
from fedjax_pfl.ops.losses import supervised
from fedjax_pfl.ops.training import Trainer, cache_features


def fedrep(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    head_epochs: Annotated[int, Ge(0)] = 10,
    final_head_epochs: Annotated[int, Ge(0)] = 0,
) -> Method:
    """FedRep: participants train their head under the received extractor, then the extractor under the new head.

    Shared: theta, averaged by n_i, where the paper's clients count alike. Personal: phi_i. Headline: PRE.
    ``training.epochs`` is E_b, the extractor's. The head phase runs on features that are computed once per round, since
    the extractor stands still: base augmentation is drawn once for all epochs of the head, and anew in each of the
    extractor's.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging extractors.
      head_epochs: E_h; official: 10; try 1, 5 and 10.
      final_head_epochs: head epochs under the aggregated extractor before each PRE evaluation. The paper's protocol is
        max(10, E_h) after the last round (with ``run.eval_every = training.rounds``).

    Reference:
      L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai. Exploiting Shared Representations for Personalized Federated
      Learning. ICML 2021. arXiv:2102.07078.
    """

    def local(now: Round, view: Params, client: Params, data: ClientData) -> Update:
        features = cache_features(lambda x: model.features(view, x), data)
        head = train_head(now, model, train, client, features, epochs=head_epochs)

        def loss(extractor: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            return supervised(model, {"extractor": extractor, "head": head}, batch)

        extractor, info = train(now, loss, view, data)
        return Update(head, extractor, info)

    def personalize(now: Round, view: Params, client: Params, data: ClientData) -> tuple[Params, Params]:
        if final_head_epochs == 0:
            return view, client
        features = cache_features(lambda x: model.features(view, x), data)
        return view, train_head(now, model, train, client, features, phase="final head", epochs=final_head_epochs)

    return fedper(model, train, combine)._replace(local=local, personalize=personalize)
