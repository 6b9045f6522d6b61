"""Kills a sweep of twelve runs with SIGKILL at several instants, and checks that it resumes to the same bits.

    python benchmarks/killed_sweep.py --at 0.3 0.6 0.9

An instant is a share of the time of the uninterrupted sweep. For each of them the sweep is begun anew, killed, and
continued to its end by the same command. Then metrics (without seconds), client tables and the arrays of the last
checkpoints are compared with those of the uninterrupted sweep, byte for byte.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

SWEEP = """
config = "{config}"
overrides = ["training.rounds=30", "run.eval_every=10", "run.checkpoint_every=5", "participation.ratio=0.5"]
[grid]
method.name = ["fedrep", "fedprox"]
training.lr = [0.02, 0.05]
run.seed = [0, 1, 2]
"""
QUICKSTART = Path(__file__).resolve().parent.parent / "configs" / "quickstart.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", type=float, nargs="+", default=[0.3, 0.6, 0.9], help="shares of the sweep's time")
    instants = parser.parse_args().at
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sweep.toml"
        file.write_text(SWEEP.format(config=QUICKSTART))
        whole, failed = Path(folder) / "whole", False
        run(file, Path(folder) / "first")  # which compiles for all
        began = time.perf_counter()
        run(file, whole)
        seconds = time.perf_counter() - began
        print(f"uninterrupted: {seconds:.0f} s")
        expected = contents(whole)
        assert len(expected) == 12
        for at in instants:
            killed = Path(folder) / f"killed_{at}"
            if not run(file, killed, kill_after=at * seconds):
                print(f"ended before {at * seconds:.0f} s: not killed")
                failed = True
                continue
            done = len(list(killed.glob("*/summary.json")))
            newest = sorted(newest_round(folder) for folder in killed.glob("*/"))
            print(f"killed after {at * seconds:.0f} s: {done} of 12 complete, newest checkpoints after rounds {newest}")
            run(file, killed)
            found = contents(killed)
            differing = [name for name in expected if found.get(name) != expected[name]]
            print("all twelve runs equal, byte for byte" if not differing else f"differing: {', '.join(differing)}")
            failed |= bool(differing)
        sys.exit(failed)


def run(file: Path, out: Path, kill_after: float | None = None) -> bool:
    """Runs the command to its end, or kills it after some seconds; returns whether it was killed."""
    command = [sys.executable, "-c", "from fedjax_pfl.cli.commands import main; main()"]
    process = subprocess.Popen([*command, "sweep", str(file), "--out", str(out), "--quiet"], stdout=subprocess.DEVNULL)
    try:
        process.wait(kill_after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return True
    assert process.returncode == 0, process.returncode
    return False


def newest_round(folder: Path) -> int:
    """The round of the newest complete checkpoint; the kill may have left a part of another."""
    names = [step.name for step in (folder / "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def contents(out: Path) -> dict[str, tuple]:
    """Run -> everything that must not depend on an interruption."""
    found = {}
    for folder in sorted(path for path in out.glob("*/") if (path / "summary.json").exists()):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        metrics = json.dumps([{key: value for key, value in line.items() if key != "seconds"} for line in lines])
        newest = newest_round(folder)
        arrays = ocp.StandardCheckpointer().restore((folder / "checkpoints" / str(newest) / "run").absolute())
        state = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(arrays)]
        found[folder.name] = metrics, (folder / "clients.csv").read_text(), newest, tuple(state)
    return found


if __name__ == "__main__":
    main()
