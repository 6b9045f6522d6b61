"""A FedAvg round in pfl 0.5.1 (pfl-research), PyTorch backend: its ``FederatedAveraging`` on its ``SimulatedBackend``.

It runs one client after the other, in one process, on slices of tensors in memory, which it does not shuffle.
"""

from collections.abc import Callable

import torch
from case import Case, measure, normalised, parser, read, save
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from pytorch_model import Net


class PflNet(Net):
    """The model with the two functions that pfl asks for."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of a batch."""
        return torch.nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
        """The loss of a batch, which pfl evaluates in its first round."""
        with torch.no_grad():
            return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


def make_round(case: Case) -> Callable[[bool], None]:
    """A function that runs a round, on the first samples of each client if it is told to."""
    settings = case.settings

    def dataset(rows):
        x = torch.from_numpy(normalised(case.images[rows]).transpose(0, 3, 1, 2).copy())
        return PyTorchTensorDataset((x, torch.from_numpy(case.labels[rows])))

    clients = {
        False: [dataset(rows) for rows in case.rows],
        True: [dataset(rows[: settings["warm_up"]]) for rows in case.rows],
    }
    now = {"round": 0, "warm_up": True}
    users = get_user_sampler("minimize_reuse", list(range(len(case.rows))))
    data = FederatedDataset(lambda user: clients[now["warm_up"]][user], users)
    net = PflNet(settings["model"], settings["shape"], settings["classes"])
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    backend = SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()])
    algorithm = FederatedAveraging()
    local = NNTrainHyperParams(
        local_learning_rate=settings["lr"],
        local_num_epochs=settings["epochs"],
        local_batch_size=settings["batch_size"],
    )

    def round_(warm_up: bool) -> None:
        now["round"] += 1
        now["warm_up"] = warm_up
        # Only round 0 is evaluated.
        parameters = NNAlgorithmParams(
            central_num_iterations=now["round"],
            evaluation_frequency=10**6,
            train_cohort_size=len(case.rows),
            val_cohort_size=None,
        )
        algorithm.run(parameters, backend, model, local, send_metrics_to_platform=False)

    return round_


if __name__ == "__main__":
    arguments = parser().parse_args()
    save(arguments.out, measure(make_round(read(arguments.case)), arguments.rounds)["seconds"])
