"""The modules that pFedCSPC is made of."""

from typing import NamedTuple

from fedjax_pfl.methods.pfedcspc.calibration import Calibrator
from fedjax_pfl.methods.pfedcspc.client_loss import ClientLoss
from fedjax_pfl.methods.pfedcspc.cluster import ClusterPrototypes
from fedjax_pfl.methods.pfedcspc.initial import InitialModels
from fedjax_pfl.methods.pfedcspc.knowledge import KnowledgePrediction


class Parts(NamedTuple):
    """Each but the first is None where it is off.

    Attributes:
      loss: what a client minimises, with PTA in it.
      cluster: CPM, a client's prototypes; None if no module needs any.
      initial: PMI, personal initial models.
      calibrate: CA and PA, the server's training.
      knowledge: KP, the global model's prediction.
    """

    loss: ClientLoss
    cluster: ClusterPrototypes | None
    initial: InitialModels | None
    calibrate: Calibrator | None
    knowledge: KnowledgePrediction | None

    @property
    def diagnostics(self) -> tuple[str, ...]:
        """Names of the server's diagnostics."""
        return tuple(name for part in (self.initial, self.calibrate) if part is not None for name in part.diagnostics)
