"""Several processes, and more devices than this one has, give what one device gives."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from fedjax_pfl import simulate
from fedjax_pfl.experiment import distributed
from fedjax_pfl.experiment.reading import load_config

# FedPAC's server solves a program per client and writes to each; clients come and go.
OVERRIDES = (
    "method.name=fedpac",
    "model.hidden=8",
    "data.clients=6",
    "data.new_clients=0.2",
    "participation.ratio=0.7",
    "training.rounds=6",
    "run.eval_every=3",
    "run.checkpoint_every=3",
    'run.export=["predictions"]',
)
CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.toml"
COMMAND = [sys.executable, "-c", "from fedjax_pfl.cli.commands import main; main()", "run"]
# Gloo and the coordinator talk over loopback.
LOCAL = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}


def free_job_id():
    """A job of SLURM whose number leads JAX to a free port (61440 + number % 4096)."""
    for job in range(os.getpid() % 4096, 4096 + os.getpid() % 4096):
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", 61440 + job % 4096)) != 0:
                return job
    raise AssertionError("no port is free")


@pytest.fixture
def launch():
    """arguments -> ``fedjax-pfl run`` as a job of SLURM's; no process outlives the test."""
    started = []
    yield lambda arguments: started.extend(new := start(arguments)) or new
    for process in started:
        process.kill()
        process.wait()
        for file in process.printed:
            file.close()


def start(arguments):
    """Two processes, each with two devices."""
    job = free_job_id()
    environment = {
        **os.environ,
        **LOCAL,
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(jax.config.values["jax_disable_most_optimizations"])),
    }
    cache = jax.config.values["jax_compilation_cache_dir"]
    where = [f"run.compilation_cache={cache}"] if cache else []
    new = []
    for number in range(2):
        slurm = {
            "SLURM_JOB_ID": str(job),
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(number),
            "SLURM_LOCALID": str(number),
        }
        command = [*COMMAND, *arguments, *where, "--distributed"]
        # Not pipes: one that nobody reads is full some day, and a process that waits for it keeps the others waiting.
        files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115  # `launch` closes them
        process = subprocess.Popen(command, env={**environment, **slurm}, stdout=files[0], stderr=files[1])
        process.printed = files
        new.append(process)
    return new


def ended_of(process):
    """What a process printed, and its exit status, once it has ended."""
    process.wait(timeout=300)
    for file in process.printed:
        file.seek(0)
    return (*(file.read() for file in process.printed), process.returncode)


def finish(processes):
    """What the processes printed, once all of them have ended well."""
    ended = [ended_of(process) for process in processes]
    assert all(code == 0 for *_, code in ended), ended
    return [out for out, *_ in ended]


def scores(directory):
    """The metrics of a run, without its times."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"]
    return lines


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run directory of the run on one device of this process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    simulate(load_config(CONFIG, [*OVERRIDES, "run.placement=map", f"run.out={out}"]))
    return out


def assert_same(directory, alone):
    found, expected = scores(directory), scores(alone)
    assert [line["round"] for line in found[:2]] == [line["round"] for line in expected] == [3, 6]
    for line, wanted in zip(found[:2], expected, strict=True):
        flat, flat_wanted = (np.array(jax.tree.leaves(tree), np.float64) for tree in (line, wanted))
        np.testing.assert_allclose(flat, flat_wanted, rtol=1e-4)
    assert (directory / "partition.json").read_text() == (alone / "partition.json").read_text()
    exported, wanted = (np.load(path / "export.npz") for path in (directory, alone))
    for name in ("client", "sample", "label"):
        np.testing.assert_array_equal(exported[name], wanted[name])


def test_two_processes_of_two_devices_give_what_one_device_gives_also_after_an_interruption(alone, launch, tmp_path):
    out = tmp_path / "run"
    # Too many to end; resuming sets another number.
    arguments = [str(CONFIG), *OVERRIDES, "training.rounds=100000", "run.eval_every=3", "--out", str(out)]
    processes = launch(arguments)
    while not (out / "checkpoints" / "3").exists():
        assert not [ended_of(process) for process in processes if process.poll() is not None]
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGTERM)  # one of them is enough
    ended = [ended_of(process) for process in processes]
    assert [code for *_, code in ended] == [128 + signal.SIGTERM] * 2, ended
    newest = max(int(path.name) for path in (out / "checkpoints").iterdir())
    printed = finish(launch(["--resume", str(out), f"training.rounds={newest + 3}"]))
    assert "written to" in printed[0]
    assert "round" not in printed[1]
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["environment"]["process_count"], summary["environment"]["device_count"]) == (2, 4)
    assert_same(out, alone)


def test_the_first_process_says_how_long_a_block_is_and_any_of_them_that_the_run_ends(monkeypatch):
    others = []
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr(distributed.multihost_utils, "process_allgather", lambda own: np.stack([*others, own]))
    for first, own, agreed in (
        ([5, 0, 0], (3, None, False), (5, None, False)),
        ([5, 0, 0], (3, None, True), (5, None, True)),
        ([5, 0, 1], (3, None, False), (5, None, True)),
        ([5, 0, 0], (3, signal.SIGTERM, False), (5, signal.SIGTERM, False)),
        ([5, signal.SIGINT, 0], (3, None, False), (5, signal.SIGINT, False)),
    ):
        others[:] = [first]
        assert distributed.agree(*own) == agreed


def test_no_job_of_several_processes_is_one_clear_error():
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "JAX_COORDINATOR"))}
    command = [*COMMAND, str(CONFIG), "--distributed"]
    ended = subprocess.run(command, env=alone, capture_output=True, text=True, check=False, timeout=100)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(
        "error: --distributed = 'true' is not usable: a job of several processes that JAX can"
    )
    assert len(ended.stderr.splitlines()) == 1
