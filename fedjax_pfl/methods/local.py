"""Local: every client trains alone. The control without communication."""

from jaxtyping import Array, Float, Key, PyTree

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Method, Round, Update
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.losses import supervised
from fedjax_pfl.ops.training import Trainer


def local(model: Model, train: Trainer) -> Method:
    """Local: every client trains its own model on its own samples; nothing is exchanged.

    Shared: nothing. Personal: w_i. Headline: POST (equal to the next round's PRE).

    A client trains in the rounds for which it is selected; with full participation this makes rounds x epochs epochs in
    all.

    Reference:
      The control without communication of the comparisons that the other methods cite.
    """

    def init(key: Key[Array, ""], clients: int) -> tuple[PyTree, Params]:
        return (), model.init(key)

    def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
        return supervised(model, params, batch)

    def local(now: Round, view: PyTree, client: Params, data: ClientData) -> Update:
        params, info = train(now, loss, client, data)
        return Update(params, (), info)

    def aggregate(
        now: Round, server: PyTree, clients: Params, uploads: PyTree, cohort: Cohort
    ) -> tuple[PyTree, Params]:
        return server, clients

    def personal(view: PyTree, client: Params) -> Params:
        return client

    return Method(init, local, aggregate, personal, model.apply, headline="post")
