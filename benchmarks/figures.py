"""Draws figures of the papers: ``FEDJAX_PFL_DATA=FOLDER python benchmarks/figures.py [NAME...]``, all unless named.

``FOLDER`` holds cifar10_20k.npz. The pictures are written to ``docs/assets/figures``; docs/figures.md explains them.
With ``--work FOLDER2``, runs are kept there and not repeated. Runs are short, with one seed and a sixth of the paper's
images: they show the form of a picture, and do not rank methods. Curves, and the bars of PGFedSplit's Fig. 4, come from
the recorded runs in ``results/``.
"""

import argparse
import hashlib
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from fedjax_pfl import Result, load_config, plot_attention, plot_confusion, plot_features, plot_partition, simulate
from fedjax_pfl.data.augment import apply_transform, five_operations
from fedjax_pfl.data.sources import load
from fedjax_pfl.experiment.build import deal
from fedjax_pfl.experiment.plots.style import COLUMN, legend_above, line_style, look, make_room

ROOT = Path(__file__).resolve().parent.parent
CONFIGS, RESULTS, PICTURES = ROOT / "configs", ROOT / "benchmarks" / "results", ROOT / "docs" / "assets" / "figures"
SHORT = ("training.rounds=10", "run.eval_every=10", "data.samples_per_client=100")
EXPORT = 'run.export=["features","predictions"]'
CIFAR = "npz:cifar10_20k.npz"


class Runs:
    """Runs by their configs; each is run once."""

    def __init__(self, work: Path) -> None:
        self.work = work

    def __call__(self, file: str, changes: Sequence[str]) -> Result:
        """A run of a config with changes."""
        config = load_config(CONFIGS / f"{file}.toml", [*changes])
        out = self.work / hashlib.sha256(config.to_toml().encode()).hexdigest()[:12]
        if (out / "summary.json").exists():
            return Result.load(out)
        return simulate(config.replace({"run.out": str(out)}), overwrite=True, progress=print)

    def fedecouple(self, partition: str, *changes: str) -> Result:
        """A short run on CIFAR-10 in the setting of Table II, with other clients and smaller batches."""
        given = [*SHORT, EXPORT, "training.batch_size=10", f"data.partition={partition}", *changes]
        return self("fedecouple/table2_weak_pathological", given)


WEAK, DIRICHLET = '{kind="weak_pathological",s=20,style="fedpac"}', '{kind="dirichlet",beta=5.0}'
FEDREP = ("method.name=fedrep", "method.head_epochs=5")
ANCHORS = ("method.frozen_head_epochs=0", "method.teacher=off", "training.copies=none")


def fedecouple_fig4(runs: Runs) -> Figure:
    """Grad-CAM under the global and under a personal head, of the first test image of six classes of client 0."""
    run = runs.fedecouple(WEAK)
    own = run.exported["client"] == 0
    samples, labels = run.exported["sample"][own], run.exported["label"][own]
    classes, first = np.unique(labels, return_index=True)
    images, asked = load(CIFAR).images[samples[first[:6]]], classes[:6]
    figure, (above, middle, below) = side_by_side(3, 1, height=2.2)
    for number, image in enumerate(images):
        above.imshow(image, extent=(1.06 * number, 1.06 * number + 1, 1, 0))
    above.set(xlim=(0, 1.06 * len(images) - 0.06), ylim=(1, 0), xticks=[], yticks=[], ylabel="image", aspect="equal")
    above.spines[:].set_visible(False)
    plot_attention(run, images, None, asked, ax=middle).set(xlabel="", xticks=[], ylabel="global")
    plot_attention(run, images, 0, asked, ax=below).set(ylabel="personal")
    return figure


def fedecouple_fig5_fig10(runs: Runs) -> Figure:
    """t-SNE of the test images' features of all clients."""
    drawn = {
        "FedRep": runs.fedecouple(DIRICHLET, *FEDREP),
        "anchors alone": runs.fedecouple(DIRICHLET, *ANCHORS),
        "FedeCouple": runs.fedecouple(DIRICHLET),
    }
    figure, panels = side_by_side(1, 3, height=2.3)
    for ax, (name, run) in zip(panels, drawn.items(), strict=True):
        plot_features(run, ax=ax).set(title=name)
    return figure


def fedecouple_fig7(runs: Runs) -> Figure:
    """An image, and nine copies by the five operations of section IV-D."""
    image = jnp.asarray(load(CIFAR).images[:1])
    copies = apply_transform(five_operations(jax.random.split(jax.random.key(0), 9)), jnp.repeat(image, 9, axis=0))
    figure, (ax,) = side_by_side(1, 1, height=0.8)
    ax.imshow(np.concatenate([*image, *copies], axis=1))
    ax.set(xticks=np.arange(10) * 32 + 16, xticklabels=["image", *["copy"] * 9], yticks=[])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return figure


