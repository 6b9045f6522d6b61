"""Statistics over seeds, and tables in Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

NONE = "—"


def figures_of(summary: Mapping[str, Any]) -> dict[str, float]:
    """The figures of one run that tables show, from its summary.

    Returns:
      ``headline``, the accuracy that the method is judged by, ``pre`` and ``post``, all after the last round; ``best``,
      ``std_clients`` and ``worst_10_percent`` of the headline's point; ``global``, NaN without a global model.
      Accuracies lie in [0, 1]. ``megabytes`` in all, ``seconds_per_round``.
    """
    headline, personal = summary["headline"], summary["personal"]
    judged = personal[headline]
    return {
        "headline": judged["last"],
        "pre": personal["pre"]["last"],
        "post": personal["post"]["last"],
        "best": judged["best"],
        "std_clients": judged["std_clients"],
        "worst_10_percent": judged["worst_10_percent"],
        "global": float("nan") if summary["global"] is None else summary["global"],
        "megabytes": summary["traffic"]["megabytes_total"],
        "seconds_per_round": summary["timing"]["seconds_per_round"],
    }


def paired_p(first: Mapping[int, float], second: Mapping[int, float]) -> float | None:
    """p-value of a two-sided paired t-test over the seeds that both have.

    Returns:
      None with fewer than two such seeds, and where all differences are the same: there is no spread to judge by.
    """
    from scipy import stats  # half a second

    differences = np.array([first[seed] - second[seed] for seed in first if seed in second])
    if len(differences) < 2 or np.ptp(differences) < 1e-12:
        return None
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def mean_and_spread(values: Sequence[float], digits: int = 2) -> str:
    """The mean, with the sample standard deviation if there are two values or more; a dash without any."""
    if not len(values):
        return NONE
    spread = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{spread}"


def grid(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    marks = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, marks, *rows))
