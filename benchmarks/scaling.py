"""The cost of a round as the number of clients grows: time and memory, unequal sizes, evaluation.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json
    python benchmarks/scaling.py --parts cohort,ragged

Parts, each of which prints a table:

- steps: seconds per client and gradient step for 10 to 10,000 clients with full participation, on a model that is so
  small that the cost of a client besides its steps shows;
- cohort: 100 participants per round out of 100 to 100,000 clients: the round must cost the same. Evaluation is of all
  clients, so its cost is given per client;
- offloaded: the same with the clients' states in the memory of the host (``run.client_state = "host"``): the cost of
  their way to the device and back; on a CPU, where both are the same memory, it is a copy each way;
- ragged: Dir(0.1) sizes against equal sizes with the same total: the steps that only fill up a chunk of clients side by
  side, and the time;
- memory: bytes per client, estimated before compilation, planned by XLA, and measured as the growth of the process;
- evaluation: seconds per evaluated client against seconds per trained client; evaluation is all scoring after a round,
  including the global model, if there is one, and the transfer to the host.

Images are those of Fashion-MNIST if $FEDJAX_PFL_DATA holds fashion_mnist_70k.npz (repeated from the first one if
clients need more), and random otherwise. Every case runs in a process of its own, so that its peak memory is measured
separately.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from listed import names_of

from fedjax_pfl import Config
from fedjax_pfl.data.dataset import Dataset, from_arrays
from fedjax_pfl.engine.run import Run
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.experiment.process import cores, prepare
from fedjax_pfl.experiment.programs import Program, traced
from fedjax_pfl.ops.tree import size

BATCH = 10
CHUNKS = (10, 20)


def images(samples: int) -> Dataset:
    """``samples`` labelled images of 28x28 pixels."""
    file = Path(os.environ.get("FEDJAX_PFL_DATA", ".")) / "fashion_mnist_70k.npz"
    if file.exists():
        with np.load(file) as arrays:
            rows = np.arange(samples) % len(arrays["label"])
            return from_arrays(arrays["image"][rows], arrays["label"][rows])
    rng = np.random.default_rng(0)
    return from_arrays(rng.integers(0, 256, (samples, 28, 28, 1), dtype=np.uint8), np.arange(samples) % 10)


def compiled(clients: int, samples: int, **tables: dict[str, Any]) -> Program:
    """The program of a run on equal clients with ``samples`` samples each, a fifth of them for testing."""
    config = Config(
        **{
            "data": {"source": "arrays", "clients": clients, "test_share": 0.2, "partition": {"kind": "iid"}},
            "training": {"batch_size": BATCH},
            **tables,
        }
    )
    prepare(config.run)
    program = lay_out([config], images(clients * samples))
    program.compile()
    return program


def seconds_per_round(program: Program, repeats: int, rounds: int = 1, *, post: bool = False) -> tuple[float, Run]:
    """The median over blocks of ``rounds`` rounds, after one block that does not count, and the state after the last.

    With ``post``, participants are scored in the last round of a block; under partial participation they always are.
    """
    states, times = program.init(), []
    for t in range(0, (repeats + 1) * rounds, rounds):
        began = time.perf_counter()
        states = jax.block_until_ready(program.rounds(states, t, t + rounds, evaluate=post))
        times.append((time.perf_counter() - began) / rounds)
    return statistics.median(times[1:]), states[0]


def seconds_per_evaluation(program: Program, run: Run, repeats: int) -> float:
    """The median time of scoring all clients, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        program.score([run], 0)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def peak_bytes() -> int:
    """The most memory that this process has had so far."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("peak_bytes_in_use", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


def steps(clients: int, repeats: int) -> dict[str, Any]:
    """One epoch of 16 samples for every client, two steps."""
    model = {"name": "mlp", "hidden": 10}
    program = compiled(clients, 20, model=model, method={"name": "fedavg"})
    seconds, _ = seconds_per_round(program, repeats, max(1, 1000 // clients))
    return {
        "clients": clients,
        "milliseconds per round": 1e3 * seconds,
        "microseconds per client-step": 1e6 * seconds / (2 * clients),
        "peak GB": peak_bytes() / 1e9,
    }


def cohort(clients: int, model: str, repeats: int) -> dict[str, Any]:
    """A hundred participants of FedRep with 20 training samples each."""
    method = {"name": "fedrep", "head_epochs": 1}
    return {
        "clients": clients,
        "model": model,
        **_rounds_of(clients, 100, repeats, model={"name": model}, method=method),
    }


def offloaded(method: str, model: str, clients: int, participants: int, where: str, repeats: int) -> dict[str, Any]:
    """Participants with 20 training samples each, whose states are on the device, or come from the host."""
    tables = {"model": {"name": model}, "method": {"name": method}, "run": {"client_state": where}}
    row = {"method": method, "model": model, "clients": clients, "participants": participants, "states": where}
    return row | _rounds_of(clients, participants, repeats, **tables)


def _rounds_of(clients: int, participants: int, repeats: int, **tables: dict[str, Any]) -> dict[str, Any]:
    """The times of rounds and evaluations, with 20 training samples per client."""
    program = compiled(clients, 25, participation={"ratio": participants / clients}, **tables)
    seconds, run = seconds_per_round(program, 5 * repeats, post=True)
    state, data = size(run.state.clients), size((program.samples, program.rows[0].clients))
    # Before the evaluation, which has more in hand at a time than a round.
    peak = peak_bytes()
    evaluation = seconds_per_evaluation(program, run, 1)
    return {
        "seconds per round": seconds,
        "peak GB": peak / 1e9,
        "with evaluation": peak_bytes() / 1e9,
        "data GB": data / 1e9,
        "client state GB": state / 1e9,
        "milliseconds per evaluated client": 1e3 * evaluation / clients,
    }


def ragged(beta: float | None, placement: str, chunk: int, repeats: int) -> dict[str, Any]:
    """A hundred clients: Dir(beta) sizes, or equal ones with the same total."""
    partition = {"kind": "iid"} if beta is None else {"kind": "dirichlet", "beta": beta}
    options = {"chunk": chunk} if placement == "vmap" else {}
    program = compiled(
        100,
        200,
        data={"source": "arrays", "clients": 100, "partition": partition},
        model={"name": "mlp"},
        method={"name": "fedavg"},
        run={"placement": placement, **options},
    )
    seconds, _ = seconds_per_round(program, repeats)
    train, *_ = program.rows[0].clients
    sizes = np.asarray(train.count)
    ordered = sizes[np.asarray(program.engine._order(jnp.arange(len(sizes)), jnp.asarray(sizes)))]
    return {
        "sizes": "equal" if beta is None else f"Dir({beta})",
        "smallest": int(sizes.min()),
        "largest": int(sizes.max()),
        "placement": f"{placement} {chunk}" if options else placement,
        "waste": waste(ordered, chunk),
        "waste in any order": waste(sizes, chunk),
        "steps": int(steps_of(sizes).sum()),
        "seconds": seconds,
    }


def steps_of(sizes: np.ndarray) -> np.ndarray:
    """The number of steps in an epoch of each client."""
    return -(-sizes // BATCH)


def waste(sizes: np.ndarray, chunk: int) -> float:
    """Steps executed / steps needed - 1, where a chunk runs as long as its largest client."""
    needed = steps_of(sizes)
    executed = chunk * needed.reshape(-1, chunk).max(axis=1).sum()
    return float(executed / needed.sum() - 1)


def memory(method: str, model: str, clients: int, ratio: float) -> dict[str, Any]:
    """Bytes of a run with 16 training samples per client."""
    before = peak_bytes()
    program = compiled(clients, 20, model={"name": model}, method={"name": method}, participation={"ratio": ratio})
    placement, needs = program.engine.placement, {}
    ready = peak_bytes()
    _, run = seconds_per_round(program, 1)
    trained = peak_bytes()
    seconds_per_evaluation(program, run, 1)
    grown = peak_bytes() - before
    for name, (jitted, arguments) in traced(program).items():
        plan = jitted.lower(*arguments).compile().memory_analysis()
        held = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
        needs[name] = placement.devices * (held + plan.temp_size_in_bytes)
    memory, clients_on = program.memory, placement.devices * placement.chunk
    estimate = memory.resident + memory.exchanged + clients_on * memory.per_client
    return {
        "method": method,
        "model": model,
        "clients": clients,
        "cohort": program.engine.cohort_size,
        "client state KB": size(run.state.clients) / clients / 1e3,
        "estimate MB": estimate / 1e6,
        **{f"XLA {name} MB": bytes_ / 1e6 for name, bytes_ in needs.items()},
        "grown by rounds MB": (trained - ready) / 1e6,
        "grown by all MB": grown / 1e6,
    }


def evaluation(method: str, model: str, repeats: int) -> dict[str, Any]:
    """A hundred clients with 120 training and 30 test samples each, one epoch per round."""
    program = compiled(100, 150, model={"name": model}, method={"name": method})
    trained, run = seconds_per_round(program, repeats)
    evaluated = seconds_per_evaluation(program, run, repeats)
    return {
        "method": method,
        "model": model,
        "milliseconds per trained client": 10 * trained,
        "milliseconds per evaluated client": 10 * evaluated,
        "ratio": evaluated / trained,
    }


def cases(part: str, repeats: int) -> list[tuple[Any, ...]]:
    """The arguments of each case of a part."""
    if part == "steps":
        return [(clients, repeats) for clients in (10, 100, 1000, 10000)]
    if part == "cohort":
        sizes = [(clients, model, repeats) for model in ("mlp", "cnn2") for clients in (100, 1000, 10000)]
        return [*sizes, (100_000, "mlp", repeats)]
    if part == "offloaded":
        settings = [("fedrep", "mlp", 1000, 100), ("fedrep", "mlp", 100_000, 100), ("ditto", "cnn2", 1000, 10)]
        return [(*setting, where, repeats) for setting in settings for where in ("device", "host")]
    if part == "ragged":
        placements = [("map", 1), *(("vmap", chunk) for chunk in CHUNKS)]
        return [(beta, *placement, repeats) for placement in placements for beta in (0.1, None)]
    if part == "memory":
        methods = ("fedavg", "fedrep", "ditto", "fedpac", "fedecouple")
        return [(method, "mlp", 500, ratio) for method in methods for ratio in (1.0, 0.1)]
    return [(method, model, repeats) for model in ("mlp", "cnn2") for method in ("fedavg", "fedrep", "fedavg_ft")]


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "steps": steps,
    "cohort": cohort,
    "offloaded": offloaded,
    "ragged": ragged,
    "memory": memory,
    "evaluation": evaluation,
}


def main() -> None:
    """Runs the parts, prints a table of each and, if asked to, writes all figures to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=names_of(PARTS), default=list(PARTS), help="of: " + ", ".join(PARTS))
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed blocks of rounds per case (cohort: five times as many)"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs=2, metavar=("PART", "NUMBER"), help="one case, as JSON on standard output")
    options = parser.parse_args()
    if options.case:
        part, number = options.case
        print(json.dumps(PARTS[part](*cases(part, options.repeats)[int(number)])))
        return
    found: dict[str, list[dict[str, Any]]] = {}
    for part in options.parts:
        found[part] = []
        for number in range(len(cases(part, options.repeats))):
            command = [sys.executable, __file__, "--repeats", str(options.repeats), "--case", part, str(number)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            row = json.loads(done.stdout.splitlines()[-1])
            if not found[part]:
                print(f"\n{part}\n\n| {' | '.join(row)} |\n|{'---|' * len(row)}")
            found[part].append(row)
            print(f"| {' | '.join(shown(value) for value in row.values())} |", flush=True)
    if options.json:
        machine = f"{cores()} {platform.machine()} cores, JAX {jax.__version__} on {jax.default_backend()}"
        report = {"machine": machine, "repeats": options.repeats, **found}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def shown(value: Any) -> str:
    """A cell of a table: three significant digits, unless the value is a whole number."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


if __name__ == "__main__":
    main()
