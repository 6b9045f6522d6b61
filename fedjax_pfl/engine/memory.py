"""How much memory a run needs, before anything is compiled, and how many clients fit side by side."""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from fedjax_pfl.data.federated import Clients, Federation, Samples, client_data
from fedjax_pfl.engine.contract import check_diagnostics, check_logits, check_parts, initial_state, upload_of_setup
from fedjax_pfl.engine.hardware import resident_set
from fedjax_pfl.engine.peak import operations, peak_bytes
from fedjax_pfl.engine.round import UPDATE_COSINE, Engine
from fedjax_pfl.engine.scoring import Scores, scores_of, tally
from fedjax_pfl.engine.traffic import Exchange
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.method import Cohort, Predict, Round
from fedjax_pfl.models.passes import kinds_of_passes
from fedjax_pfl.ops.padding import losses_without_mask
from fedjax_pfl.ops.tree import size

# The most that XLA and LLVM take while they compile for a CPU. Measured with JAX 0.10, two programs at a time, on two
# cores, for six pairs of method and model of 178 to 2,860 operations: each took this much within 13 %.
_COMPILER_BYTES = 270_000_000
_COMPILER_BYTES_PER_OPERATION = 150_000
# A compiled program's bytes for one client, as a multiple of the `peak_bytes` of its trace (fitted to
# `benchmarks/results/accelerators.json`; a CPU is assumed to need as much as a GPU).
_PLANNED = {"cpu": 1.4, "gpu": 1.4, "tpu": 1.6}
# This multiple on a GPU below float32 precision, where one patch serves several output columns (`models/patches.py`).
_PLANNED_WIDE = 1.05


