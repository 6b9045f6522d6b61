"""Compiles the programs of a run for GPUs and TPUs that are not there, and estimates their cost on them.

    python3.11 -m venv env-accelerators && . env-accelerators/bin/activate
    pip install -e . "jax[tpu,cuda12]"
    python benchmarks/accelerators.py --target v5e --config configs/quickstart.toml --set model.name=mlp
    python benchmarks/accelerators.py --json benchmarks/results/accelerators.json

The programs are ``rounds``, of which one round is estimated, and ``score``; with the clients' states on the host, they
are a round and the scores of one group of clients. For each program the script reports: whether it compiles; the memory
that the compiler plans, beside the memory announced before compilation; kernels per batch step; loops whose length only
the running program knows; exchanges between devices; and an estimated time with what bounds it.

The estimate of a GPU is a roofline. A kernel takes the largest of three times: its launch (4 us), its bytes (at 0.8 of
the bandwidth), and its products (at 0.5 of the peak of the precision). A pass of a loop of unknown length takes another
15 us, for asking the host. The estimate of a TPU is the cycles that its compiler writes beside each operation. None of
this is a measurement: it is useful for ratios.

Every program is compiled in a process of its own, since a compiler that fails may end its process. Without ``--config``
the table of `CASES` is compiled; if the file already holds some of it, only the rest is compiled.
"""

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

# Before JAX starts: it runs on the CPU here, and the compilers of the others are not to look for their devices.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import numpy as np
from hlo import Cost, Rates, estimate, parse
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from listed import names_of

from fedjax_pfl import Config, load_config
from fedjax_pfl.data.dataset import Dataset, from_arrays
from fedjax_pfl.data.sources import load
from fedjax_pfl.engine.hardware import Hardware
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.experiment.programs import Program, traced

_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: {memory} shared_memory_per_block_optin: 232448 cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "NVIDIA {name}"
"""


class Target(NamedTuple):
    """A device to compile for.

    Attributes:
      backend: ``"gpu"`` or ``"tpu"``.
      memory: bytes that a program may use.
      bandwidth: of a GPU's memory, bytes per second.
      clock: of a TPU, cycles per second.
      topology: of a TPU, as its compiler names it.
      accelerator: of a TPU, what has to be in the environment.
    """

    backend: str
    memory: int
    bandwidth: int = 0
    clock: float = 0.0
    topology: str = ""
    accelerator: str = ""


TARGETS = {
    "h100": Target("gpu", 80 * 2**30, bandwidth=3_350_000_000_000),
    "h200": Target("gpu", 141 * 2**30, bandwidth=4_800_000_000_000),
    "v5e": Target("tpu", int(15.75 * 2**30), clock=1.5e9, topology="v5e:2x2", accelerator="v5litepod-4"),
    "v6e": Target("tpu", int(31.25 * 2**30), clock=1.75e9, topology="v6e:2x2", accelerator="v6e-4"),
}
# Of a GPU's float32 arithmetic; what the tensor cores do in the other precisions.
_FLOPS = {"float32": 67e12, "tensorfloat32": 495e12, "bfloat16": 990e12}
# Of a run, and the same of a group of clients whose states are on the host.
PARTS = {"rounds": "round", "score": "pre"}
# Passes of the loops that stop by their own numbers: FedPAC's quadratic programs (6 to 13, measured).
_PASSES = {"simplex_qp": 13}


@functools.cache
def devices_of(name: str) -> list[jax.Device]:
    """The devices of a target, for compilation."""
    target = TARGETS[name]
    if target.backend == "tpu":
        os.environ["TPU_ACCELERATOR_TYPE"] = target.accelerator
        return list(topologies.get_topology_desc(platform="tpu", topology_name=target.topology).devices)
    # The plugin is found when a backend is asked for, which here is the CPU's alone.
    from jax._src import xla_bridge

    xla_bridge.discover_pjrt_plugins()
    described = _GPU.format(bandwidth=target.bandwidth, memory=target.memory, name=name.upper())
    return list(topologies.get_topology_desc(platform="cuda", target_config=described, topology="1x1x1").devices)


def rates_of(target: str, precision: str) -> Rates | None:
    """The roofline of a GPU; None for a TPU."""
    if TARGETS[target].backend == "tpu":
        return None
    return Rates(4e-6, 15e-6, 0.8 * TARGETS[target].bandwidth, 0.5 * _FLOPS[precision])


class Case(NamedTuple):
    """A row of the table: runs on random images of 32x32x3.

    Attributes:
      precision: of products; by default that of a CPU, so that estimates compare programs, not precisions.
      runs: rows of one program, which differ in their seeds.
      states: where the clients' states are, ``"device"`` or ``"host"``.
      overrides: further ``section.key=value``, the value as JSON.
    """

    method: str
    model: str
    clients: int = 20
    ratio: float = 1.0
    samples: int = 600
    precision: str = "float32"
    runs: int = 1
    states: str = "device"
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name that distinguishes the case from the others."""
        name = f"{self.method}_{self.model}_{self.clients}"
        name += "" if self.precision == "float32" else f"_{self.precision}"
        name += "" if self.states == "device" else f"_{self.states}"
        return name if self.runs == 1 else f"{name}_x{self.runs}"

    def configs(self) -> list[Config]:
        """A config for each run; all clients hold the same number of training samples."""
        tables: dict[str, dict[str, Any]] = {
            "data": {"source": "arrays", "clients": self.clients, "partition": {"kind": "iid"}, "test_share": 0.2},
            "model": {"name": self.model},
            "method": {"name": self.method},
            "training": {"batch_size": 10, "lr": 0.005},
            "participation": {"ratio": self.ratio},
            "run": {"precision": self.precision, "client_state": self.states},
        }
        for override in self.overrides:
            section, _, rest = override.partition(".")
            key, _, value = rest.partition("=")
            tables[section][key] = json.loads(value)
        return [Config(**{**tables, "run": {**tables["run"], "seed": seed}}) for seed in range(self.runs)]

    def dataset(self) -> Dataset:
        """Black images only: nothing is run."""
        rows = self.clients * self.samples * 5 // 4
        return from_arrays(np.zeros((rows, 32, 32, 3), np.uint8), np.arange(rows) % 10)


