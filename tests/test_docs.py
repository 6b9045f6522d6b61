"""The code in the documents runs as it stands there."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"


def blocks(page):
    """The Python of a page, in its order."""
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S)


def test_the_page_about_own_parts_runs(capsys, tmp_path, monkeypatch, tables_as_before):
    for package in ("pandas", "optuna"):
        pytest.importorskip(package, reason=f"the package {package} is not installed")
    (tmp_path / "configs").symlink_to(DOCS.parent / "configs")
    monkeypatch.chdir(tmp_path)
    page = {}
    for code in blocks("own_parts.md"):
        exec(compile(code, "own_parts.md", "exec"), page)
    shown = capsys.readouterr().out
    result, best = page["best"].result, page["best"]
    # Stopped, and not by chance the last round: five evaluations after the best one at the latest.
    assert result.summary["stopped"].startswith("no better accuracy on validation samples in 5")
    assert best.round == result.summary["rounds"] - 5
    assert best.value == result.history["validation_pre.accuracy"].max()
    assert (page["newcomer"].predict(page["x"][540:]) == page["labels"][540:]).mean() > 0.85
    assert result.history["pre.accuracy"][-1] > 0.85
    assert r"slow\_fedavg & " in shown
    assert len(page["study"].trials) == 4
    assert page["result"].config.training.lr == page["study"].best_params["training.lr"]
    assert "a new hospital: 0." in shown