class Memory(NamedTuple):
    """An estimate in bytes. XLA fuses operations, so that a running client's true need is usually lower on a CPU.

    Sizes are what a device needs; ``samples`` and ``states`` are parts of ``resident``. ``process`` and ``compiler``
    are for a CPU, whose devices share the memory of the process; elsewhere they are 0.

    What ``aggregate`` takes in a round is not counted: no client runs beside it, and of all methods here only GRACE's
    takes more than ``exchanged`` (1.3 times, with 20 and 200 participants and ``cnn3``). Nor is ``run.export``, which
    after the last round takes the samples once more, and the states of as many clients as a round.

    Attributes:
      resident: samples, index tables, the server's state and that of all clients.
      per_client: what one running client needs on top: gradients, activations of a batch, optimiser state.
      participants: K, the largest number of clients in a round.
      exchanged: the participants' old and new states, and their uploads before and after absent ones are zeroed.
      scored: the largest of what exists at other times than a round: the copies of clients' states in an evaluation,
        the uploads of all clients in a calibration, and what all exchange in ``setup`` if a round is for fewer.
      samples: the part of ``resident`` that is samples and tables, which runs share.
      states: the part of ``resident`` that is the state of all clients, once; 0 where the host holds it.
      process: what the process holds now, with the samples.
      compiler: what compiling takes.
      calibrated: what the server's part of a calibration takes, with what was uploaded; no client runs beside it.
    """

    resident: int
    per_client: int
    participants: int = 1
    exchanged: int = 0
    scored: int = 0
    samples: int = 0
    states: int = 0
    process: int = 0
    compiler: int = 0
    calibrated: int = 0

    def total(self, devices: int = 1, chunk: int = 1) -> int:
        """The most that the run will take: of the process on a CPU, else of each device.

        Args:
          devices: how many the clients are split over.
          chunk: clients side by side on a device.
        """
        return self.process + self.needed(devices, chunk)

    def needed(self, devices: int = 1, chunk: int = 1) -> int:
        """What the run takes of the memory that is free: of the whole host on a CPU, else of each device."""
        return self._held(devices) + self.work(devices, chunk)

    def of_this_process(self) -> "Memory":
        """The same with what this process holds now."""
        return self._replace(process=resident_set() or self.samples)

    def of_run(self, chunk: int) -> int:
        """What each further run beside this one takes of a device; they share the samples."""
        return self.resident - self.samples + self.work(1, chunk)

    def _held(self, devices: int) -> int:
        """What is needed besides the clients that run and what they exchange; a CPU's process has the samples."""
        # Each of several devices collects the states of all clients for itself before it scores its own.
        collected = self.states if devices > 1 else 0
        if self.process:
            return self.compiler + self.resident - self.samples + devices * collected
        return self.resident + collected

    def work(self, devices: int, chunk: int) -> int:
        """What clients that run need, and their states and uploads: on all devices of a CPU, else on each.

        Where all participants run at once, their uploads take the place of what training has given free.
        """
        running = self._beside(devices) * chunk * self.per_client
        at_once = not self.process and devices * chunk >= self.participants
        trained = max(running, self.exchanged) if at_once else running + self.exchanged
        return max(trained, running + self.scored, self.calibrated)

    def fitting(self, devices: int, limit: int) -> int:
        """The most clients that fit side by side on a device; 0 or less if not even one fits.

        Args:
          devices: how many the clients are split over.
          limit: the bytes that are free, as `needed` counts them.
        """
        everyone = -(-self.participants // devices)
        left = limit - self._held(devices)
        if self.work(devices, everyone) <= left:
            return everyone
        if self.calibrated > left:
            return 0
        return (left - max(self.exchanged, self.scored)) // max(1, self._beside(devices) * self.per_client)

    def _beside(self, devices: int) -> int:
        """How many devices share the memory that is counted."""
        return devices if self.process else 1


def survey(
    engine: Engine,
    data: Federation,
    backend: str | None = None,
    *,
    precision: str = "float32",
    on_host: bool = False,
) -> tuple[Memory, Exchange]:
    """The memory that a run needs and what it exchanges, from traces of a client's work and the server's calibration.

    Args:
      engine: the method, and who takes part.
      data: the federation.
      backend: what the run is for; this process's own unless given.
      precision: precision of matrix products and convolutions.
      on_host: whether the host holds the clients' states, and a device only those of the clients at work.

    Warns:
      UserWarning: the model has dropout or batch normalisation, and no loss of the method trains with it.

    Raises:
      ConfigError: a function of the method returns another form than the contract requires, or a checkpoint cannot
        hold its state.
    """
    method = engine.method
    key = jax.random.key(0)
    begun = jax.eval_shape(lambda key: method.init(key, engine.clients), key)
    server, client = initial_state(method, begun)
    view = jax.eval_shape(method.broadcast, server)
    check_parts("what the method's broadcast returns", view)
    tables = data.train, data.validation, data.test
    train, validation, test = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tables)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    backend = backend or jax.default_backend()
    if backend != "cpu":  # side by side
        train, test = train._replace(most=scalar), test._replace(most=scalar)
    shared, row = (key, scalar, view, data.x, data.y), (scalar, client, train, validation)
    with kinds_of_passes() as kinds, losses_without_mask() as unmasked:
        traced, update = jax.make_jaxpr(engine.local, return_shape=True)(shared, row)
    if kinds == {False}:
        warnings.warn(
            "no loss of the method gives batch.mask to the model, so that dropout and batch normalisation stay as in "
            "evaluation; the extractor that a loss trains needs it: model.features(theta, batch.x, batch.mask)",
            stacklevel=2,
        )
    if unmasked:
        warnings.warn(
            f'the loss of phase "{unmasked[0]}" does not depend on batch.mask, so that it also trains on the padding '
            "of short batches: for a mean over samples write masked_mean(values, batch.mask), not values.mean()",
            stacklevel=2,
        )
    training, scoring = peak_bytes(traced.jaxpr), _of_scoring(engine, server, update.trained, data, test)
    exchanged = engine.cohort_size * 2 * (size(client) + size(update.upload))
    states, samples = engine.clients * size(client), size(data)
    # Scoring reads states in place, or copies all where the server dispatches; from the host, it holds two groups.
    mailed = states if method.dispatch is not None else 0
    scored = 2 * engine.cohort_size * size(client) if on_host else mailed
    preparing = calibrating = calibrated = 0
    if method.setup is not None:
        preparing, returned = _of_client(method.setup, shared, row)
        sent = upload_of_setup(returned, client, update.upload)
        if engine.cohort_size < engine.trainers:  # else it exchanges no more than a round
            # A CPU reads old states in place; on other devices clients side by side get a copy.
            copies = 1 if backend == "cpu" else 2
            scored = max(scored, engine.trainers * (copies * size(client) + 2 * size(sent)))
    if method.calibrate is not None:
        calibrating, sent = _of_client(method.calibrate.local, shared, row)
        served, after = _of_server(method.calibrate.server, engine, server, sent)
        uploaded = engine.trainers * size(sent)
        calibrated = uploaded + served
        # All uploads, before and after absent ones are zeroed; with states on the host, the server's is copied, too.
        scored = max(scored + (size(after) if on_host else 0), 2 * uploaded)
    held = 0 if on_host and backend != "cpu" else states
    planned = _PLANNED_WIDE if backend == "gpu" and precision != "float32" else _PLANNED.get(backend, 1.0)
    memory = Memory(
        resident=samples + size(server) + held,
        per_client=round(planned * max(training, preparing, calibrating, scoring + size(client))),
        participants=engine.cohort_size,
        exchanged=exchanged,
        scored=scored,
        samples=samples,
        states=0 if on_host else states,
        calibrated=calibrated,
    )
    if backend == "cpu":
        compiler = _COMPILER_BYTES + _COMPILER_BYTES_PER_OPERATION * operations(traced.jaxpr)
        memory = memory._replace(compiler=compiler).of_this_process()
    said = jax.eval_shape(method.diagnose, server)
    check_diagnostics(update.diagnostics or (), said, UPDATE_COSINE)
    return memory, Exchange(view, client, update.upload, tuple(update.diagnostics or ()), tuple(said))


