"""The models of a run that has ended, for predictions and adaptation: the engine of its config, with its state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree, Shaped

from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.data.federated import Clients, Federation
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.engine.scoring import BATCH
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.build import DataShape, divide, make_engine, model_of
from fedjax_pfl.experiment.config import HONEST, Config
from fedjax_pfl.experiment.inputs import keys_of
from fedjax_pfl.experiment.kept import Kept, fitted, named
from fedjax_pfl.experiment.layout import largest_batch, precision_of
from fedjax_pfl.experiment.registry import OwnParts, with_own_parts
from fedjax_pfl.method import State, personalize_nothing


def check_partition(dataset: Dataset, found: Mapping[str, Any], partition: Mapping[str, Any]) -> None:
    """Checks that data that were read again are the data of the run.

    Args:
      dataset: the data that were read.
      found: the manifest of their partition.
      partition: the content of the run's ``partition.json`` (version 0.1 wrote no fingerprint of the samples).

    Raises:
      ConfigError: they are other data.
    """
    differs = [
        what
        for what, key in (("another partition came out of these", "hash"), ("these are other samples", "data"))
        if found[key] != partition.get(key, found[key])
    ]
    if differs:
        raise ConfigError("data", dataset.name, f"the data that the run was made on: {differs[0]}")


@dataclass(frozen=True)
class TrainedModel:
    """A trained model.

    Attributes:
      params: its parameters, as NumPy arrays; None for the global model.
    """

    params: PyTree
    _held: PyTree  # the arguments of _logits: params, or the server's state for a global model
    _logits: Callable[[PyTree, Shaped[np.ndarray, "batch ..."]], Float[Array, "batch classes"]]
    _data: DataShape

    def __repr__(self) -> str:
        whose = "the global model" if self.params is None else "a client's model"
        return f"TrainedModel: {whose}, with predict, predict_proba and params"

    def predict(self, x: Shaped[np.ndarray, "n ..."]) -> Int[np.ndarray, " n"]:
        """The predicted class of each sample; -1 if the model has diverged and gives no prediction.

        Args:
          x: samples, [n, ...], of the shape and dtype of the run's data.

        Raises:
          ConfigError: they have another shape or dtype.
        """
        logits = self._answers(x)
        return np.where(np.isfinite(logits.max(axis=1)), logits.argmax(axis=1), -1)

    def predict_proba(self, x: Shaped[np.ndarray, "n ..."]) -> Float[np.ndarray, "n classes"]:
        """The probability of each class: the softmax of the logits, float32; NaN if the model has diverged.

        Args:
          x: as in `predict`.

        Raises:
          ConfigError: as in `predict`.
        """
        return np.asarray(jax.nn.softmax(self._answers(x)))

    def _answers(self, x: Shaped[np.ndarray, "n ..."]) -> Float[np.ndarray, "n classes"]:
        """The logits, computed in blocks of a fixed size, so that one compilation is enough."""
        x = checked_samples(x, self._data)
        held, found = jax.device_put(self._held), [np.zeros((0, self._data.classes), np.float32)]
        for start in range(0, len(x), BATCH):
            block = x[start : start + BATCH]
            full = np.zeros((BATCH, *x.shape[1:]), x.dtype)
            full[: len(block)] = block
            found.append(np.asarray(self._logits(held, full))[: len(block)])
        return np.concatenate(found)


class Trained:
    """The models of a run that has ended."""

    def __init__(
        self,
        config: Config,
        kept: Kept,
        partition: Mapping[str, Any],
        load: Callable[[], Dataset],
        parts: OwnParts,
    ):
        """Builds the engine; compiles nothing.

        Args:
          config: the config of the run.
          kept: the state of the run.
          partition: the content of ``partition.json``.
          load: returns the data set; it is called only if making a model needs samples.
          parts: the user's own parts of the config, because others may be registered under their names by now.

        Raises:
          ConfigError: the state does not fit the config.
        """
        self._config, self._kept, self._partition, self._load, self._parts = config, kept, partition, load, parts
        with with_own_parts(parts):
            self._engine = make_engine(config, kept.data)
        fitted(named(kept.state), state_like(self._engine), "this result")
        self._precision = precision_of(config, jax.default_backend())
        method = self._engine.method
        self._keys = keys_of(config)
        self._model, self._predict = self._compiled(self._engine.model), self._compiled(method.predict)
        shared = method.global_predict
        self._predict_as_all = None if shared is None else self._compiled(shared)
        self._newcomers: dict[int, Callable[..., PyTree]] = {}
        self._takes_samples = method.personalize is not personalize_nothing or method.calibrate is not None

    def of_client(self, client: int) -> TrainedModel:
        """The model that PRE scores for a client of the run.

        Raises:
          ConfigError: there is no such client, or its model needs data that is missing.
        """
        if not _is_whole(client) or not 0 <= client < self._engine.clients:
            raise ConfigError("client", client, f"a client from 0 to {self._engine.clients - 1}")
        x, y, tables = self._samples(client)
        own = jax.tree.map(lambda leaf: leaf[client], self._kept.state.clients)
        row = np.int32(client), own, *tables
        return self._trained(self._model(self._keys[1], np.int32(self._kept.round), self._server, x, y, row))

    def of_all(self) -> TrainedModel:
        """The global model.

        Raises:
          ConfigError: the method has no global model, or the model needs data that is missing.
        """
        if self._predict_as_all is None:
            allowed = f"{self._name} has no global model; give a client from 0 to {self._engine.clients - 1}"
            raise ConfigError("client", None, allowed)
        return TrainedModel(None, self._server, self._predict_as_all, self._kept.data)

    def params_of_all(self) -> PyTree:
        """The parameters of the global model: the part of the server's state that gives the same predictions alone.

        Raises:
          ConfigError: as in `of_all`; or the global model is more than an extractor with a head.
        """
        shared, data = self.of_all(), self._kept.data
        with with_own_parts(self._parts):
            model = model_of(self._config, data)
        apply, like = self._compiled(model.apply), named(jax.eval_shape(model.init, jax.random.key(0)))

        def is_model(node: PyTree) -> bool:
            found = named(node)
            return found.keys() == like.keys() and all(found[name].shape == like[name].shape for name in like)

        rng = np.random.default_rng(0)
        whole = rng.integers(data.vocabulary or 256, size=(BATCH, *data.sample))
        probe = rng.normal(size=whole.shape).astype(np.float32) if data.real else whole.astype(np.uint8)
        expected = shared.predict_proba(probe)
        for params in filter(is_model, jax.tree.leaves(self._server, is_leaf=is_model)):
            found = TrainedModel(_own(params), params, apply, data)
            if np.allclose(found.predict_proba(probe), expected, rtol=1e-3, atol=1e-6, equal_nan=True):
                return found.params
        why = f"the global model of {self._name} is more than an extractor with a head"
        raise ConfigError("client", None, f"{why}; give a client, or ask predict")

    def of_newcomer(
        self, x: Shaped[np.ndarray, "n ..."], y: Int[np.ndarray, " n"], epochs: int, client: int | None
    ) -> TrainedModel:
        """The model after one call of ``local`` for a client that never took part; see `Result.adapt`."""
        data, method = self._kept.data, self._engine.method
        x = checked_samples(x, data)
        y = checked_labels(y, len(x), data.classes)
        if method.dispatch is not None:
            allowed = "a method whose server does not compute a message for each client that it knows"
            raise ConfigError("adapt", self._name, allowed)
        if method.selects:
            raise ConfigError("adapt", self._name, "a method that does not select on validation samples")
        size = self._config.training.batch_size
        if self._config.training.drop_last and size > largest_batch(self._engine, len(x)):
            allowed = f"more samples: with training.drop_last they make no batch of {size}, and nothing is trained"
            raise ConfigError("x", f"{x.dtype}{list(x.shape)}", allowed)
        if not _is_whole(epochs) or epochs < 1:
            raise ConfigError("epochs", epochs, "a whole number, 1 or more")
        client = self._engine.clients if client is None else client
        if not _is_whole(client) or not 0 <= client < 2**31:
            raise ConfigError("client", client, "a whole number, 0 or more")
        if epochs not in self._newcomers:
            with with_own_parts(self._parts):
                config = self._config.replace({"training.epochs": epochs, **HONEST})
                self._newcomers[epochs] = self._compiled(make_engine(config, data).newcomer)
        # Padding changes no number, up to rounding; with powers of two, most newcomers find a program that is compiled.
        capacity = 1 << (len(x) - 1).bit_length()
        more = capacity - len(x)
        train = _table(np.pad(np.arange(len(x)), (0, more)), len(x), np.bincount(y, minlength=data.classes))
        t, server = np.int32(self._kept.round), self._kept.state.server
        x, y = (np.pad(part, [(0, more), *[(0, 0)] * (part.ndim - 1)]) for part in (x, y))
        return self._trained(self._newcomers[epochs](self._keys, t, server, x, y, np.int32(client), train))

    def _trained(self, params: PyTree) -> TrainedModel:
        own = _own(params)
        return TrainedModel(own, own, self._predict, self._kept.data)

    def _compiled(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The jitted function, with the precision of products that the run used."""

        def as_in_the_run(*arguments: Any) -> Any:
            with jax.default_matmul_precision(self._precision):
                return fn(*arguments)

        return jax.jit(as_in_the_run)

    @property
    def _name(self) -> str:
        name: str = self._config.method["name"]
        return name

    @cached_property
    def _server(self) -> PyTree:
        """The server state whose models are scored, calibrated if the method calibrates."""
        if self._engine.method.calibrate is None:
            return self._kept.state.server
        state = self._compiled(self._engine.calibrated)(
            self._keys[1], np.int32(self._kept.round), self._kept.state, self._federation
        )
        return jax.device_get(state.server)

    @cached_property
    def _federation(self) -> Federation:
        """The data of the run, on the host."""
        with with_own_parts(self._parts):
            dataset = self._load()
            federation, manifest = divide(self._config, dataset)
        check_partition(dataset, manifest, self._partition)
        return jax.device_get(federation)

    def _samples(self, client: int) -> tuple[np.ndarray, np.ndarray, tuple[Clients, Clients | None]]:
        """A client's training and validation samples, their labels, and the index tables that refer to them."""
        if not self._takes_samples:
            of_class = self._partition["train_class_counts"][client]
            train = _table(np.zeros(1), self._partition["n_train"][client], of_class)
            return np.zeros((1, *self._kept.data.sample), _dtype(self._kept.data)), np.zeros(1, np.int32), (train, None)
        everyone = self._federation
        parts = [part for part in (everyone.train, everyone.validation) if part is not None]
        rows = np.concatenate([part.index[client] for part in parts])

        def own(part: Clients, start: int) -> Clients:
            at = np.arange(start, start + part.index.shape[1])
            return _table(at, part.count[client], part.class_counts[client])

        train = own(everyone.train, 0)
        validation = None if everyone.validation is None else own(everyone.validation, len(train.index))
        return np.asarray(everyone.x[rows]), np.asarray(everyone.y)[rows], (train, validation)


