"""The result of a run: its numbers, and its models for later use."""

import os
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flax.traverse_util import unflatten_dict
from jaxtyping import Float, Int, PyTree

from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.errors import ConfigError, one_of
from fedjax_pfl.experiment import headline
from fedjax_pfl.experiment.build import dataset_of, deal, make_engine
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.frames import frame
from fedjax_pfl.experiment.html import result_html
from fedjax_pfl.experiment.kept import STATE, Kept, fitted, named, read_state, write_arrays
from fedjax_pfl.experiment.plots.curves import plot_curves
from fedjax_pfl.experiment.plots.style import quantity
from fedjax_pfl.experiment.process import prepare
from fedjax_pfl.experiment.record import RunDirectory
from fedjax_pfl.experiment.registry import OwnParts, with_own_parts
from fedjax_pfl.experiment.saved import read_run
from fedjax_pfl.experiment.summary import FALLING, first_reached
from fedjax_pfl.experiment.tables import Cell
from fedjax_pfl.experiment.trained import Trained, TrainedModel, check_partition, state_like
from fedjax_pfl.method import State

if TYPE_CHECKING:
    import matplotlib.axes
    import pandas


@dataclass(frozen=True)
class Result:
    """The result of a run: its numbers and its models.

    Accuracies lie in [0, 1].

    Attributes:
      summary: the content of ``summary.json``.
      history: metric -> array over the evaluated rounds, e.g. ``history["pre.accuracy"]``; ``history["round"]`` has the
        numbers of these rounds.
      clients: column -> array [N], as in ``clients.csv``.
      labels: column -> array, as in ``labels.csv``: one row per client and label on which it is scored.
      partition: the content of ``partition.json``.
      exported: column -> array, as in ``export.npz``; empty unless ``run.export`` asks for something.
      kept: the state of the models, and its round: the last round or, with ``run.keep = "best"``, the best one; None if
        the run directory has no state.
      config: the resolved config.
      client_history: column -> array, as in ``client_history.csv``: one row per evaluated round and client, with the
        scores of ``clients``; empty unless ``run.client_history`` is true.
      data: the data that `simulate` was given instead of ``data.source``, or None.
      parts: kind -> name -> part: the user's own methods, models ... of the config, as they were in the run; empty for
        a result that was loaded or unpickled, which uses the parts registered in its process.
    """

    summary: dict[str, Any]
    history: dict[str, np.ndarray]
    clients: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]
    partition: dict[str, Any]
    exported: dict[str, np.ndarray]
    kept: Kept | None
    config: Config
    client_history: dict[str, np.ndarray]
    data: Any = None
    parts: OwnParts = field(default_factory=dict)

    def __repr__(self) -> str:
        return "\n  ".join([headline.run_in_short(self.summary), *headline.notes(self.summary)])

    def _repr_html_(self) -> str:
        said = [*headline.remarks(self.summary), *headline.caption(self.summary).split("\n")]
        title, table = headline.title(self.summary), headline.table(self.summary)
        return result_html(title, table, self.history, said, self.partition, self.config._repr_html_())

    def to_frame(self) -> "pandas.DataFrame":
        """``history`` as a pandas frame: one row per evaluated round, with ``round`` and the metrics as columns.

        Raises:
          ConfigError: pandas is not installed.
        """
        return frame(self.history)

    def clients_frame(self, *, history: bool = False) -> "pandas.DataFrame":
        """The clients as a pandas frame: one row per client, or one row per evaluated round and client.

        Args:
          history: whether to return all evaluated rounds (``client_history``, with ``round`` as a column) instead of
            the last one only (``clients``).

        Raises:
          ConfigError: the run kept no history of its clients, or pandas is not installed.
        """
        if history and not self.client_history:
            raise ConfigError("history", True, "false, unless the config has run.client_history = true")
        return frame(self.client_history if history else self.clients)

    def plot(
        self, metric: str = "pre.accuracy", x: str = "round", *, ax: "matplotlib.axes.Axes | None" = None
    ) -> "matplotlib.axes.Axes":
        """Draws a metric over the evaluated rounds.

        Args:
          metric: a name in ``history``.
          x: the horizontal axis: ``round``, ``seconds`` since the run began, or ``megabytes`` sent up and down so far.
          ax: matplotlib axes to draw on, in addition to the lines there; a new figure unless given.

        Raises:
          ConfigError: there is no such metric or x, the run has no value of it, or matplotlib is not installed.
        """
        return plot_curves([self.cell], metric, x, None, ax)

    @property
    def cell(self) -> Cell:
        """This run as the only one of a table, named by its method."""
        return Cell({"method.name": self.config.method["name"]}, self.config, self.summary, self.clients, self.history)

    def rounds_to(self, target: float, metric: str = "global") -> int | None:
        """The first evaluated round at which a metric reaches the target; see `first_reached`.

        A loss, and a spread over clients, reaches it if it is as small or smaller; any other metric, also one of your
        own, if it is as large or larger.

        Args:
          target: in the unit of the metric, e.g. 0.66 for an accuracy of 66 %.
          metric: a name in ``history``; by default the accuracy of the global model.

        Returns:
          The number of rounds; None if the target is never reached (or there is no global model).

        Raises:
          ConfigError: ``history`` has no such metric, or the target of an accuracy is not from 0 to 1.
        """
        if metric not in self.history:
            raise ConfigError("metric", metric, one_of(metric, self.history))
        in_percent = quantity(metric)[0] == 100
        if in_percent and not 0 <= target <= 1:
            raise ConfigError("target", target, "a share from 0 to 1, such as 0.66")
        at = first_reached(self.history[metric], target, falling=metric.rpartition(".")[2] in FALLING)
        return None if at is None else int(self.history["round"][at])

    @classmethod
    def load(cls, directory: str | os.PathLike[str], data: Any = None) -> "Result":
        """Reads the result of a run from its directory.

        Args:
          directory: ``run.out`` of a complete run, or the directory of a run of a sweep or comparison.
          data: for a run on data from Python: the same data as `simulate` was given. The models of most methods do not
            need it; models that are fine-tuned, mixed or calibrated with samples do.

        Raises:
          ConfigError: the directory holds no complete run, a file is damaged, its method, model, partition or one of
            its metrics is not registered in this process, or its state does not fit its config.
        """
        folder = Path(os.path.expanduser(directory))
        config, read = read_run(folder)
        prepare(config.run)
        kept = None
        if (folder / STATE).exists():
            round, shape, arrays = read_state(folder / STATE)
            kept = Kept(round, shape, fitted(arrays, state_like(make_engine(config, shape)), str(folder / STATE)))
        return cls(**read, kept=kept, config=config, data=data)

    def save(self, directory: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes a run directory that `load` can read, for a run that had none.

        Args:
          directory: the directory; it may exist if it is empty.
          overwrite: whether to replace the files of an earlier run there.

        Raises:
          ConfigError: the directory is not empty, or cannot be written; or the data of the run, which is needed for the
            rows of the clients, is missing or is other data.
        """
        record = RunDirectory(directory, overwrite=overwrite)
        with with_own_parts(self.parts):
            dataset = self._dataset()
            holdings, manifest = deal(self.config, dataset)
        check_partition(dataset, manifest, self.partition)
        record.take()
        try:
            record.begin(self.config.to_toml(), self.partition, holdings)
            of_rounds = self.client_history.get("round", np.zeros(0, int))
            for at, round in enumerate(self.history["round"].tolist()):
                line = {name: column[at].item() for name, column in self.history.items()}
                rows = {name: column[of_rounds == round] for name, column in self.client_history.items()}
                record.append(unflatten_dict(line, sep="."), rows)
            record.finish(self.clients, self.labels, self.exported, self.summary, self.kept)
        finally:
            record.leave()

    @property
    def state(self) -> State:
        """The state of server and clients from which models are made, as NumPy arrays.

        Raises:
          ConfigError: the state was not kept.
        """
        return self._found.state

    def at(self, round: int, state: State) -> "Result":
        """This result with the models of another round; its numbers stay the same.

        Args:
          round: number of rounds done.
          state: the state after these rounds.
        """
        return replace(self, kept=self._found._replace(round=round, state=state))

    def params(self, client: int | None = None) -> PyTree:
        """The parameters of a model, as NumPy arrays: ``{"extractor": ..., "head": ...}``, and what a method adds.

        Args:
          client: number of the client whose model is returned, as PRE scores it (after aggregation, personalisation and
            calibration); None for the global model.

        Raises:
          ConfigError: there is no such client or global model, the global model is more than an extractor with a head,
            the state was not kept, or the data of the run is needed and missing.
        """
        return self._trained.params_of_all() if client is None else self._trained.of_client(client).params

    def predict(self, x: np.ndarray, client: int | None = None) -> Int[np.ndarray, " n"]:
        """The predicted class of each sample; -1 if the model has diverged and gives no prediction.

        Args:
          x: samples, [n, ...], of the shape and dtype of the run's data.
          client: as in `params`.

        Raises:
          ConfigError: x has another shape or dtype; as in `params`.
        """
        return self._model(client).predict(x)

    def predict_proba(self, x: np.ndarray, client: int | None = None) -> Float[np.ndarray, "n classes"]:
        """The softmax of a model's logits, float32; NaN if it has diverged. Arguments and errors as in `predict`."""
        return self._model(client).predict_proba(x)

    def adapt(self, x: np.ndarray, y: np.ndarray, epochs: int = 5, *, client: int | None = None) -> TrainedModel:
        """The model of a client that never took part: local training from the shared model; nothing is uploaded.

        This is the model that POST scores for a client of ``data.new_clients``: one call of the method's ``local``,
        from the initial client state and the current broadcast of the server, at the learning rate of the next round.

        Args:
          x: the client's samples, [n, ...], of the shape and dtype of the run's data.
          y: their labels, whole numbers [n].
          epochs: passes over the samples, 1 or more, instead of ``training.epochs``.
          client: number of the client; the order of its batches depends on it and on ``run.seed``. By default the next
            number after those of the run.

        Returns:
          The model, with ``predict(x)``, ``predict_proba(x)`` and ``params``.

        Raises:
          ConfigError: x, y, epochs or client do not fit, or the samples make no whole batch with
            ``training.drop_last``; the state was not kept; or the method does not allow it, because its server computes
            a message for each client that it knows, or its clients select on validation samples.
        """
        return self._trained.of_newcomer(x, y, epochs, client)

    def save_params(self, path: str | os.PathLike[str], client: int | None = None, *, overwrite: bool = False) -> None:
        """Writes a model's parameters as a safetensors file, with names such as ``extractor/hidden_layer/kernel``.

        ``unflatten_dict(safetensors.numpy.load_file(path), sep="/")`` (from ``flax.traverse_util``) reads them again.

        Args:
          path: the file.
          client: as in `params`.
          overwrite: whether to replace a file that exists.

        Raises:
          ConfigError: the file exists, cannot be written, or has another suffix; as in `params`.
        """
        path = Path(os.path.expanduser(path))
        if path.suffix not in ("", ".safetensors"):
            raise ConfigError("path", str(path), "a file that ends with .safetensors, which is what is written")
        if path.exists() and not overwrite:
            raise ConfigError("path", str(path), "it exists; name another file, or replace it: overwrite=True")
        try:
            write_arrays(path, named(self.params(client)))
        except OSError as error:
            raise ConfigError("path", str(path), f"a file that can be written ({error.strerror})") from None

    @property
    def _found(self) -> Kept:
        if self.kept is None:
            allowed = 'kept: run it again, with run.keep = "final" or "best"'
            raise ConfigError("state", None, allowed)
        return self.kept

    @cached_property
    def _trained(self) -> Trained:
        return Trained(self.config, self._found, self.partition, self._dataset, self.parts)

    def _model(self, client: int | None) -> TrainedModel:
        return self._trained.of_all() if client is None else self._trained.of_client(client)

    def _dataset(self) -> Dataset:
        """The data of the run, read again."""
        if self.data is None and self.config.data.source == "arrays":
            allowed = "the data that simulate was given: Result.load(directory, data=...)"
            raise ConfigError("data", None, allowed)
        return dataset_of(self.config, self.data)

    def __getstate__(self) -> dict[str, Any]:
        """Everything except compiled programs, and the user's functions, which a pickle may not be able to hold."""
        return {column.name: getattr(self, column.name) for column in fields(self)} | {"parts": {}}
