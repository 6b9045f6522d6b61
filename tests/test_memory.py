"""The memory that a run announces: by hand where it can be counted, and against what a process takes."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_pfl.engine.memory import Memory, peak_bytes, resident_set, survey
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.methods import METHODS

LINUX = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="only Linux says what a process holds")


def test_a_device_with_its_own_memory_holds_what_is_resident_and_its_clients():
    assert Memory(resident=1000, per_client=7, states=100).total(devices=1, chunk=3) == 1000 + 3 * 7
    # Each of several collects the states of all clients to score its own.
    assert Memory(resident=1000, per_client=7, states=100).total(devices=4, chunk=3) == 1000 + 100 + 3 * 7


@pytest.mark.parametrize(
    ("devices", "chunk", "added"),
    [
        (1, 1, 300 + 7),
        (1, 5, 300 + 5 * 7),
        (3, 2, 300 + 3 * 100 + 3 * 2 * 7),  # each device collects the states of all clients to score its own
    ],
)
def test_a_cpu_adds_to_what_the_process_holds_all_but_the_samples(devices, chunk, added):
    memory = Memory(resident=1300, per_client=7, samples=1000, states=100, process=50_000, compiler=2000)
    assert memory.total(devices, chunk) == 52_000 + added


def test_accelerators_plan_less_for_a_client_than_a_trace_keeps_alive(model, trainer, federation):
    """Blocks of features are half as large side by side, and compilers fuse what the trace holds one by one."""
    engine, key = Engine(METHODS["fedrep"](model, trainer), 7), jax.random.key(0)
    on_cpu, on_gpu = (survey(engine, key, federation, backend)[0] for backend in ("cpu", "gpu"))
    assert on_gpu.resident == on_cpu.resident
    assert 0 < on_gpu.per_client < 0.8 * on_cpu.per_client
    assert (on_gpu.process, on_gpu.compiler) == (0, 0) != (on_cpu.process, on_cpu.compiler)
    assert on_gpu.total(chunk=5) == on_gpu.resident + 5 * on_gpu.per_client


def test_peak_bytes_does_not_give_inputs_back():
    """A batch of a large pool, whose last use is the gather: the floats made of it come on top."""

    def step(pool, number):
        return jnp.sum(pool[number + jnp.arange(64)].astype(jnp.float32) ** 2)

    def loop(pool):
        return lax.fori_loop(0, 9, lambda number, total: total + step(pool, number), jnp.zeros(()))

    pool = np.zeros((5000, 64), np.uint8)
    for fn, args in ((step, (pool, np.int32(0))), (loop, (pool,))):
        peak = peak_bytes(jax.make_jaxpr(fn)(*args).jaxpr)
        floats = 64 * 64 * 4
        assert 2 * floats <= peak <= 2 * floats + 64 * 64 + 3000


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