def fedecouple_fig8(runs: Runs) -> Figure:
    """The samples of each client in the three settings."""
    settings = {
        "weak pathological, s = 20": "table2_weak_pathological",
        "Dir(0.1)": "table4_dirichlet",
        "pathological, 3 classes": "table3_pathological",
    }
    return partitions({name: (f"fedecouple/{file}", []) for name, file in settings.items()})


def fedecouple_fig9(runs: Runs) -> Figure:
    """The confusion of classes over the test images of all clients."""
    figure, panels = side_by_side(1, 2, height=2.6)
    for ax, (name, changes) in zip(panels, {"FedRep": FEDREP, "FedeCouple": ()}.items(), strict=True):
        plot_confusion(runs.fedecouple(WEAK, *changes), ax=ax).set(title=name)
    return figure


def fedfcd_fig3(runs: Runs) -> Figure:
    """The samples of each client at two values of beta."""
    kind = 'data.partition={{kind="dirichlet",beta={},style="pfllib"}}'
    source = f"data.source={CIFAR}"
    return partitions({f"Dir({beta})": ("fedfcd/table1_accuracy", [kind.format(beta), source]) for beta in (0.1, 1.0)})


def fedfcd_fig6_fig7(runs: Runs) -> Figure:
    """PRE over rounds for several learning rates of the server, and for several lambda."""
    figure, (left, right) = side_by_side(1, 2, height=2.2)
    rates = ("0.001", "0.005", "0.01", "0.05", "0.1", "0.5")
    curves("fedfcd_fig6_mlp", left, {f"lr_{rate.replace('.', '_')}": f"rate {rate}" for rate in rates})
    curves("fedfcd_fig7_mlp", right, {f"lam_{lam}": f"lambda {lam}" for lam in (0, 1, 2, 4, 5, 10)})
    return figure


def fedcpd_fig2(runs: Runs) -> Figure:
    """PRE and POST over rounds of FedAvg with terms of FedCPD, and the same on FedRep (the runs of Table 3)."""
    terms = {"none": "none", "fd": "fd", "pcl": "pcl", "align": "align", "align_pcl": "align + pcl"}
    figure, panels = side_by_side(2, 2, height=4.0)
    for (name, base), column in zip((("fedcpd_fig2", "FedAvg"), ("fedcpd_table3", "FedRep")), panels.T, strict=True):
        for point, ax in zip(("pre", "post"), column, strict=True):
            curves(name, ax, terms, point=point)
            ax.set_ylabel(f"{base}: {ax.get_ylabel()}")
    return figure


def pgfedsplit_fig1_fig2(runs: Runs) -> Figure:
    """PRE over rounds for several fixed alpha, with heads mixed in every round, and every 20 rounds."""
    figure, panels = side_by_side(1, 2, height=2.2)
    alphas = {f"alpha_{alpha.replace('.', '_')}": f"alpha {alpha}" for alpha in ("0.0", "0.2", "0.5", "0.8", "1.0")}
    for ax, interval in zip(panels, (1, 20), strict=True):
        curves("pgfedsplit_fig1_2_mlp", ax, alphas, setting=f"interval_{interval}")
        ax.set_title("in every round" if interval == 1 else f"every {interval} rounds", loc="left", pad=40)
    return figure


def pgfedsplit_fig5(runs: Runs) -> Figure:
    """PRE over rounds with parts of the method off."""
    figure, (ax,) = side_by_side(1, 1, height=2.2)
    parts = {"without_both": "without both", "without_gau": "without GAU", "without_apa": "without APA"}
    curves("pgfedsplit_fig5", ax, {**parts, "pgfedsplit": "PGFedSplit"})
    return figure


def pgfedsplit_fig4(runs: Runs) -> Figure:
    """What the client with the most classes holds, and its accuracy on equally many images of each (`balanced.py`)."""
    found = json.loads((RESULTS / "pgfedsplit_fig4_fashion_mnist.json").read_text())
    counts = np.array(found["training_images"])
    client, classes = int((counts > 0).sum(axis=1).argmax()), np.arange(counts.shape[1])
    figure, (left, right) = side_by_side(1, 2, height=2.2)
    left.bar_label(left.bar(classes, counts[client], color="0.5"), fontsize="x-small")
    left.set(xlabel="class", ylabel=f"training images of client {client}", xticks=classes, yscale="symlog")
    for number, name in enumerate(("PGFedSplit", "PGFedSplit, own heads")):
        accuracy = found["accuracy"][name][client]
        right.bar(classes + 0.4 * number - 0.2, accuracy, 0.4, color=line_style(number)["color"], label=name)
    right.set(xlabel="class", ylabel="PRE accuracy (%)", xticks=classes)
    legend_above(right, right.get_legend_handles_labels()[0])
    return figure


LONG = {
    "FedeCouple, Table II, s = 20": ("fedecouple_table2", "cifar10_s20", ("fedrep", "fedecouple")),
    "FedFCD, Table 1, Dir(0.1)": ("fedfcd_table1", "fmnist_dir01", ("fedrep", "fedfcd")),
    "PGFedSplit, Table 3": ("pgfedsplit_table3_third", "cifar100", ("fedrep", "pgfedsplit")),
    "FedCPD, Table 3": ("fedcpd_table3_200_rounds", "cifar100_dir01", ("none", "all")),
    "pFedCSPC, Table II": ("pfedcspc_table2_100_rounds", "cifar10", ("fedrep", "pfedcspc")),
}
"""Tables that have been run as long as in the papers: file, setting, and the rows of FedRep and of the method."""


