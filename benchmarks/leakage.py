"""What an upload reveals: gradient inversion of five methods, after FedeCouple's Fig. 14.

    python benchmarks/leakage.py --json benchmarks/results/leakage.json --png docs/assets/leakage.png

The source is an npz file of Fashion-MNIST in the folder that FEDJAX_PFL_DATA names. There are eight images for each of
three seeds, which draw images, model and starting points. Each image is the whole batch of a client in round 0. The
network is that of DLG (Zhu et al., NeurIPS 2019): three 5x5 convolutions of 12 channels, strides 2, 2, 1, sigmoid.
Methods have their defaults, and the attack is the same for all.
"""

import argparse
import io
import json
import time
from pathlib import Path

import flax.linen as nn
import numpy as np
from jaxtyping import Array
from PIL import Image
from scipy import stats

from fedjax_pfl import Config, leakage, plot_leakage, register_model
from fedjax_pfl.data.sources import load

METHODS = ("fedavg", "fedper", "fedpac", "fedproto", "fedecouple")
SEEDS = (0, 1, 2)
TARGETS = 8


class LeNet(nn.Module):
    """DLG's network up to its last layer; the features are the 588 values of the last map."""

    @nn.compact
    def __call__(self, x: Array, mask: Array | None = None) -> tuple[Array, tuple]:
        """Returns features [batch, 588] and no maps."""
        del mask
        # Wide enough that three sigmoids do not flatten an image out.
        kernel = nn.initializers.variance_scaling(3.0, "fan_in", "uniform")
        for stride in (2, 2, 1):
            x = nn.sigmoid(nn.Conv(12, (5, 5), (stride, stride), ((2, 2), (2, 2)), kernel_init=kernel)(x))
        return x.reshape(len(x), -1), ()


@register_model("dlg_lenet")
def dlg_lenet(*, init: str = "torch") -> LeNet:
    """DLG's network; ``init`` is the initialisation of its head."""
    return LeNet()


def main() -> None:
    """Attacks each method, prints a table, and writes the numbers and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="npz:fashion_mnist_70k.npz")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--tv", type=float, default=1e-4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    dataset, rows, drawn = load(options.source), [], {}
    for seed in SEEDS:
        chosen = np.random.default_rng(seed).choice(len(dataset.labels), TARGETS, replace=False)
        x, y = dataset.images[chosen], dataset.labels[chosen]
        for method in METHODS:
            config = Config(
                data={"source": options.source, "clients": 20, "partition": {"kind": "dirichlet", "beta": 0.1}},
                model={"name": "dlg_lenet"},
                method={"name": method},
                training={"rounds": 1, "lr": 0.1},
                run={"seed": seed},
            )
            began = time.perf_counter()
            found = leakage(config, x, y, steps=options.steps, tv=options.tv, seed=seed)
            rows.append(
                {
                    "method": method,
                    "seed": seed,
                    "psnr": found.psnr.tolist(),
                    "loss": found.loss.tolist(),
                    "labels_found": int(np.sum(found.found == found.labels)),
                    "arrays": list(found.uploaded),
                    "seconds": round(time.perf_counter() - began, 1),
                }
            )
            print(f"{method:12} seed {seed}: {np.mean(found.psnr):5.1f} dB, {rows[-1]['seconds']} s", flush=True)
            if seed == SEEDS[0]:
                drawn[method] = found
    means = {method: [np.mean(row["psnr"]) for row in rows if row["method"] == method] for method in METHODS}
    for method, values in means.items():
        half = stats.t.ppf(0.975, len(SEEDS) - 1) * np.std(values, ddof=1) / len(SEEDS) ** 0.5
        print(f"| {method} | {np.mean(values):.1f} +- {half:.1f} |")
    if options.json:
        settings = {"source": options.source, "steps": options.steps, "tv": options.tv, "targets": TARGETS}
        options.json.write_text(json.dumps({**settings, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    if options.png:
        picture = io.BytesIO()
        plot_leakage(drawn).figure.savefig(picture, dpi=250)
        Image.open(picture).convert("L").quantize(16).save(options.png, optimize=True)


if __name__ == "__main__":
    main()
