"""Draws the pictures beside it anew, from runs on digits: ``python docs/assets/draw.py``, a minute on two cores.

``report.png`` and ``site.png`` are photographs of a report and of a page of the site, which take Chromium and mkdocs.
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
HOME = HERE.parent.parent
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
        report(["runs"], "report.html")
        photograph("report.html", "report", height=1800, colours=256)
        subprocess.run(
            ["mkdocs", "build", "--quiet", "--config-file", HOME / "mkdocs.yml", "--site-dir", Path("site").absolute()],
            check=True,
        )
        photograph("site/methods/fedrep.html", "site", height=1000, colours=64)
    drawn = {"curves": found.plot(), "clients": plot_clients(found), "partition": plot_partition(partition)}
    for name, ax in drawn.items():
        picture = io.BytesIO()
        ax.figure.savefig(picture, dpi=250)
        keep(Image.open(picture), name, colours=64)


def photograph(page: str, name: str, *, height: int, colours: int) -> None:
    """Opens a page in a browser, and takes a picture of its upper part."""
    light = "--blink-settings=preferredColorScheme=1"
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size=1400,{height}",
        light,
    ]
    options += ["--user-data-dir=profile", f"--screenshot={name}.png"]
    subprocess.run(["chromium", *options, Path(page).absolute().as_uri()], check=True)
    keep(Image.open(f"{name}.png"), name, colours=colours)


def keep(picture: Image.Image, name: str, *, colours: int) -> None:
    """Writes a picture beside this file; of few colours, a palette is a quarter of the size."""
    picture.convert("RGB").quantize(colours).save(HERE / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