def full_length(runs: Runs) -> Figure:
    """PRE over the rounds of these tables, the mean over the seeds of a row; a mark if only one round was scored."""
    figure, panels = side_by_side(2, 3, height=4.2)
    *panels, beside = panels.ravel()
    for ax, (title, (name, setting, (fedrep, method))) in zip(panels, LONG.items(), strict=True):
        rows = {
            "Local": "local",
            "FedAvg with fine-tuning": "fedavg_ft",
            "FedRep": fedrep,
            "the method without collaboration": "alone",
            "the method": method,
        }
        cells, shown = json.loads((RESULTS / f"{name}.json").read_text())["cells"], []
        for number, (label, row) in enumerate(rows.items()):
            found = [cell["curve"] for cell in cells if (cell["setting"], cell["row"]) == (setting, row)]
            rounds = found[0]["round"] if found else []
            accuracy = 100 * np.mean([curve["pre"] for curve in found], axis=0) if found else []
            ax.plot(rounds, accuracy, label=label, markevery=max(1, len(rounds) // 8), **line_style(number))
            shown.extend(accuracy)
        ax.grid(visible=True)
        lowest, highest = np.quantile(shown, (0.02, 1.0))  # the first rounds would leave no room to the others
        margin = 0.05 * (highest - lowest)
        ax.set(xlabel="round", ylabel="PRE accuracy (%)", ylim=(lowest - margin, highest + margin))
        ax.set_title(title, loc="left")
    beside.set_axis_off()
    beside.legend(handles=panels[0].get_legend_handles_labels()[0], loc="center left", frameon=False, handlelength=2.6)
    return figure


def partitions(settings: dict[str, tuple[str, list[str]]]) -> Figure:
    """Bubbles side by side, for configs with changes, by title."""
    figure, panels = side_by_side(1, len(settings), height=2.3)
    for ax, (title, (file, changes)) in zip(panels, settings.items(), strict=True):
        config = load_config(CONFIGS / f"{file}.toml", changes)
        plot_partition(deal(config, load(config.data.source))[1], ax=ax)
        ax.set_title(title, loc="left", pad=28)
    return figure


def curves(name: str, ax: Axes, rows: dict[str, str], *, setting: str | None = None, point: str = "pre") -> None:
    """The mean over the seeds of each of these rows, by its label, from a file of ``results/`` (and one setting)."""
    cells = json.loads((RESULTS / f"{name}.json").read_text())["cells"]
    for number, (row, label) in enumerate(rows.items()):
        found = [cell["curve"] for cell in cells if cell["row"] == row and setting in (None, cell["setting"])]
        rounds, accuracy = found[0]["round"], 100 * np.mean([curve[point] for curve in found], axis=0)
        ax.plot(rounds, accuracy, label=label, **line_style(number))
        ax.set_xticks(rounds)
    ax.grid(visible=True)
    ax.set(xlabel="round", ylabel=f"{point.upper()} accuracy (%)")
    legend_above(ax, ax.get_legend_handles_labels()[0])


def side_by_side(rows: int, columns: int, height: float) -> tuple[Figure, Sequence[Axes]]:
    """A figure with panels, each a column wide."""
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(COLUMN * columns**0.75, height), layout="constrained", squeeze=False
    )
    return figure, panels if min(rows, columns) > 1 else panels.ravel()


FIGURES = {
    draw.__name__: draw
    for draw in (
        fedecouple_fig4,
        fedecouple_fig5_fig10,
        fedecouple_fig7,
        fedecouple_fig8,
        fedecouple_fig9,
        fedfcd_fig3,
        fedfcd_fig6_fig7,
        fedcpd_fig2,
        full_length,
        pgfedsplit_fig1_fig2,
        pgfedsplit_fig4,
        pgfedsplit_fig5,
    )
}


def main() -> None:
    """Draws the named figures, and writes them with a palette, which makes files a quarter of the size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)}; all unless given")
    parser.add_argument("--work", type=Path, help="a folder for the runs; a temporary one unless given")
    chosen = parser.parse_args()
    for name in chosen.names:
        if name not in FIGURES:
            parser.error(f"there is no figure {name}")
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        runs = Runs(chosen.work or Path(temporary))
        for name in chosen.names or FIGURES:
            with look():
                figure = FIGURES[name](runs)
                make_room(figure.axes[0])
                picture = io.BytesIO()
                figure.savefig(picture, dpi=200)
            Image.open(picture).convert("RGB").quantize(128).save(PICTURES / f"{name}.png", optimize=True)
            pyplot.close(figure)
            print(f"written to {PICTURES / f'{name}.png'}")


if __name__ == "__main__":
    main()
