"""The memory that a run announces: by hand where it can be counted, and against what a process takes."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_pfl import Config, ConfigError
from fedjax_pfl.data.federated import Federation, pack
from fedjax_pfl.data.sources import load
from fedjax_pfl.engine.hardware import Hardware, _left_in_groups, available, resident_set
from fedjax_pfl.engine.memory import Memory, survey
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.peak import operations, peak_bytes
from fedjax_pfl.engine.placement import Placement
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.experiment.placing import place, place_runs
from fedjax_pfl.method import Calibration
from fedjax_pfl.methods import METHODS
from fedjax_pfl.ops.tree import size
from tests.conftest import CLASSES

KEY = jax.random.key(0)
LINUX = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="only Linux says what a process holds")


def test_a_device_with_its_own_memory_holds_what_is_resident_and_its_clients():
    memory = Memory(resident=1000, per_client=7, participants=30, exchanged=60, states=100)
    assert memory.total(devices=1, chunk=3) == 1000 + 3 * 7 + 60
    # Each of several collects the states of all clients to score its own.
    assert memory.total(devices=4, chunk=3) == 1000 + 100 + 3 * 7 + 60
    # Where all run at once, uploads are made of what training has given free.
    assert memory.total(devices=1, chunk=30) == 1000 + 30 * 7
    assert memory._replace(exchanged=300).total(devices=1, chunk=30) == 1000 + 300
    # In an evaluation nothing is exchanged, and states may be copied.
    assert memory._replace(scored=90).total(devices=1, chunk=3) == 1000 + 3 * 7 + 90
    # While the server calibrates, no client runs.
    assert memory._replace(calibrated=80).total(devices=1, chunk=3) == 1000 + 3 * 7 + 60
    assert memory._replace(calibrated=300).total(devices=1, chunk=3) == 1000 + 300
    assert memory._replace(calibrated=300).total(devices=4, chunk=3) == 1000 + 100 + 300


@pytest.mark.parametrize(
    ("limit", "fitting"),
    [
        (1000 + 30 * 7, 30),  # all at once
        (1000 + 30 * 7 - 1, (30 * 7 - 1 - 60) // 7),  # uploads beside the clients that run
        (1000 + 60 + 7, 1),
        (1000 + 60 + 6, 0),
    ],
)
def test_as_many_clients_fit_as_the_announced_memory_says(limit, fitting):
    memory = Memory(resident=1000, per_client=7, participants=30, exchanged=60)
    assert memory.fitting(1, limit) == fitting
    assert memory.total(chunk=max(1, fitting)) <= limit + 7 * (fitting == 0)


def test_no_client_fits_beside_a_calibration_that_does_not():
    memory = Memory(resident=1000, per_client=7, participants=30, exchanged=60, calibrated=300)
    assert [memory.fitting(1, 1000 + left) for left in (300, 299)] == [30, 0]


def test_a_container_or_job_has_no_more_than_its_control_groups_leave(tmp_path):
    """Under both versions: the smallest of what the group and those above it have left, with what the kernel caches."""
    groups = {
        "job": {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 5\ninactive_file 60"},
        "job/step": {"memory.max": "max", "memory.current": "600", "memory.stat": "inactive_file 60"},
        "memory/docker": {
            "memory.limit_in_bytes": "500",
            "memory.usage_in_bytes": "490",
            "memory.stat": "total_inactive_file 20",
        },
    }
    for name, files in groups.items():
        (tmp_path / name).mkdir(parents=True)
        for file, content in files.items():
            (tmp_path / name / file).write_text(content)
    own = tmp_path / "own"
    for line, left in [("0::/job/step", [360]), ("4:memory:/docker/gone", [30]), ("1:cpu:/docker", [])]:
        own.write_text(f"9:name=systemd:/\n{line}\n")
        assert _left_in_groups(own, tmp_path) == left
    assert _left_in_groups(tmp_path / "absent", tmp_path) == []


def test_what_others_use_of_an_accelerator_is_not_available(monkeypatch):
    stats = {"bytes_limit": 1000, "bytes_in_use": 300}
    monkeypatch.setattr("jax.local_devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
    assert available() == 700
    del stats["bytes_in_use"]
    assert available() == 1000


def test_operations_within_loops_are_compiled_too():
    def looped(x):
        x = lax.while_loop(lambda y: y < 10.0, lambda y: y * 2.0 + 1.0, x)
        return lax.scan(lambda y, _: (lax.sin(y), None), x, None, length=5)[0]

    # A loop with a comparison, a product and a sum; and one with a sine.
    assert operations(jax.make_jaxpr(looped)(jnp.float32(1.0)).jaxpr) == 4 + 2


def test_further_runs_share_the_samples():
    memory = Memory(resident=1000, per_client=7, participants=30, exchanged=60, samples=900)
    assert memory.of_run(chunk=3) == 100 + 3 * 7 + 60


@pytest.mark.parametrize(
    ("backend", "run", "chunk"),
    [
        ("gpu", {}, 8),
        ("gpu", {"placement": "map"}, 1),
        ("gpu", {"placement": "vmap", "chunk": 2}, 2),
        ("gpu", {"chunk": 100}, 8),
        ("cpu", {}, 1),
        ("cpu", {"placement": "vmap"}, 8),
        ("cpu", {"chunk": 2}, 2),
    ],
)
def test_clients_of_several_runs_are_placed_as_those_of_one(backend, run, chunk):
    config = Config(data={"source": "digits", "clients": 8}, method={"name": "fedavg"}, run=run)
    memory = Memory(resident=1000, per_client=10, participants=8, exchanged=20, samples=500)
    hardware = Hardware(backend, tuple(jax.devices()[:1]), 10_000)
    runs_on, clients_on = place_runs(config, 2, memory, hardware)
    assert runs_on == Placement(chunk=2 if backend == "gpu" else 1)
    assert clients_on == place(config, 1, memory, hardware) == Placement(chunk=chunk)
    # With less memory, of which each run has half: one run's four clients are more than another's three.
    tight = hardware._replace(bytes=round((500 + 2 * (500 + 20 + 3 * 10)) / 0.85) + 1)
    assert place_runs(config, 2, memory, tight)[1].chunk == min(chunk, 3)


@pytest.mark.parametrize(
    ("devices", "chunk", "added"),
    [
        (1, 1, 300 + 7),
        (1, 5, 300 + 5 * 7),
        (3, 2, 300 + 3 * 100 + 3 * 2 * 7),  # each device collects the states of all clients to score its own
        (3, 20, 300 + 3 * 100 + 3 * 20 * 7),
    ],
)
def test_a_cpu_adds_to_what_the_process_holds_all_but_the_samples(devices, chunk, added):
    memory = Memory(resident=1300, per_client=7, samples=1000, states=100, process=50_000, compiler=2000)
    assert memory.total(devices, chunk) == 52_000 + added
    calibrated = memory._replace(calibrated=400)
    assert calibrated.total(devices, chunk) == 52_000 + added + max(0, 400 - devices * chunk * 7)


@pytest.mark.parametrize(("devices", "free"), [(1, 640), (8, 80), (64, 10)])
def test_devices_of_a_cpu_share_its_memory_and_the_samples(devices, free):
    """A share of the memory that is smaller than the samples, which are there already, is no reason to refuse."""
    memory = Memory(resident=1100, per_client=2, participants=8, samples=1000, process=50_000, compiler=500)
    hardware = Hardware("cpu", devices * (jax.devices()[0],), free)
    config = Config(data={"source": "digits", "clients": 8}, method={"name": "fedavg"}, run={"placement": "map"})
    assert place(config, 1, memory, hardware) == Placement(chunk=1)
    with pytest.raises(ConfigError, match=r"data.clients = 8 .* needs about 0.00 GB; the machine has 0.00 GB"):
        place(config, 1, memory._replace(compiler=539), hardware)


def test_states_of_all_runs_whose_clients_are_spread_have_to_fit():
    memory = Memory(resident=1500, per_client=10, participants=8, exchanged=20, samples=500)
    config = Config(data={"source": "digits", "clients": 8}, method={"name": "fedavg"}, run={"chunk": 1})
    hardware = Hardware("gpu", tuple(jax.devices()[:1]), 1500 + 2 * 1000 + 10 + 20)
    assert place(config, 3, memory, hardware) == Placement(chunk=1)
    with pytest.raises(ConfigError, match=r"batch = 3 is not usable: fewer at once"):
        place(config, 3, memory, hardware._replace(bytes=hardware.bytes - 1))


def test_the_best_state_so_far_is_another_state_in_the_memory_of_a_cpu(federation):
    data = {"source": "digits", "clients": 4, "validation_share": 0.2}
    config = Config(data=data, method={"name": "local"}, model={"name": "mlp", "hidden": 8})
    final, best = (lay_out([config.replace("run.keep", keep)], load("digits")).memory for keep in ("final", "best"))
    assert best.resident - final.resident == final.states > 0


def test_only_where_devices_share_the_hosts_memory_does_the_process_count(model, trainer, federation):
    engine = Engine(METHODS["fedrep"](model, trainer), 7)
    on_cpu, on_gpu = (survey(engine, federation, backend)[0] for backend in ("cpu", "gpu"))
    assert on_gpu.resident == on_cpu.resident
    assert (on_gpu.process, on_gpu.compiler) == (0, 0) != (on_cpu.process, on_cpu.compiler)
    assert on_gpu.total(chunk=5) == on_gpu.resident + 5 * on_gpu.per_client + on_gpu.exchanged


def test_what_clients_upload_for_a_calibration_is_announced(model, trainer, federation):
    """Of each class a mean, a covariance and a count, twice of each of seven clients."""
    engines = (Engine(METHODS[name](model, trainer), 7) for name in ("fedavg", "ccvr"))
    plain, calibrated = (survey(engine, federation, "gpu")[0] for engine in engines)
    numbers = CLASSES * (model.dim + model.dim * (model.dim + 1) // 2 + 1)
    assert plain.scored == 0
    assert calibrated.scored == 2 * 7 * 4 * numbers
    assert calibrated.per_client >= plain.per_client


def test_what_the_server_makes_of_a_calibration_is_announced(model, trainer, federation):
    """A square of all that seven clients upload, ten floats each, and its sum with the server's parameters."""

    def squared(now, server, uploads, cohort):
        flat = uploads.reshape(-1)
        return jax.tree.map(lambda leaf: leaf + jnp.sum(flat[:, None] * flat), server)

    plain = METHODS["fedavg"](model, trainer)
    calibrated = plain._replace(calibrate=Calibration(lambda now, view, client, data: jnp.ones(10), squared))
    without, on_device, on_host = (
        survey(Engine(method, 7), federation, "gpu", on_host=offloaded)[0]
        for method, offloaded in ((plain, False), (calibrated, False), (calibrated, True))
    )
    uploads, square, parameters = 4 * 7 * 10, 4 * (7 * 10) ** 2, size(jax.eval_shape(model.init, KEY))
    assert on_device == without._replace(scored=2 * uploads, calibrated=on_device.calibrated)
    assert uploads + square <= on_device.calibrated <= 4 * uploads + square + parameters
    # With states on the host, the server that is scored stands beside the one that goes on.
    assert on_host.scored == parameters > 2 * uploads


