"""A FedAvg round in fedjax 0.0.17: its own ``federated_averaging``, data sets, optimisers and Haiku model.

It runs one client after the other and one compiled step per mini-batch, its default. A short last mini-batch is filled
up from the next shuffle, which is no more work than ours, padded. Its other backend, a client per device (``pmap``),
fails in its second round with the JAX versions that it can be installed with.
"""

from collections.abc import Callable

import fedjax
import haiku as hk
import jax
import jax.numpy as jnp
from case import Case, measure, normalised, parser, read, save
from fedjax.algorithms import fed_avg


def make_round(case: Case) -> Callable[[bool], None]:
    """A function that runs a round, on the first samples of each client if it is told to."""
    settings = case.settings
    model = settings["model"]
    activation = {"relu": jax.nn.relu, "leaky_relu": jax.nn.leaky_relu}[model["activation"]]

    def forward(batch):
        x = batch["x"]
        for channels, size, padding in model["blocks"]:
            x = hk.Conv2D(channels, size, padding=[(padding, padding)] * 2)(x)
            x = hk.max_pool(activation(x), 2, 2, "VALID")
        x = hk.Flatten()(x)
        for width in model["dense"]:
            x = activation(hk.Linear(width)(x))
        return hk.Linear(settings["classes"])(x)

    def loss(batch, logits):
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], axis=1)[:, 0]

    def dataset(rows):
        return fedjax.ClientDataset({"x": normalised(case.images[rows]), "y": case.labels[rows]})

    full = [dataset(rows) for rows in case.rows]
    short = [dataset(rows[: settings["warm_up"]]) for rows in case.rows]
    network = fedjax.create_model_from_haiku(hk.transform(forward), full[0][:1].all_examples(), loss)
    algorithm = fed_avg.federated_averaging(
        fedjax.model_grad(network),
        fedjax.optimizers.sgd(settings["lr"]),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=settings["batch_size"], num_epochs=settings["epochs"]),
    )
    kept = {"state": algorithm.init(network.init(jax.random.PRNGKey(0))), "key": jax.random.PRNGKey(1)}

    def round_(warm_up: bool) -> None:
        kept["key"], *keys = jax.random.split(kept["key"], len(full) + 1)
        data = short if warm_up else full
        kept["state"], _ = algorithm.apply(kept["state"], list(zip(range(len(full)), data, keys, strict=True)))
        jax.block_until_ready(kept["state"].params)

    return round_


if __name__ == "__main__":
    arguments = parser().parse_args()
    save(arguments.out, measure(make_round(read(arguments.case)), arguments.rounds)["seconds"])
