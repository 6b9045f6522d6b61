"""Statistics over seeds, and tables in Markdown."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

NONE = "—"


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