@pytest.mark.parametrize("participants", [1, 7])
def test_what_all_clients_exchange_before_the_first_round_is_announced(model, trainer, federation, participants):
    """Of FedFCD: new states, and of each class a count and a sum; all at once where all take part in every round."""
    engine = Engine(METHODS["fedfcd"](model, trainer), 7, Participation(participants / 7, participants / 7))
    memory = survey(engine, federation, "gpu")[0]
    needed = 2 * 7 * (size(jax.eval_shape(model.init, KEY)) + 4 * CLASSES * (model.dim + 1))
    assert memory.exchanged == needed * participants // 7
    assert memory.scored == (needed if participants == 1 else 0)
    one_by_one = survey(engine, federation, "cpu")[0]
    assert one_by_one.scored == (needed - 7 * size(jax.eval_shape(model.init, KEY)) if participants == 1 else 0)


def test_a_client_needs_what_its_part_before_the_first_round_takes(model, trainer, federation):
    def setup(now, view, client, data):
        square = jnp.linalg.inv(jnp.eye(500) + client["head"]["bias"][0])
        client, upload = method.setup(now, view, client, data)
        return client, jax.tree.map(lambda leaf: leaf + jnp.sum(square).astype(leaf.dtype), upload)

    method = METHODS["fedfcd"](model, trainer)
    plain, prepared = (survey(Engine(of, 7), federation, "gpu")[0] for of in (method, method._replace(setup=setup)))
    assert prepared.per_client > 4 * 500**2 > plain.per_client
    assert prepared.exchanged == plain.exchanged
    assert prepared.scored == plain.scored