_ALL = "local fedavg fedavg_ft fedprox fedprox_ft scaffold ditto lg_fedavg fedper fedrep fedbabu fedala fedpac fedfcd"
_ALL += " fedcpd pgfedsplit fedecouple"
_FIVE = ("training.epochs=5",)
CASES = [Case(method, "cnn2", clients) for clients in (20, 500) for method in _ALL.split()]
CASES += [Case("pfedcspc", "cnn_proj", clients) for clients in (20, 500)]
CASES += [
    Case("fedecouple", "cnn3", overrides=_FIVE),
    Case("fedavg", "cnn3"),
    Case("fedpac", "cnn3"),
    *(Case(method, "mlp") for method in ("fedavg", "fedecouple", "fedpac")),
    *(Case(method, "resnet18", 10) for method in ("fedavg", "fedecouple", "fedpac")),
    *(Case(method, "cnn2", 10_000, 0.01, 60) for method in ("fedavg", "fedecouple", "fedpac")),
    *(Case("ditto", "cnn2", 10_000, 0.01, 60, states=where) for where in ("device", "host")),
    *(Case("fedavg", "cnn2", clients, precision=name) for name in _FLOPS if name != "float32" for clients in (20, 500)),
    *(Case("fedecouple", "cnn3", precision=name, overrides=_FIVE) for name in _FLOPS if name != "float32"),
    *(Case("fedrep", "mlp", runs=runs) for runs in (1, 24)),
    *(Case("fedavg", "cnn2", precision=name, runs=24) for name in ("float32", "bfloat16")),
    # What a GPU multiplies in by default.
    *(Case(method, "cnn2", precision="tensorfloat32") for method in _ALL.split() if method != "fedavg"),
    Case("pfedcspc", "cnn_proj", precision="tensorfloat32"),
    Case("fedecouple", "cnn3", precision="tensorfloat32", runs=24, overrides=_FIVE),
]


def compiled(program: Program, part: str, target: str, keep: Path | None) -> dict[str, Any]:
    """Compiles one function of a program, and returns what the compiler reports about it."""
    if program.offloaded:  # of a group of clients
        part = PARTS[part]
    jitted, arguments = traced(program, SingleDeviceSharding(devices_of(target)[0]))[part]
    began, used = time.perf_counter(), time.process_time()
    with jax.default_matmul_precision(program.precision):
        lowered = jitted.lower(*arguments)
        finished = lowered.compile()
    took = time.perf_counter() - began, time.process_time() - used
    planned, text = finished.memory_analysis(), finished.as_text()
    if keep:
        keep.write_text(text, encoding="utf-8")
    module = parse(text)
    rates = rates_of(target, program.precision)
    found = estimate(module, rates, _PASSES, evaluate=part in ("score", "pre"))
    steps = [loop for loop in found.loops if any("scan_batches" in function for function in loop.source[:1])]
    step = max(steps, key=lambda loop: (loop.whole.seconds, loop.whole.cycles), default=None)

    def seconds(cost: Cost) -> float:
        return cost.seconds if rates else cost.cycles / TARGETS[target].clock

    return {
        "peak_bytes": planned.argument_size_in_bytes
        + planned.output_size_in_bytes
        - planned.alias_size_in_bytes
        + planned.temp_size_in_bytes,
        "temporary_bytes": planned.temp_size_in_bytes,
        "seconds": seconds(found.total),
        "bound_by": {name: getattr(found.total, name) for name in ("launch", "memory", "arithmetic")} if rates else {},
        "kernels": found.total.kernels,
        "batch_step": step and {"kernels": step.own.kernels, "seconds": seconds(step.own), "of": step.trips},
        "unknown_loops": sorted({" < ".join(loop.source[:2]) for loop in found.loops if loop.trips is None}),
        "collectives": found.collectives,
        "compile_seconds": took[0],
        "compile_cpu_seconds": took[1],
        "loops": [
            {"source": " < ".join(loop.source[:2]), "trips": loop.trips, "kernels": loop.own.kernels}
            | {"pass_seconds": seconds(loop.own), "seconds": seconds(loop.whole)}
            for loop in found.loops
        ],
    }


