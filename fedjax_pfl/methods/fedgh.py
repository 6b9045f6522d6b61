"""FedGH (Yi et al., ACM MM 2023): personal extractors under one head, which the server trains on class means."""

from typing import Annotated

from annotated_types import Ge, Gt
from jaxtyping import Array, Float, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Method, PerClass, Round, Update
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.heads import train_head
from fedjax_pfl.ops.losses import supervised
from fedjax_pfl.ops.prototypes import class_means, class_sums_under, means_as_samples
from fedjax_pfl.ops.training import Trainer


def fedgh(
    model: Model,
    train: Trainer,
    *,
    server_lr: Annotated[float, Gt(0)] = 0.01,
    server_epochs: Annotated[int, Ge(0)] = 1,
    server_batch_size: Annotated[int, Ge(1)] = 1,
) -> Method:
    """FedGH: participants train extractor and received head, and send the mean feature of each of their classes.

    Shared: phi. Personal: theta_i; a client's own phi_i ends with the round. Headline: PRE, (theta_i, phi^{t+1}), as in
    PFLlib; POST is (theta_i, phi_i), as in the official script.

    In the official script the server steps the optimiser of a client, so that its head never changes; here the head
    changes, as in the paper. The script's class means are means over batches; here they are means over samples. Every
    pair of client and class counts once. All heads start alike.

    Args:
      model: extractor and head; all extractors start from the same parameters.
      train: the local trainer.
      server_lr: eta_s, the learning rate of phi; PFLlib's 1 diverges easily.
      server_epochs: E_s, passes of the server over the class means of a round.
      server_batch_size: class means per step of the server; 1 in the official script, B in PFLlib.

    Reference:
      L. Yi, G. Wang, X. Liu, Z. Shi, H. Yu. FedGH: Heterogeneous Federated Learning with Generalized Global Header.
      ACM MM 2023. arXiv:2303.13137.
    """
    train_server = Trainer(epochs=server_epochs, batch_size=server_batch_size, lr=server_lr)

    def init(key: Key[Array, ""], clients: int) -> tuple[Params, Params]:
        params = model.init(key)
        return params["head"], params["extractor"]

    def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
        return supervised(model, params, batch)

    def local(now: Round, view: Params, client: Params, data: ClientData) -> Update:
        params, info = train(now, loss, {"extractor": client, "head": view}, data)
        extractor = params["extractor"]
        means = class_means(class_sums_under(model, extractor, data), data.class_counts)
        return Update(extractor, means.as_sent(), info, post=(params["head"], extractor))

    def aggregate(
        now: Round, server: Params, clients: Params, uploads: PerClass, cohort: Cohort
    ) -> tuple[Params, Params]:
        pairs = means_as_samples(uploads.rows, uploads.held, cohort.ids)
        return train_head(now, model, train_server, server, pairs), clients

    def personal(view: Params, client: Params) -> Params:
        return {"extractor": client, "head": view}

    return Method(init, local, aggregate, personal, model.apply)
