"""A table in Markdown, and back."""

from collections.abc import Iterable, Sequence


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right; :func:`entries_of` reads its lines."""
    marks = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(map(as_entry, row))} |" for row in (headings, marks, *rows))


def as_entry(text: str) -> str:
    """A text as it stands in a table: a bar would end its cell."""
    return text.replace("|", r"\|")


def entries_of(line: str) -> list[str]:
    """The texts in a line of :func:`markdown_table`."""
    return [entry.replace(r"\|", "|") for entry in line[2:-2].split(" | ")]