@pytest.mark.parametrize(("backend", "chunk"), [("cpu", 1), ("gpu", 3)])
def test_the_state_before_the_first_round_takes_what_is_announced(model, trainer, backend, chunk):
    """300 clients, of whom three take part in a round; FedFCD asks all of them before the first."""
    x, y = np.zeros((600, 4, 4, 1), np.uint8), np.arange(600, dtype=np.int32) % CLASSES
    tables = pack([np.arange(2 * client, 2 * client + 2) for client in range(300)], y, CLASSES)
    data = Federation(x, y, tables, None, tables, tables)
    engine = Engine(METHODS["fedfcd"](model, trainer), 300, Participation(0.01, 0.01), Placement(chunk=chunk))
    announced = survey(engine, data, backend)[0]._replace(process=0, compiler=0).total(chunk=chunk)
    planned = jax.jit(engine.init).lower(KEY, data).compile().memory_analysis()
    taken = planned.argument_size_in_bytes + planned.output_size_in_bytes + planned.temp_size_in_bytes
    assert announced / 1.5 < taken < 1.25 * announced


def test_patches_for_several_columns_are_announced_smaller(model, trainer, federation):
    engine = Engine(METHODS["fedrep"](model, trainer), 7)
    exact, fast = (
        survey(engine, federation, "gpu", precision=precision)[0] for precision in ("float32", "tensorfloat32")
    )
    assert fast.per_client == pytest.approx(0.75 * exact.per_client, rel=1e-3)
    assert fast._replace(per_client=exact.per_client) == exact


