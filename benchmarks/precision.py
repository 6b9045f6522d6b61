"""The effect of an accelerator's products in lower precision on accuracy, measured on a CPU.

    python benchmarks/precision.py --json benchmarks/results/precision.json

``tensorfloat32`` keeps 10 bits of a factor's mantissa, ``bfloat16`` 7, and float32 23; all of them add the products up
in float32. A CPU has only float32. Here it rounds the operands of every matrix product and every convolution as
``run.precision`` would, in training and evaluation, forward and backward, except where the code asks for full
precision. Convolutions are computed directly and not at roots of unity, which no accelerator does either.

20 clients, digits under Dir(0.3), ``cnn_digits``, batches of 10.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src.interpreters import mlir
from jax._src.lib.mlir.dialects import hlo
from scipy import stats

from fedjax_pfl import Config, compare
from fedjax_pfl.experiment.process import prepare
from fedjax_pfl.experiment.sections import Run
from fedjax_pfl.models import conv

METHODS = ("fedavg", "ditto", "fedrep", "fedpac", "fedecouple")
SEEDS = (0, 1, 2)
PRECISIONS = ("float32", "tensorfloat32", "bfloat16")
_MANTISSA = {lax.Precision.DEFAULT: 7, lax.Precision.HIGH: 10}


def round_operands() -> None:
    """Makes a CPU round the operands of products as the program's precision requires."""
    for primitive in (lax.dot_general_p, lax.conv_general_dilated_p):
        entry = mlir._platform_specific_lowerings["cpu"].get(primitive) or mlir._lowerings[primitive]
        mlir.register_lowering(primitive, _rounding(entry.rule), platform="cpu")


def _rounding(rule: Callable) -> Callable:
    def lower(context: Any, *operands: Any, precision: Any, **parameters: Any) -> Any:
        asked = precision[0] if isinstance(precision, tuple) else precision
        if asked in _MANTISSA:
            operands = tuple(hlo.reduce_precision(operand, 8, _MANTISSA[asked]) for operand in operands)
        return rule(context, *operands, precision=precision, **parameters)

    return lower


def config(precision: str, rounds: int) -> Config:
    """The setting under one precision."""
    return Config(
        data={
            "source": "digits",
            "clients": 20,
            "partition": {"kind": "dirichlet", "beta": 0.3},
        },
        model={"name": "cnn_digits"},
        method={"name": "fedavg"},
        training={"rounds": rounds, "batch_size": 10, "lr": 0.05},
        run={"precision": precision, "eval_every": rounds, "compilation_cache": "off"},
    )


def main() -> None:
    """Prints the accuracies of each method and precision, and the changes by the precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    prepare(Run(compilation_cache="off"))
    round_operands()
    conv.is_faster_than_direct = lambda *_: False
    rows = []
    for precision in PRECISIONS:
        table = compare(config(precision, options.rounds), METHODS, seeds=SEEDS)
        for cell in table.cells:
            personal = cell.summary["personal"]
            accuracies = {point: 100 * personal[point]["last"] for point in ("pre", "post")}
            rows.append({"method": cell.method, "precision": precision, "seed": cell.seed, **accuracies})
        if options.json:
            head = json.dumps({"rounds": options.rounds, "jax": jax.__version__})[:-1]
            lines = ",\n".join(f" {json.dumps(row)}" for row in rows)
            options.json.write_text(f'{head}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
    for method in METHODS:
        for point in ("pre", "post"):
            found = {
                precision: np.array(
                    [row[point] for row in rows if (row["method"], row["precision"]) == (method, precision)]
                )
                for precision in PRECISIONS
            }
            parts = [f"float32 {found['float32'].mean():.2f}"]
            for precision in PRECISIONS[1:]:
                apart = found[precision] - found["float32"]
                reach = stats.t.ppf(0.975, len(apart) - 1) * apart.std(ddof=1) / np.sqrt(len(apart))
                parts.append(
                    f"{precision} {apart.mean():+.2f} [{apart.mean() - reach:+.2f}, {apart.mean() + reach:+.2f}]"
                )
            print(f"{method:12} {point:5} {', '.join(parts)}")


if __name__ == "__main__":
    main()
