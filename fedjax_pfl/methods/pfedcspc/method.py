"""pFedCSPC: personal encoders for the clients, and a global model that the server calibrates on all prototypes."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.method import Calibration, Cohort, Logits, Method, Round, Samples, TrainInfo, Update
from fedjax_pfl.methods.base_loss import Last
from fedjax_pfl.methods.pfedcspc.cluster import mean_over_clients
from fedjax_pfl.methods.pfedcspc.initial import project
from fedjax_pfl.methods.pfedcspc.parts import Parts
from fedjax_pfl.methods.pfedcspc.state import Client, Server, Upload, View, with_encoder
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine
from fedjax_pfl.ops.prototypes import Prototypes, update_prototypes
from fedjax_pfl.ops.training import Trainer
from fedjax_pfl.ops.tree import take_rows


def algorithm(model: Model, train: Trainer, combine: Combine, parts: Parts) -> Method:
    """The rounds of pFedCSPC; :func:`~fedjax_pfl.methods.pfedcspc.pfedcspc` says what its parts do.

    Raises:
      ValueError: the model has no projection head.
    """
    if model.projection is None:
        raise ValueError("it needs a model with a projection head, such as cnn_proj or resnet18_proj")
    encode, _, width = model.projection
    client_loss, cluster, initial, calibrate, knowledge = parts
    starts_personal = initial is not None and initial.when == "every"
    adapts = initial is not None and initial.when == "eval"

    def init(key: Key[Array, ""], clients: int) -> tuple[Server, Client]:
        params = client_loss.with_classifier(key, model, model.init(key))
        encoder = params["extractor"]["encoder"]
        last = Last(params, jnp.array(False)) if client_loss.base.keeps_last else None
        client = Client(encoder if starts_personal else None, last)
        said = {name: jnp.array(jnp.nan, jnp.float32) for name in parts.diagnostics}
        if cluster is None:
            return Server(params, None, None, None, said), client
        shape = model.classes, cluster.places, width
        known = None if initial is None else initial.before_round_0(encoder, clients, shape)
        u_g, e = (Prototypes.none(model.classes, dim) for dim in (width, model.dim))
        return Server(params, u_g, e, known, said), client

    def broadcast(server: Server) -> View:
        params, u = server.params, server.prototypes
        sent = None if client_loss.align is None or u is None else u.as_sent()
        return View(with_encoder(params, None) if starts_personal else params, sent, server.scored)

    def dispatch(now: Round, server: Server, clients: PyTree, cohort: Cohort) -> Params:
        """The encoder of m_k, for training: the newest one, also of a client that last took part long ago."""
        assert server.known is not None
        return take_rows(server.known.encoders, cohort.ids)

    def personal(view: View, client: Client) -> Params:
        return with_encoder(view.params, client.inbox) if starts_personal else view.params

    def as_scored(view: View, client: Client, params: Params) -> tuple[View, Client]:
        """(view, client) that have this model."""
        if not starts_personal:
            return view._replace(params=params), client
        return view._replace(params=with_encoder(params, None)), client._replace(inbox=params["extractor"]["encoder"])

    def last_of(client: Client, start: Params) -> Params:
        return start if client.last is None else client.last.or_received(start)

    def adapt(now: Round, view: View, client: Client, start: Params, data: ClientData) -> tuple[Params, TrainInfo]:
        """Local training on L_base + kappa L_align (Eqs. 5-7, 18)."""
        loss = client_loss.from_start(model, start, last_of(client, start), view.prototypes)
        return train(now, loss, start, data)

    def local(now: Round, view: View, client: Client, data: ClientData) -> Update:
        start = personal(view, client)
        params, info = adapt(now, view, client, start, data)
        encoder = partial(encode, params["extractor"])
        prototypes = None if cluster is None else cluster.prototypes_of(now.key, encoder, data)
        terms = client_loss.separate_terms(model, start, last_of(client, start), view.prototypes)
        said = train.gradient_ratios(now, *terms, start, data)
        if client.last is not None:
            client = client._replace(last=client.last.replaced(params, info))
        return Update(client, Upload(params, prototypes), info, as_scored(view, client, params), said)

    def aggregate(
        now: Round, server: Server, clients: PyTree, uploads: Upload, cohort: Cohort
    ) -> tuple[Server, PyTree]:
        params = combine(uploads.params, cohort.weight)
        u_g, e, known, said = server.prototypes, server.exemplars, server.known, server.diagnostics
        if cluster is None or u_g is None or e is None or uploads.prototypes is None:
            return server._replace(params=params), clients
        sent = cluster.received(uploads.prototypes)
        if initial is not None and known is not None:
            known, of_initial = initial.update(
                model, known, uploads.params, sent, cohort, params["extractor"]["encoder"]
            )
            said = said | of_initial
        if calibrate is not None:
            params, of_calibration = calibrate(now, model, params, sent.u, sent.valid, cohort.ids)
            said = said | of_calibration
        u_g = update_prototypes(u_g, mean_over_clients(sent.u, sent.valid))
        newest = partial(project, model, params["extractor"]["projection"])
        # A class that nobody holds in this round keeps u_g, of which the newest H makes another exemplar.
        e = update_prototypes(Prototypes(newest(u_g.mean), u_g.valid), mean_over_clients(newest(sent.u), sent.valid))
        return Server(params, u_g, e, known, said), clients

    def personalize(now: Round, view: View, client: Client, data: ClientData) -> tuple[View, Client]:
        """m_k, after local adaptation."""
        if not adapts:
            return view, client
        start = view.params
        if view.scored is not None:
            start = with_encoder(start, jax.tree.map(lambda leaf: leaf[data.id], view.scored))
        return as_scored(view, client, adapt(now, view, client, start, data)[0])

    def send_along(now: Round, server: Server, uploads: PyTree, cohort: Cohort) -> Server:
        """Sends the encoders along for scoring; training has no use for them, so a round does not send them."""
        assert server.known is not None
        return server._replace(scored=server.known.encoders)

    def global_predict(server: Server, x: Samples) -> Logits:
        z = model.features(server.params["extractor"], x)
        logits = model.classify(server.params["head"], z)
        return logits if knowledge is None or server.exemplars is None else knowledge(z, logits, server.exemplars)

    return Method(
        init,
        local,
        aggregate,
        personal,
        model.apply,
        broadcast,
        personalize,
        global_predict,
        headline="pre" if adapts else "post",
        dispatch=dispatch if starts_personal else None,
        calibrate=Calibration(lambda now, view, client, data: (), send_along) if adapts else None,
        diagnose=lambda server: server.diagnostics,
    )