def test_blocks_of_features_are_half_as_large_where_clients_run_side_by_side(model, trainer):
    x, y = np.zeros((600, 4, 4, 1), np.uint8), np.zeros(600, np.int32)
    tables = pack([np.arange(300), np.arange(300, 600)], y, 3)
    data, engine = Federation(x, y, tables, None, tables, tables), Engine(METHODS["fedrep"](model, trainer), 2)
    on_cpu, on_gpu = (survey(engine, data, backend)[0] for backend in ("cpu", "gpu"))
    half_a_block = 64 * 16 * 4  # pixels as floats
    assert 0 < on_gpu.per_client < on_cpu.per_client - half_a_block


def test_peak_bytes_does_not_give_inputs_back():
    """A batch of a large pool, whose last use is the gather: the floats made of it, squared in place, come on top."""

    def step(pool, number):
        return jnp.sum(pool[number + jnp.arange(64)].astype(jnp.float32) ** 2)

    def loop(pool):
        return lax.fori_loop(0, 9, lambda number, total: total + step(pool, number), jnp.zeros(()))

    pool = np.zeros((5000, 64), np.uint8)
    for fn, args in ((step, (pool, np.int32(0))), (loop, (pool,))):
        peak = peak_bytes(jax.make_jaxpr(fn)(*args).jaxpr)
        floats = 64 * 64 * 4
        assert floats <= peak <= floats + 64 * 64 + 3000