def describe(configs: list[Config], dataset: Dataset, target: str, part: str, keep: Path | None) -> dict[str, Any]:
    """What the runs of a program announce for a target, and what its compiler reports."""
    facts = TARGETS[target]
    # One device: a compile-only one cannot be given anything to hold.
    program = lay_out(configs, dataset, Hardware(facts.backend, tuple(devices_of(target)[:1]), facts.memory))
    row = {"chunk": program.engine.placement.chunk, "announced_bytes": program.bytes()}
    return row | compiled(program, part, target, keep)


def in_a_process(arguments: list[str]) -> dict[str, Any]:
    """The result of this script with other arguments; an error if it fails."""
    ran = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    if ran.returncode == 0:
        found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        return found
    said = [line for line in ran.stderr.splitlines() if line.strip()]
    blame = next((line for line in reversed(said) if "Error" in line or "Check failed" in line), (said or ["?"])[-1])
    return {"error": blame[:500]}


def show(name: str, target: str, part: str, row: dict[str, Any]) -> None:
    """Prints a line of the table as soon as it is known."""
    if "error" in row:
        print(f"{name:24} {target:5} {part:6} does not compile: {row['error']}", flush=True)
        return
    step = row["batch_step"] or {"kernels": 0, "seconds": 0.0}
    facts = (
        f"{1e3 * row['seconds']:8.1f} ms",
        *(f"{what} {1e3 * taken:.1f}" for what, taken in row["bound_by"].items()),
        f"peak {row['peak_bytes'] / 1e9:.2f} GB, announced {row['announced_bytes'] / 1e9:.2f}, chunk {row['chunk']}",
        f"{row['kernels']:.0f} kernels, {step['kernels']:.0f} and {1e6 * step['seconds']:.0f} us a step",
        f"{len(row['unknown_loops'])} loops of unknown length, {row['collectives']} exchanges",
        f"compiled in {row['compile_cpu_seconds']:.0f} CPU s",
    )
    print(f"{name:24} {target:5} {part:6} {'; '.join(facts)}", flush=True)


def main() -> None:
    """Compiles one config, or the table.

    Raises:
      SystemExit: a program does not compile, or takes more memory than the device has.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    by_name = {case.name: case for case in CASES}
    usual = ["h200", "v5e"]
    parser.add_argument("--target", type=names_of(TARGETS), default=usual, help="of: " + ", ".join(TARGETS))
    parser.add_argument("--parts", type=names_of(PARTS), default=list(PARTS), help="of: " + ", ".join(PARTS))
    parser.add_argument("--config", type=Path, help="in the place of the table")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--cases", type=names_of(by_name), help="of the table, by name, e.g. fedavg_cnn2_20")
    parser.add_argument("--again", action="store_true", help="compile what the file holds already, too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="with one program: a file for what the compiler has made of it")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # in this process, and print JSON
    options = parser.parse_args()
    if options.one:
        if options.config:
            configs = [load_config(options.config, options.set)]
            dataset = load(configs[0].data.source)
        else:
            configs, dataset = by_name[options.cases[0]].configs(), by_name[options.cases[0]].dataset()
        print(json.dumps(describe(configs, dataset, options.target[0], options.parts[0], options.keep)))
        return
    rows: dict[str, Any] = {}
    if options.json and options.json.exists():
        held = json.loads(options.json.read_text(encoding="utf-8"))
        if held["jax"] != jax.__version__:
            parser.error(f"{options.json} is of jax {held['jax']}, this is {jax.__version__}; choose another --json")
        rows = held["rows"]
    names = [str(options.config)] if options.config else options.cases or list(by_name)
    failed = False
    for name, target, part in itertools.product(names, options.target, options.parts):
        if TARGETS[target].backend == "tpu" and name in by_name and by_name[name].precision == "tensorfloat32":
            continue  # which a TPU does not have
        label = f"{name} {target} {part}"
        if label not in rows or options.again or options.config:  # whose name does not tell its --set
            what = (
                ["--config", name, *(f"--set={item}" for item in options.set)] if options.config else ["--cases", name]
            )
            kept = ["--keep", str(options.keep)] if options.keep else []
            rows[label] = in_a_process(["--one", *what, *kept, "--target", target, "--parts", part])
            show(name, target, part, rows[label])
        failed |= "error" in rows[label] or rows[label]["peak_bytes"] > TARGETS[target].memory
        if options.json:
            lines = ",\n".join(f" {json.dumps(label)}: {json.dumps(row)}" for label, row in sorted(rows.items()))
            head = f'{{"jax": {json.dumps(jax.__version__)}, "rows": {{\n'
            options.json.write_text(head + lines + "\n}}\n", encoding="utf-8")
    sys.exit(failed)


if __name__ == "__main__":
    main()
