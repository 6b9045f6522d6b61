"""The modules that pFedCSPC is made of."""

from typing import NamedTuple

from fedjax_pfl.methods.pfedcspc.calibration import Calibrator
from fedjax_pfl.methods.pfedcspc.cluster import ClusterPrototypes
from fedjax_pfl.methods.pfedcspc.initial import InitialModels
from fedjax_pfl.methods.pfedcspc.knowledge import KnowledgePrediction
from fedjax_pfl.methods.pfedcspc.relations import Alignment
from fedjax_pfl.ops.training import Scalar


class Parts(NamedTuple):
    """Each is None where it is off.

    Attributes:
      align: PTA, what the global prototypes add to the client's loss.
      cluster: CPM, a client's prototypes; None if no module needs any.
      initial: PMI, personal initial models.
      calibrate: CA and PA, the server's training.
      knowledge: KP, the global model's prediction.
      mu: strength of FedProx's term.
    """

    align: Alignment | None
    cluster: ClusterPrototypes | None
    initial: InitialModels | None
    calibrate: Calibrator | None
    knowledge: KnowledgePrediction | None
    mu: Scalar | None
