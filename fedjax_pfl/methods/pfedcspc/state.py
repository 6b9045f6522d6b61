"""What pFedCSPC's server and clients keep, and what they exchange."""

from typing import NamedTuple

from fedjax_pfl.method import Diagnostics, PerClass
from fedjax_pfl.methods.base_loss import Last
from fedjax_pfl.methods.pfedcspc.initial import Known
from fedjax_pfl.models.base import Params
from fedjax_pfl.ops.prototypes import Prototypes


class Server(NamedTuple):
    """Shared: the global model (E_g, H, F), H and F calibrated, and what the server knows of classes and clients.

    Attributes:
      params: the global model.
      prototypes: u_g, in the space of the encoders; None if no module needs them.
      exemplars: e, in the space of the calibrated projections; likewise.
      known: of each client, for personal initial models; None without these.
      diagnostics: the server's, of the last round; NaN before round 0.
      scored: the encoders of all m_k, [N, ...], sent for scoring if training does not start from them; else None.
    """

    params: Params
    prototypes: Prototypes | None
    exemplars: Prototypes | None
    known: Known | None
    diagnostics: Diagnostics
    scored: Params | None = None


class View(NamedTuple):
    """What is sent down.

    Attributes:
      params: the global model; without E_g if every client gets an encoder of its own.
      prototypes: u_g, if they guide training.
      scored: as in `Server`.
    """

    params: Params
    prototypes: PerClass | None
    scored: Params | None


class Client(NamedTuple):
    """Personal.

    Attributes:
      inbox: the encoder of m_k, which the server writes for a client before it trains from there; None where it trains
        from the global model.
      last: its last local model, where L_base asks for it; else None.
    """

    inbox: Params | None
    last: Last | None


class Upload(NamedTuple):
    """What is sent up: the trained model, and the prototypes U_k of the classes held with a flag per cluster.

    If PMI weighs by samples, the number of samples of each class takes the place of its flag.
    """

    params: Params
    prototypes: PerClass | None


def with_encoder(params: Params, encoder: Params | None) -> Params:
    """The model with another encoder, or without one."""
    return {**params, "extractor": {**params["extractor"], "encoder": encoder}}