def _of_scoring(engine: Engine, server: PyTree, trained: tuple[PyTree, PyTree], data: Federation, test: Clients) -> int:
    """What a client with these trained parts needs to be scored; its logits are checked, and those of the server."""
    method = engine.method

    def tallied(function: str, predict: Predict, params: PyTree, x: Samples, y: Array, test: Clients) -> Scores:
        held = client_data(x, y, test)

        def checked(images: Array) -> Array:
            logits = predict(params, images)
            check_logits(function, logits, len(images), held.class_counts.shape[-1])
            return logits

        return scores_of(tally(checked, held), held.class_counts)

    def scores(view: PyTree, client: PyTree, x: Samples, y: Array, test: Clients) -> Scores:
        params: PyTree = None
        try:
            params = method.personal(view, client)
            if params is None:
                allowed = "the parameters of a client's model, as predict takes them"
                raise ConfigError("what the method's personal returns", None, allowed)
            if engine.features is not None and not (isinstance(params, Mapping) and "extractor" in params):
                allowed = '"predictions": the method\'s model is more than an extractor with a head'
                raise ConfigError("run.export", "features", allowed)
            return tallied("predict", method.predict, params, x, y, test)
        except jax.errors.NonConcreteBooleanIndexError:  # an IndexError, too, but not of the parameters
            raise
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            if isinstance(error, TypeError) and (params is None or isinstance(params, Mapping)):
                raise  # it has some other cause than a tuple that predict reads by names
            made = "what personal makes of Update.post, or of (upload, client) if post is not given"
            raise ConfigError(
                "the parameters that predict gets", repr(error), f"{made}: predict must take it"
            ) from error

    traced = jax.make_jaxpr(scores)(*trained, data.x, data.y, test)
    if method.global_predict is not None:
        shared_scores = functools.partial(tallied, "global_predict", method.global_predict)
        jax.eval_shape(shared_scores, server, data.x, data.y, test)
    return peak_bytes(traced.jaxpr)


def _of_client(fn: Callable[..., PyTree], shared: tuple, row: tuple) -> tuple[int, PyTree]:
    """What a client needs for a part of its work besides rounds, and the shapes that it returns."""

    def part(shared: tuple, row: tuple) -> PyTree:
        (key, t, view, x, y), (client_id, client, train, validation) = shared, row
        return fn(Round(key, t), view, client, client_data(x, y, train, client_id, validation))

    traced, returned = jax.make_jaxpr(part, return_shape=True)(shared, row)
    return peak_bytes(traced.jaxpr), returned


def _of_server(fn: Callable[..., PyTree], engine: Engine, server: PyTree, sent: PyTree) -> tuple[int, PyTree]:
    """What the server makes of everybody's uploads: the bytes besides these, and its shapes."""

    def part(key: Key[Array, ""], t: Array, server: PyTree, uploads: PyTree, ids: Array, weight: Array) -> PyTree:
        return fn(Round(key, t), server, uploads, Cohort(ids, weight, engine.clients, engine.trainers))

    everyone = (engine.trainers,)
    uploads = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(everyone + leaf.shape, leaf.dtype), sent)
    t, ids = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), everyone))
    weight = jax.ShapeDtypeStruct(everyone, jnp.float32)
    traced, after = jax.make_jaxpr(part, return_shape=True)(jax.random.key(0), t, server, uploads, ids, weight)
    return peak_bytes(traced.jaxpr), after
