"""pFedCSPC: personal encoders for the clients, and a global model that the server calibrates on all prototypes."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Logits, Method, PerClass, Round, Samples, TrainInfo, Update
from fedjax_pfl.methods.pfedcspc.cluster import mean_over_clients
from fedjax_pfl.methods.pfedcspc.initial import project
from fedjax_pfl.methods.pfedcspc.parts import Parts
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine
from fedjax_pfl.ops.losses import label_loss, proximal
from fedjax_pfl.ops.prototypes import Prototypes, update_prototypes
from fedjax_pfl.ops.training import Trainer


class Server(NamedTuple):
    """Shared: the global model (E_g, H, F), H and F calibrated, and what the server knows of the classes.

    Attributes:
      params: the global model.
      prototypes: u_g, in the space of the encoders; None if no module needs them.
      exemplars: e, in the space of the calibrated projections; likewise.
    """

    params: Params
    prototypes: Prototypes | None
    exemplars: Prototypes | None


class View(NamedTuple):
    """What is sent down to all: H, F, the prototypes u_g if they guide training, and E_g unless each gets its own."""

    encoder: Params | None
    projection: Params
    head: Params
    prototypes: PerClass | None


class Client(NamedTuple):
    """Personal: the encoder of m_k, which the server combines from the participants' encoders."""

    inbox: Params


class Upload(NamedTuple):
    """What is sent up: the trained model, and the prototypes U_k of the classes held with a flag per cluster."""

    params: Params
    prototypes: PerClass | None


def algorithm(model: Model, train: Trainer, combine: Combine, parts: Parts) -> Method:
    """The rounds of pFedCSPC; :func:`~fedjax_pfl.methods.pfedcspc.pfedcspc` says what its parts do.

    Raises:
      ValueError: the model has no projection head.
    """
    if model.projection is None:
        raise ValueError("it needs a model with a projection head, such as cnn_proj or resnet18_proj")
    encode, _, dim = model.projection
    align, cluster, initial, calibrate, knowledge, mu = parts
    starts_personal = initial is not None and initial.when == "every"
    adapts = initial is not None and initial.when == "eval"

    def init(key: Key[Array, ""], clients: int) -> tuple[Server, PyTree]:
        del clients
        params: Params = model.init(key)
        client = () if initial is None else Client(params["extractor"]["encoder"])
        if cluster is None:
            return Server(params, None, None), client
        return Server(params, Prototypes.none(model.classes, dim), Prototypes.none(model.classes, model.dim)), client

    def broadcast(server: Server) -> View:
        extractor, u = server.params["extractor"], server.prototypes
        encoder = None if starts_personal else extractor["encoder"]
        sent = None if align is None or u is None else PerClass(u.valid, u.mean)
        return View(encoder, extractor["projection"], server.params["head"], sent)

    def join(encoder: Params, view: View) -> Params:
        return {"extractor": {"encoder": encoder, "projection": view.projection}, "head": view.head}

    def personal(view: View, client: PyTree, params: Params) -> tuple[View, PyTree]:
        """(view, client) from which ``predict`` takes this model."""
        encoder, projection = params["extractor"]["encoder"], params["extractor"]["projection"]
        view = view._replace(projection=projection, head=params["head"])
        return (view._replace(encoder=encoder), client) if initial is None else (view, Client(encoder))

    def adapt(now: Round, view: View, start: Params, data: ClientData) -> tuple[Params, TrainInfo]:
        """Local training on L_base + kappa L_align (Eqs. 5-7, 18)."""

        def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            del key
            f = encode(params["extractor"], batch.x, batch.mask)
            z = project(model, params["extractor"]["projection"], f)
            total = label_loss(model, z, model.classify(params["head"], z), batch)
            if mu is not None:
                total += proximal(params, start, mu)
            if align is None or view.prototypes is None:
                return total
            u = Prototypes(view.prototypes.rows, view.prototypes.held)
            return total + align.weight * align(f, batch.y, batch.mask, u)

        return train(now, loss, start, data)

    def local(now: Round, view: View, client: PyTree, data: ClientData) -> Update:
        start = join(client.inbox if starts_personal else view.encoder, view)
        params, info = adapt(now, view, start, data)
        prototypes = None if cluster is None else cluster.of(now.key, partial(encode, params["extractor"]), data)
        return Update(client, Upload(params, prototypes), info, post=personal(view, client, params))

    def aggregate(
        now: Round, server: Server, clients: PyTree, uploads: Upload, cohort: Cohort
    ) -> tuple[Server, PyTree]:
        params = combine(uploads.params, cohort.weight)
        u_g, e, sent = server.prototypes, server.exemplars, uploads.prototypes
        if cluster is None or u_g is None or e is None or sent is None:
            return server._replace(params=params), clients
        u, valid = cluster.received(sent)
        if initial is not None:
            weights = initial.weights(model, uploads.params, u, valid, cohort.weight > 0)
            encoders = uploads.params["extractor"]["encoder"]
            clients = Client(jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, axes=1), encoders))
        if calibrate is not None:
            params = calibrate(now, model, params, u, valid, cohort.ids)
        u_g = update_prototypes(u_g, mean_over_clients(u, valid))
        e = update_prototypes(e, mean_over_clients(project(model, params["extractor"]["projection"], u), valid))
        return Server(params, prototypes=u_g, exemplars=e), clients

    def predict(view: View, client: PyTree, x: Samples) -> Logits:
        return model.apply(join(view.encoder if initial is None else client.inbox, view), x)

    def personalize(now: Round, view: View, client: PyTree, data: ClientData) -> tuple[View, PyTree]:
        if not adapts:
            return view, client
        return personal(view, client, adapt(now, view, join(client.inbox, view), data)[0])

    def global_predict(server: Server, x: Samples) -> Logits:
        z = model.features(server.params["extractor"], x)
        logits = model.classify(server.params["head"], z)
        return logits if knowledge is None or server.exemplars is None else knowledge(z, logits, server.exemplars)

    return Method(
        init, local, aggregate, predict, broadcast, personalize, global_predict, headline="pre" if adapts else "post"
    )
