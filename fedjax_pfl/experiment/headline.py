"""The main results of runs in a few words: for the command line, notebooks, and the `repr` of results."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_pfl.data.dealing import counted
from fedjax_pfl.experiment.summary import POINTS
from fedjax_pfl.experiment.tables import NONE, Cell, decimals, grouped, show

_COLUMNS = {
    "last": "last",
    "best": "best",
    "by_validation": "by validation",
    "mean_last_10": "mean of last 10",
    "weighted_last": "weighted",
    "weighted_best": "best weighted",
    "std_clients": "std of clients",
    "worst_10_percent": "worst 10 %",
}
_CAPTION = (
    "Accuracy in %. PRE: after aggregation; POST: after local training; *: the point at which the method is judged.\n"
    "best is selected on {evaluated_on} data; weighted: by the clients' samples, as PFLlib does."
)


def title(summary: Mapping[str, Any]) -> str:
    """One line that describes the run."""
    clients, rounds = counted(summary["clients"], "client"), counted(summary["rounds"], "round")
    return f"{summary['method']} on {summary['dataset']}, {clients}, {rounds}"


def table(summary: Mapping[str, Any]) -> list[list[str]]:
    """The accuracies of the personal models in %: a row of headings, then PRE and POST."""
    pre = summary["personal"]["pre"]
    # None without validation samples. Summaries of version 0.1 have fewer entries.
    names = [name for name in _COLUMNS if name in pre and (name != "by_validation" or pre[name] is not None)]
    rows = [["", *(_COLUMNS[name] for name in names)]]
    for point in POINTS:
        mark = " *" if point == summary["headline"] else ""
        rows.append([point.upper() + mark, *(_percent(summary["personal"][point][name]) for name in names)])
    return rows


def caption(summary: Mapping[str, Any]) -> str:
    """The caption of the table."""
    return _CAPTION.format(**summary)


def remarks(summary: Mapping[str, Any]) -> list[str]:
    """Further remarks on a run, line by line; the cost comes last."""
    said = []
    if "stopped" in summary:
        said.append(f"ended early: {summary['stopped']}")
    if guess := summary.get("majority_class"):  # summaries of version 0.1 have none
        said.append(f"always answering the class that a client has most of: {_percent(guess['accuracy'])} %")
    if summary["new_clients"] is not None:
        scores = _at_points(summary["new_clients"], "last")
        said.append(f"new clients, which never trained: {scores}")
    if summary["global"] is not None:
        said.append(f"global model on the pooled {summary['evaluated_on']} set: {_percent(summary['global'])} %")
        scores = _at_points(summary["personal"], "hm_last")
        said.append(f"harmonic mean of it and I_local (accuracy and macro-F1 of the clients): {scores}")
    if summary.get("diverged_round") is not None:
        said.append(
            f"diverged: from round {summary['diverged_round']} on, logits are NaN or infinite, which count as wrong; "
            "try a smaller training.lr"
        )
    timing, sent = summary["timing"], summary["traffic"]["megabytes_total"]
    said.append(
        f"{timing['seconds_per_round']:.3f} s per round, {timing['compile_seconds']:.1f} s compilation, "
        f"{timing['total_seconds']:.1f} s in all; {sent:.{decimals(sent)}f} MB exchanged"
    )
    return said


def run_in_short(summary: Mapping[str, Any]) -> str:
    """A run in two lines."""
    scores = [
        f"{point.upper()} {_percent(of['last'])} % (best {_percent(of['best'])} %)"
        for point, of in ((point, summary["personal"][point]) for point in POINTS)
    ]
    if summary["global"] is not None:
        scores.append(f"global {_percent(summary['global'])} %")
    if summary.get("diverged_round") is not None:
        scores.append(f"diverged in round {summary['diverged_round']}")
    return f"{title(summary)}, seed {summary['seed']}\n  {', '.join(scores)}"


def notes(of: Mapping[str, Any]) -> list[str]:
    """What is to be known of the data of a summary or partition, line by line."""
    return [f"note: {note}" for note in of.get("notes", ())]  # version 0.1 may have none


def runs_in_short(kind: str, cells: Sequence[Cell], point: str) -> str:
    """Many runs in two lines: their number, and the best one at an evaluation point within each data setting."""
    groups = [group for group in grouped(cells) if group.by_seed(point)]
    failed = sum(cell.summary is None for cell in cells)
    best = []
    for setting in dict.fromkeys(group.setting for group in groups):
        first = max((group for group in groups if group.setting == setting), key=lambda group: group.mean(point))
        best.append(f"{show(first.values) or 'all'} {_percent(first.mean(point))} %")
    runs = counted(len(cells), "run") + (f", {failed} failed" if failed else "")
    return f"{kind} of {runs}\n  highest mean {point.upper()}: {'; '.join(best) or NONE}"


def _at_points(scores: Mapping[str, Any], name: str) -> str:
    return ", ".join(f"{point.upper()} {_percent(scores[point][name])}" for point in POINTS)


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.2f}"
