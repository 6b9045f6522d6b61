"""Draws the pictures beside it anew, from runs on digits: ``python docs/assets/draw.py``, a minute on two cores.

``report.png`` is a photograph of a report in Chromium, which must be installed.
"""

import contextlib
import io
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

from fedjax_pfl import Config, Result, compare, plot_clients, plot_partition
from fedjax_pfl.experiment.report import report

HERE = Path(__file__).resolve().parent
CONFIG = Config(
    data={"source": "digits", "clients": 10, "partition": {"kind": "dirichlet", "beta": 0.3}},
    model={"name": "mlp"},
    method={"name": "fedavg"},
    training={"rounds": 10, "lr": 0.05},
    run={"eval_every": 1},
)


def main() -> None:
    """Runs three methods with three seeds, and draws them."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        found = compare(CONFIG, ["local", "fedavg", "fedrep"], seeds=range(3), out="runs", progress=print)
        partition = Result.load("runs/fedavg-seed0").partition
        photograph("runs")
    drawn = {"curves": found.plot(), "clients": plot_clients(found), "partition": plot_partition(partition)}
    for name, ax in drawn.items():
        picture = io.BytesIO()
        ax.figure.savefig(picture, dpi=250)
        keep(Image.open(picture), name, colours=64)


def photograph(runs: str) -> None:
    """Opens a report of runs in a browser, and takes a picture of its upper part."""
    report([runs], "report.html")
    page, light = Path("report.html").absolute().as_uri(), "--blink-settings=preferredColorScheme=1"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1400,1800", light]
    subprocess.run(["chromium", *options, "--user-data-dir=profile", "--screenshot=report.png", page], check=True)
    keep(Image.open("report.png"), "report", colours=256)


def keep(picture: Image.Image, name: str, *, colours: int) -> None:
    """Writes a picture beside this file; of few colours, a palette is a quarter of the size."""
    picture.convert("RGB").quantize(colours).save(HERE / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