def state_like(engine: Engine) -> State:
    """Shapes and types of the state of an engine's run."""

    def init(key: Key[Array, ""]) -> State:
        server, client = engine.method.init(key, engine.clients)
        return State(
            server, jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (engine.clients, *jnp.shape(leaf))), client)
        )

    state: State = jax.eval_shape(init, jax.random.key(0))
    return state


def checked_samples(x: Any, data: DataShape) -> Shaped[np.ndarray, "n ..."]:
    """Samples in the form that a model reads; images of one channel may lack the channel axis; square ones may be flat.

    Raises:
      ConfigError: they have another shape or dtype than those of the run, or contain NaN or infinite numbers.
    """
    x = np.asarray(x)
    found, sample = f"{x.dtype}{list(x.shape)}", data.sample
    if len(sample) == 3 and sample[-1] == 1 and not data.real:
        height, width, _ = sample
        if x.shape[1:] == (height, width) or (height == width and x.shape[1:] == (height * width,)):
            x = x.reshape(len(x), *sample)
    tokens = data.vocabulary is not None and x.dtype.kind in "iu"
    fits = x.dtype.kind == "f" if data.real else x.dtype == np.uint8 or tokens
    if x.ndim == 0 or x.shape[1:] != sample or not fits:
        kind = "float32" if data.real else "uint8"
        raise ConfigError("x", found, f"samples like those of {data.name}: {kind}[n, {', '.join(map(str, sample))}]")
    if data.vocabulary is not None and x.size and (x.min() < 0 or x.max() >= data.vocabulary):
        wrong = x.min() if x.min() < 0 else x.max()
        raise ConfigError("x", f"a symbol {wrong}", f"text like that of {data.name}: 0 to {data.vocabulary - 1}")
    x = x.astype(_dtype(data), copy=False)
    if data.real and not np.isfinite(x).all():
        raise ConfigError("x", found, f"finite numbers; {np.count_nonzero(~np.isfinite(x))} of {x.size} are not")
    return x


def _dtype(data: DataShape) -> type:
    return np.float32 if data.real else np.uint8


def _table(index: Any, count: Any, class_counts: Any) -> Clients:
    """The row of one client, on the host."""
    table: Any = Clients(np.asarray(index, np.int32), np.asarray(count, np.int32), np.asarray(class_counts, np.float32))  # type: ignore[arg-type]
    return table


def checked_labels(y: Any, samples: int, classes: int) -> Int[np.ndarray, " n"]:
    """The labels of this number of samples, checked.

    Raises:
      ConfigError: they are not this number of whole numbers, or not classes.
    """
    y = np.asarray(y)
    wrong = y.shape != (samples,) or y.dtype.kind not in "iu"
    if wrong or samples == 0 or y.min() < 0 or y.max() >= classes:
        allowed = f"a label for each of the {samples} samples, one or more, whole numbers from 0 to {classes - 1}"
        raise ConfigError("y", f"{y.dtype}{list(y.shape)}", allowed)
    return y.astype(np.int32)


def _is_whole(number: Any) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def _own(tree: PyTree) -> PyTree:
    """The tree as writable NumPy arrays."""
    return jax.tree.map(np.array, jax.device_get(tree))
