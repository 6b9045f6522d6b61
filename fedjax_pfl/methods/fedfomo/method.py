"""FedFomo (Zhang et al., ICLR 2021), Algorithm 1: clients mix those models that do well on their validation samples."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Le
from jaxtyping import Array, Bool, Float, Int, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Method, Round, Update
from fedjax_pfl.methods.fedfomo.candidates import Candidates, Mix, choose, mix
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.losses import supervised
from fedjax_pfl.ops.training import Trainer, phase_key
from fedjax_pfl.ops.tree import put_rows, take_rows


class Server(NamedTuple):
    """Kept by the server only: all last uploads, which clients have sent one, and sums of a_j for each i, [i, j]."""

    models: Params
    known: Bool[Array, " N"]
    preference: Float[Array, "N N"]


class Client(NamedTuple):
    """Personal: w_i, ref_i from which it was trained, and the candidates that the server sends; () without others."""

    params: Params
    reference: Params
    inbox: Candidates | tuple[()]


class Upload(NamedTuple):
    """Sent up: w_i, and the a_j of the other clients' models."""

    params: Params
    gains: Float[Array, " others"]


def fedfomo(
    model: Model,
    train: Trainer,
    *,
    candidates: Annotated[int, Ge(1)] = 5,
    exploration: Annotated[float, Ge(0), Le(1)] = 0.3,
    exploration_decay: Annotated[float, Ge(0)] = 0.05,
) -> Method:
    """FedFomo: w_i <- ref_i + sum_j a_j (w_j - ref_i) / sum_j a_j over the candidates with a_j > 0, then training.

    Shared: only the candidates. Personal: w_i, ref_i. Headline: POST; PRE is the mix before training.

    With the mean loss L_i on client i's validation samples, a_j = (L_i(ref_i) - L_i(w_j)) / (||w_j - ref_i|| + 1e-5).
    If no candidate is better, the client goes back to ref_i; without validation samples it keeps w_i, as Local does.
    Scores on validation samples are optimistic, above all PRE, since these samples have chosen the mix; a best round
    that is chosen by such scores is less certain.

    The candidates are w_i and the models of M - 1 other clients (in the official code only of participants of the last
    round). Each of these is drawn from all other clients with probability max(0, exploration - exploration_decay t);
    otherwise it is the one with the largest sum of a_j so far. Ties are broken at random. Clients that have not taken
    part yet come last, with the initial model, whose a_j is not added to the sums. The norm is the paper's, L2, over
    all parameters except running statistics. (The official code has L1 by default, and adds up a_j divided by |sum_j
    a_j|, so that all rounds count alike.) Server and clients hold N (M + 2) models.

    Args:
      model: extractor and head.
      train: the local trainer.
      candidates: M, including the own model; 5 or 10.
      exploration: epsilon in round 0.
      exploration_decay: decrease of epsilon in every round.

    Reference:
      M. Zhang, K. Sapra, S. Fidler, S. Yeung, J. M. Alvarez. Personalized Federated Learning with First Order Model
      Optimization. ICLR 2021. arXiv:2012.08565.
    """

    def init(key: Key[Array, ""], clients: int) -> tuple[Server, Client]:
        params, others = model.init(key), min(candidates, clients) - 1

        def copies(rows: int) -> Params:
            return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (rows, *leaf.shape)), params)

        server = Server(copies(clients), jnp.zeros(clients, bool), jnp.zeros((clients, clients)))
        inbox = Candidates(copies(others), jnp.zeros(others, jnp.int32)) if others > 0 else ()
        return server, Client(params, params, inbox)

    def dispatch(now: Round, server: Server, clients: Client, cohort: Cohort) -> Candidates | tuple[()]:
        if not clients.inbox:
            return ()
        number, everyone = clients.inbox.ids.shape[1], jnp.arange(len(server.known))
        explore = jnp.maximum(exploration - exploration_decay * now.t.astype(jnp.float32), 0.0)

        def chosen(own: Int[Array, ""], preference: Float[Array, " N"]) -> Int[Array, " others"]:
            key = jax.random.fold_in(phase_key(now.key, "candidates"), own)
            return choose(key, number, everyone != own, server.known, preference, explore)

        ids = jax.vmap(chosen)(cohort.ids, take_rows(server.preference, cohort.ids))
        return Candidates(jax.tree.map(lambda leaf: leaf[ids], server.models), ids)

    def mixed(client: Client, data: ClientData) -> Mix:
        if data.validation is None:
            return Mix(client.params, jnp.zeros(len(client.inbox.ids) if client.inbox else 0), jnp.zeros(()))
        others = client.inbox.models if client.inbox else None
        return mix(model, client.reference, client.params, others, data.validation)

    def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
        return supervised(model, params, batch)

    def local(now: Round, view: tuple[()], client: Client, data: ClientData) -> Update:
        start, gains, weight_of_others = mixed(client, data)
        params, info = train(now, loss, start, data)
        own, said = Client(params, start, client.inbox), {"weight_of_others": weight_of_others}
        return Update(own, Upload(params, gains), info, post=(view, own), diagnostics=said)

    def aggregate(
        now: Round, server: Server, clients: Client, uploads: Upload, cohort: Cohort
    ) -> tuple[Server, Client]:
        sent = uploads.params, cohort.weight > 0
        models, known = put_rows((server.models, server.known), cohort.ids, sent)
        preference = server.preference
        if clients.inbox:
            # For a client without an upload the initial model was sent, whose gain says nothing about that client.
            gains = jnp.where(server.known[clients.inbox.ids], uploads.gains, 0.0)
            preference = preference.at[cohort.ids[:, None], clients.inbox.ids].add(gains, mode="drop")
        return Server(models, known, preference), clients

    def personalize(now: Round, view: tuple[()], client: Client, data: ClientData) -> tuple[tuple[()], Client]:
        return view, client._replace(params=mixed(client, data).params)

    def personal(view: tuple[()], client: Client) -> Params:
        return client.params

    method = Method(init, local, aggregate, personal, model.apply, selects=True)
    return method._replace(broadcast=lambda server: (), dispatch=dispatch, personalize=personalize, headline="post")
