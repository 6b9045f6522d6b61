"""CCVR (Luo et al., NeurIPS 2021), Algorithm 1: a head retrained on features drawn from the clients' Gaussians."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt
from jaxtyping import PyTree

from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.method import Calibration, Cohort, Method, PerClass, Round
from fedjax_pfl.methods.ccvr.gaussians import Moments, class_gaussians, draw, pool
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.heads import train_head
from fedjax_pfl.ops.training import Trainer, phase_key


def ccvr(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    samples_per_class: Annotated[int, Ge(1)] = 200,
    server_lr: Annotated[float, Gt(0)] = 0.01,
    server_epochs: Annotated[int, Ge(0)] = 1,
    server_batch_size: Annotated[int, Ge(1)] = 32,
) -> Method:
    """CCVR on FedAvg: the server retrains the global model's head before it is scored; the rounds are those of FedAvg.

    ``[calibration]`` in a config does the same for every method with a global model.

    Shared: the model. Personal: nothing. Headline: PRE, the calibrated model; POST is FedAvg's.

    Before each evaluation, every client that may take part sends the count, mean and covariance of its features for
    each class that it holds: at most C (K + K (K + 1) / 2 + 1) floats per client. They are not part of a round's
    traffic, and the server holds those of all clients at the same time. The server draws the same number of features
    from the pooled Gaussian of each class. The paper calibrates once, after the last round: ``run.eval_every =
    training.rounds``. FL-bench, whose single pass over 200 features per class is the default here, pools biased
    covariances as if they were unbiased, and leaves out a class with one sample, which here gets the mean covariance
    within classes.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models.
      samples_per_class: M_c, number of features drawn for each class; negative ones stay as they are. Other public
        code has 2,000, and ten passes over them at a rate of 0.001.
      server_lr: learning rate of the head on the server.
      server_epochs: passes over the drawn features; with 0 the scores are those of FedAvg.
      server_batch_size: drawn features per step.

    Reference:
      M. Luo, F. Chen, D. Hu, Y. Zhang, J. Liang, J. Feng. No Fear of Heterogeneity: Classifier Calibration for
      Federated Learning with Non-IID Data. NeurIPS 2021. arXiv:2106.05001.
    """
    train_server = Trainer(epochs=server_epochs, batch_size=server_batch_size, lr=server_lr)
    return calibrated(fedavg(model, train, combine), model, train_server, samples_per_class=samples_per_class)


def calibrated(host: Method, model: Model, train_server: Trainer, *, samples_per_class: int) -> Method:
    """The host method with its global model scored under a retrained head, which training and POST never see.

    Args:
      host: the method; its server state, and what it broadcasts, must be the global model or have it in a field
        ``params``.
      model: extractor and head.
      train_server: trains the head.
      samples_per_class: M_c, number of features drawn for each class.

    Raises:
      ValueError: the host has no such model, or already calibrates it.
    """
    if host.calibrate is not None:
        raise ValueError("its global model is calibrated already, by options of its own")
    if host.global_predict is None:
        raise ValueError("only a global model that is scored as it is broadcast can be calibrated")
    server, _ = jax.eval_shape(lambda key: host.init(key, 2), jax.random.key(0))
    whole: Any = jax.tree.structure(jax.eval_shape(model.init, jax.random.key(0)))
    for shared in (server, jax.eval_shape(host.broadcast, server)):
        if whole != jax.tree.structure(_global_model(shared)):
            raise ValueError("what it broadcasts is not an extractor with a head, which is what is calibrated")

    def local(now: Round, view: PyTree, client: PyTree, data: ClientData) -> PerClass:
        mean, covariance, size = class_gaussians(model, _global_model(view)["extractor"], data)
        rows, columns = jnp.triu_indices(model.dim)
        return PerClass(size, Moments(mean, covariance[:, rows, columns]))

    def calibrate(now: Round, server: PyTree, uploads: PerClass, cohort: Cohort) -> PyTree:
        params, gaussians = _global_model(server), pool(uploads.held, *uploads.rows)
        features = draw(phase_key(now.key, "features"), gaussians, samples_per_class)
        params = {**params, "head": train_head(now, model, train_server, params["head"], features)}
        return params if isinstance(server, dict) else server._replace(params=params)

    return host._replace(calibrate=Calibration(local, calibrate))


def _global_model(shared: PyTree) -> Params:
    """The global model: the field ``params`` of what the host shares, or all of it."""
    return getattr(shared, "params", shared)