@LINUX
def test_the_resident_set_grows_by_what_is_allocated():
    before = resident_set()
    held = np.ones(50_000_000, np.uint8)
    assert held.nbytes <= resident_set() - before + 1e6 <= held.nbytes + 3e6


SIMULATE = """
import json, sys
import numpy as np
from fedjax_pfl import Config, simulate
clients, rounds = int(sys.argv[1]), 2
rng = np.random.default_rng(0)
data = rng.integers(0, 256, (70_000, 28, 28, 1), np.uint8), rng.integers(0, 10, 70_000)
config = Config(
    data={"source": "arrays", "clients": clients, "partition": {"kind": "iid"}},
    method={"name": "fedavg"},
    training={"rounds": rounds},
    participation={"ratio": 100 / clients},
    run={"compilation_cache": "off"},
)
memory = simulate(config, data).summary["memory"]
# Not getrusage: its maximum begins with what the process that started this one held.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([memory["estimate_bytes"], 1024 * int(status["VmHWM"].split()[0])]))
"""


@LINUX
def test_ten_thousand_clients_take_what_is_announced():
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    ran = subprocess.run(
        [sys.executable, "-c", SIMULATE, "10000"], env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    announced, taken = json.loads(ran.stdout.splitlines()[-1])
    assert taken / 1.5 < announced < taken * 1.5


@pytest.mark.parametrize(("name", "copied"), [("fedrep", False), ("fedamp", True)])
def test_the_states_that_the_server_writes_to_are_copied_where_models_are_scored(
    name, copied, model, trainer, federation
):
    """Others are read in place; of those on the host, a device holds two groups."""
    method = METHODS[name](model, trainer)
    engine, own = Engine(method, 7, Participation(3 / 7, 3 / 7)), jax.eval_shape(lambda: method.init(KEY, 7)[1])
    on_device, on_host = (survey(engine, federation, "gpu", on_host=where)[0] for where in (False, True))
    assert on_device.scored == copied * 7 * size(own)
    assert on_host.scored == 2 * 3 * size(own)


def test_a_client_needs_what_scoring_its_model_takes(model, trainer, federation):
    plain = METHODS["fedavg"](model, trainer)

    def predict(params, x):
        return plain.predict(params, x) + jnp.linalg.inv(jnp.eye(500) + params["head"]["bias"][0])[0, 0]

    before, after = (survey(Engine(of, 7), federation, "gpu")[0] for of in (plain, plain._replace(predict=predict)))
    assert after.per_client > 4 * 500**2 > before.per_client


def test_a_client_needs_what_its_part_of_a_calibration_takes(model, trainer, federation):
    def local(now, view, client, data):
        return jnp.linalg.inv(jnp.eye(500) + view["head"]["bias"][0])[0]

    plain = METHODS["fedavg"](model, trainer)
    calibrated = plain._replace(calibrate=Calibration(local, lambda now, server, uploads, cohort: server))
    before, after = (survey(Engine(of, 7), federation, "gpu")[0] for of in (plain, calibrated))
    assert after.per_client > 4 * 500**2 > before.per_client


def test_states_on_the_host_are_held_by_the_process_where_its_cpu_is_the_device(model, trainer, federation):
    method = METHODS["fedrep"](model, trainer)
    states = 7 * size(jax.eval_shape(lambda: method.init(KEY, 7)[1]))
    for backend, elsewhere in (("cpu", 0), ("gpu", states)):
        on_device, on_host = (
            survey(Engine(method, 7), federation, backend, on_host=where)[0].resident for where in (False, True)
        )
        assert on_device - on_host == elsewhere
    assert states > 0
