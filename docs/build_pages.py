"""What of the site is made when it is built: a hook of mkdocs (mkdocs.yml), which needs no network and writes no file.

A page per method, from docstring, schema and ``benchmarks/results``; the config reference, from the schema; the
leaderboard, from the results; notebooks; and of every file of the repository that a page links to, a page of the site.
Pages link as they do in the repository; `Site` turns these links into links of the site.
"""

import functools
import html
import inspect
import json
import posixpath
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import fedjax_pfl
from fedjax_pfl.data.partition import PARTITIONS
from fedjax_pfl.data.sources import SOURCES
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.options import hyperparameters, summary_line
from fedjax_pfl.experiment.protocols import PROTOCOLS
from fedjax_pfl.experiment.schema import config_schema
from fedjax_pfl.experiment.tables import NONE, mean_and_spread
from fedjax_pfl.methods import METHODS
from fedjax_pfl.models import MODELS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.append(str(ROOT / "benchmarks"))

from tables.lines import Line, lines_of  # noqa: E402
from tables.page import diverged, lead, majority  # noqa: E402
from tables.paper import Setting, Table, read_table  # noqa: E402
from tables.store import load_cells  # noqa: E402

Schema = dict[str, Any]
# Code, which has no links; a link and its target; that of a reference; that of a picture in HTML.
LINK = re.compile(
    r"^```.*?^```$|`[^`\n]+`|(\]\()([^)\s]+)(?=\))|(^\[[^]^]+\]: )(\S+)|(<(?:img|a)\s[^>]*?(?:src|href)=\")([^\"]+)",
    re.M | re.S,
)
LANGUAGES = {".py": "python", ".toml": "toml", ".cff": "yaml", ".json": "json", ".yml": "yaml"}
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"


def on_config(config: MkDocsConfig) -> None:
    """Puts the pages that are made here into the navigation, in the places that stand for them in mkdocs.yml."""
    listed = {
        "methods/": [{name: f"methods/{name}.md"} for name in METHODS],
        "notebooks/": [{title: uri} for title, uri in notebook_titles()],
    }
    config.nav = with_lists(config.nav or [], listed)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds all pages that are made here, and turns links into links of the site."""
    site = Site(files, config)
    for name in METHODS:
        site.add(f"methods/{name}.md", method_page(name))
    for file in list(files.documentation_pages()):
        site.resolve(file)
    for notebook in notebooks():
        site.place(notebook)
    return files


def with_lists(nav: Sequence[Any], listed: Mapping[str, Sequence[Any]]) -> list[Any]:
    """A navigation with lists in the places of names; what has nothing in it is left out."""
    found: list[Any] = []
    for entry in nav:
        if isinstance(entry, str) and entry in listed:
            found += listed[entry]
        elif isinstance(entry, dict):
            ((title, inside),) = entry.items()
            inside = with_lists(inside, listed) if isinstance(inside, list) else inside
            found += [{title: inside}] if inside else []
        else:
            found.append(entry)
    return found


class Site:
    """The files of the site, to which those are added that pages link to."""

    def __init__(self, files: Files, config: MkDocsConfig):
        self.files, self.config = files, config

    def add(self, uri: str, text: str) -> File:
        """A page; its links are as they would be in docs/."""
        file = File.generated(self.config, uri, content=text)
        self.files.append(file)
        return file

    def resolve(self, file: File) -> None:
        """Turns the links of a page in docs/."""
        file.content_string = self.linked(
            for_site(file.src_uri, file.content_string), f"docs/{file.src_uri}", file.src_uri
        )

    def linked(self, text: str, path: str, uri: str) -> str:
        """A text that stands at ``path`` in the repository, with the links that it has at ``uri`` in the site."""

        def turned(found: re.Match[str]) -> str:
            if found[0].startswith("`"):
                return found[0]
            before, link = next((found[at], found[at + 1]) for at in (1, 3, 5) if found[at + 1])
            target, hash, anchor = link.partition("#")
            if not target or re.match(r"[a-z]+:", target):
                return found[0]
            at = self.place(posixpath.normpath(posixpath.join(posixpath.dirname(path), target)))
            return before + posixpath.relpath(at, posixpath.dirname(uri) or ".") + hash + anchor

        return LINK.sub(turned, text)

    def place(self, path: str) -> str:
        """Where the site has a file or folder of the repository; it is added if it has not been yet."""
        inside, there = path.removeprefix("docs/"), ROOT / path
        if inside != path and there.suffix != ".py" and self.files.get_file_from_path(inside):
            return inside
        if path == "README.md":
            return "index.md"
        uri = f"files/{path}"
        if there.is_dir():
            uri += "/index.md"
        elif there.suffix == ".ipynb":
            uri = path.removesuffix(".ipynb") + ".md"
        elif there.suffix not in (".md", ".json"):
            uri += ".md"
        if self.files.get_file_from_path(uri) is None:
            if there.suffix == ".json":
                self.files.append(File.generated(self.config, uri, abs_src_path=str(there)))
            else:
                file = self.add(uri, "")
                file.content_string = self.linked(page_of(path), path + "/" * there.is_dir(), uri)
        return uri


def for_site(uri: str, text: str) -> str:
    """A page of docs/ with what only the site has: pages of methods, and docstrings in the place of a table."""
    if uri == "methods.md":
        return re.sub(r"^\| \[`(\w+)`\]\([^)]*\)", r"| [`\1`](methods/\1.md)", text, flags=re.M)
    if uri in MADE:
        return text.replace(HERE, MADE[uri]())
    if uri == "api.md":
        before, _, table = text.partition("<!-- python -m tests.test_api writes what follows -->\n")
        names = re.findall(r"^\| `(\w+)[(:]", table, re.M)
        return before + "\n".join(f"::: {qualified(name)}\n" for name in names if name != "__version__")
    return text


def qualified(name: str) -> str:
    """Where a public name is defined."""
    return f"fedjax_pfl.{fedjax_pfl._HOME[name]}.{name}"


def page_of(path: str) -> str:
    """A file or folder of the repository as Markdown."""
    there = ROOT / path
    if there.is_dir():
        inside = sorted(entry.name for entry in there.iterdir() if entry.suffix in (".py", ".toml"))
        return NOT_SEARCHED + f"# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in inside)
    text = there.read_text(encoding="utf-8")
    if there.suffix == ".md":
        return text
    if there.suffix == ".ipynb":
        return notebook_page(json.loads(text))
    language = LANGUAGES.get(there.suffix, "text")
    return NOT_SEARCHED + f"# {path}\n\n```{language}\n{text.rstrip()}\n```\n"


# Notebooks


def notebooks() -> list[str]:
    """The notebooks of the repository, as paths in it."""
    return [f"notebooks/{path.name}" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]


def notebook_titles() -> Iterator[tuple[str, str]]:
    """Title and page of each notebook."""
    for path in notebooks():
        title = re.search(r"^# (.*)$", notebook_page(json.loads((ROOT / path).read_text(encoding="utf-8"))), re.M)
        yield title[1] if title else Path(path).stem, path.removesuffix(".ipynb") + ".md"


def notebook_page(notebook: Mapping[str, Any]) -> str:
    """A notebook with its outputs as Markdown; a picture that is elsewhere, such as a badge, is its text."""
    parts = []
    for cell in notebook["cells"]:
        source = re.sub(r"!\[([^]]*)\]\(https?:[^)]*\)", r"\1", "".join(cell["source"]))
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [shown for output in cell.get("outputs", ()) if (shown := output_of(output))]
    return "\n\n".join(parts) + "\n"


def output_of(output: Mapping[str, Any]) -> str:
    """An output of a cell: a picture, HTML or text."""
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="output" src="data:image/png;base64,{"".join(data["image/png"].split())}">'
    if "text/html" in data:
        inside = "".join(data["text/html"])
        return "<div>" + re.sub(r"\s*\n\s*", " ", inside) + "</div>"
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f"```text\n{text.rstrip()}\n```" if text.strip() else ""


# Methods


def method_page(name: str) -> str:
    """Docstring, hyperparameters, cost and results of a method."""
    factory = METHODS[name]
    source = Path(inspect.getfile(factory)).resolve().relative_to(ROOT).as_posix()
    text = inspect.getdoc(factory) or ""
    about, reference = (
        re.split(r"^(?:Args|Raises|Reference):$", text, maxsplit=1, flags=re.M)[0],
        section(text, "Reference"),
    )
    parts = [f"# {name}", prose(about), f"Code: [{source}](../../{source}).", "## In a config"]
    given = hyperparameters(factory)
    needed = "".join(f"{option} = ...\n" for option, of in given.items() if of.default is of.empty)
    parts.append(f'```toml\n[method]\nname = "{name}"\n{needed}```')
    options = dict(parts_of(schema()["properties"]["method"], "name"))[name]
    parts.append(options_table(options) if options["properties"] else "It has no hyperparameters of its own.")
    if reference:
        parts += ["## Reference", prose(reference)]
    if cost := cost_of(name):
        parts += ["## What a round costs", cost]
    if found := results_of(name):
        parts += ["## Results in the repository", *found]
    return "\n\n".join(parts) + "\n"


def section(text: str, heading: str) -> str:
    """What a docstring has under a heading."""
    below = re.search(rf"^{heading}:\n((?:  .*\n?|\n)*)", text, re.M)
    return inspect.cleandoc(below[1]) if below else ""


def prose(text: str) -> str:
    """Paragraphs and lists of a docstring, in which nothing but ``code`` is markup, as HTML."""
    found = []
    for block in re.split(r"\n\s*\n", text.strip()):
        items = re.split(r"^- ", block, flags=re.M)
        found.append(f"<p>{inline(items[0])}</p>" if items[0].strip() else "")
        if items[1:]:
            found.append("<ul>" + "".join(f"<li>{inline(item)}</li>" for item in items[1:]) + "</ul>")
    return "\n\n".join(part for part in found if part)


def inline(text: str) -> str:
    """A text of a docstring as HTML."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"``\1``", " ".join(text.split()))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", html.escape(text.replace("``", "`"), quote=False))


def cost_of(name: str) -> str:
    """Time, work and traffic beside FedAvg, as benchmarks/method_costs.py has measured them."""
    measured = json.loads((RESULTS / "method_costs.json").read_text(encoding="utf-8"))["methods"].get(name)
    if measured is None:
        return ""
    rows = [
        ["time of a round, FedAvg = 1", f"{measured['time']:.2f}"],
        ["work of a client, FedAvg = 1", f"{measured['work']:.2f}"],
        *([f"numbers {what}", f"{measured[key]:,}"] for what, key in
          (("sent to a participant", "down"), ("sent by a participant", "up"), ("kept by a client", "kept"))),
    ]  # fmt: skip
    where = "[method_costs.md](../../benchmarks/results/method_costs.md)"
    return (
        f"{table(['', 'measured'], rows)}\n\nOn digits, two CPU cores, the model of configs/all_methods.toml: {where}."
    )


def results_of(name: str) -> list[str]:
    """All runs of a method that benchmarks/results has, a row per table, setting and row of it."""
    rows = []
    for path, held in tables_of_results():
        groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
        for cell in held["cells"]:
            if cell["config"]["method"]["name"] == name:
                key = cell["setting"], cell["row"], cell["config"]["training"]["rounds"]
                groups.setdefault(key, []).append(cell)
        for (setting, row, rounds), cells in groups.items():
            file = f"[{path.stem}](../{shown_in(path)})"
            accuracies = [
                mean_and_spread([100 * c["personal"][point]["last"] for c in cells]) for point in ("pre", "post")
            ]
            rows.append([file, setting, row, str(rounds), str(len(cells)), *accuracies])
    if not rows:
        return []
    about = (
        "Accuracy in % after the last round, unweighted mean over clients, mean over seeds ± sample standard "
        "deviation. Settings differ in data, model and length: read a row beside the others of its own table, which "
        "has the controls, the intervals and the command. A row with one seed orders nothing."
    )
    return [about, sortable(["table", "setting", "row", "rounds", "seeds", "PRE", "POST"], rows)]


def shown_in(path: Path) -> str:
    """The file that a table of results is to be read in, from docs/; until it is whole, there are the figures alone."""
    there = path.with_suffix(".md")
    return f"../benchmarks/results/{there.name if there.exists() else path.name}"


@functools.cache
def tables_of_results() -> list[tuple[Path, dict[str, Any]]]:
    """The files that benchmarks/tables has written, and what they hold."""
    read = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(RESULTS.glob("*.json"))]
    return [(path, held) for path, held in read if "cells" in held and "table" in held]


# Config


def config_tables() -> str:
    """Every section and field, and the options of models, partitions, sources and protocols."""
    parts: list[str] = []
    for name, field in Config.model_fields.items():
        if name not in ("method", "model"):
            parts += [f"## [{name}]", inline(summary_line(field.annotation))]
            parts.append(options_table(schema()["$defs"][name.title()]))
    methods = "Name and hyperparameters: a page for [each method](../methods.md)."
    parts += ["## [method]", methods, "## [model]", "Name and options of the model."]
    parts += described_parts(schema()["properties"]["model"], "name", MODELS)
    parts += ["## data.partition", "Kind and options of the partition."]
    parts += described_parts(schema()["$defs"]["Data"]["properties"]["partition"], "kind", PARTITIONS)
    parts += ["## data.source", "What may stand before and after the colon:"]
    parts.append(table(["source", "what it is"], [[f"`{name}`", inline(text)] for name, (_, text) in SOURCES.items()]))
    names = ", ".join(f"`{name}`" for name in PROTOCOLS)
    parts += ["## protocol", f"One of {names}: [protocols by name](../protocol.md#protocols-by-name) has their values."]
    return "\n\n".join(parts)


@functools.cache
def schema() -> Schema:
    """The JSON schema of a config."""
    return config_schema()


def described_parts(choice: Schema, key: str, parts: Mapping[str, Callable[..., Any]]) -> list[str]:
    """Docstring and options of each model, or partition."""
    found = []
    for name, options in parts_of(choice, key):
        about = re.split(r"^(?:Args|Raises|Returns):$", inspect.getdoc(parts[name]) or "", maxsplit=1, flags=re.M)[0]
        found += [f"### {name}", prose(about)]
        found += [options_table(options)] if options["properties"] else []
    return found


def parts_of(choice: Schema, key: str) -> Iterator[tuple[str, Schema]]:
    """Name and options of what a table of a config can name."""
    for rule in choice["allOf"]:
        if "const" in (named := rule["if"].get("properties", {}).get(key, {})):
            options = {name: of for name, of in rule["then"]["properties"].items() if name != key}
            yield named["const"], {**rule["then"], "properties": options}


def options_table(section: Schema) -> str:
    """A row per field: type, default and meaning."""
    rows = []
    for name, field in section["properties"].items():
        needed = name in section.get("required", ())
        default = (
            "must be given" if needed else f"`{json.dumps(field['default'])}`" if "default" in field else "left out"
        )
        text = inline(field.get("description", ""))
        rows.append([f"`{name}`", type_of(field), default, text])
    return table(["field", "type", "default", "what it is"], rows)


def type_of(field: Schema) -> str:
    """A type of JSON schema in words."""
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    if "pattern" in field:
        return "text"
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(type_of(each) for each in field["anyOf"]))
    if field.get("type") == "array":
        inside = field.get("items") or next(iter(field.get("prefixItems", [])), {})
        return f"list of {type_of(inside)}" if inside else "list"
    words = {
        "number": "number",
        "integer": "whole number",
        "boolean": "true or false",
        "string": "text",
        "object": "table",
    }
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {field[key]:g}" for key, sign in signs.items() if key in field]
    return " ".join([words.get(field.get("type", ""), "value"), ", ".join(bounds)]).strip()


# Results


def leaderboard() -> str:
    """All methods under PFLlib's protocol, as far as they have been run."""
    paper = ROOT / "benchmarks" / "papers" / "leaderboard.toml"
    paths = [path for path, held in tables_of_results() if held["paper"] == "PFLlib"]
    parts = [part for path in paths for part in leaderboard_of(path, paper)]
    return "\n\n".join(parts) or "Nothing has been run yet."


def leaderboard_of(path: Path, paper: Path) -> Iterator[str]:
    """The settings of a table, each with what was run and a row per method."""
    board = read_table(paper, json.loads(path.read_text(encoding="utf-8"))["table"])
    cells = load_cells(path, board)
    for key, setting in board.settings.items():
        lines = [line for line in lines_of(board, key, cells, {}) if line.figures]
        if not lines:
            continue
        rounds = sorted({cell["config"]["training"]["rounds"] for line in lines for cell in line.cells.values()})
        seeds = sorted({len(line.cells) for line in lines})
        yield f"## {setting.label}"
        published = "*PFLlib* is what it publishes, of up to 2,000 rounds. " if setting.paper else ""
        yield (
            f"{len(lines)} of {len(board.rows)} rows, {span(rounds, 'round')}, {span(seeds, 'seed')}. In %, mean "
            "over seeds ± sample standard deviation: *by samples, best*, PRE, every test sample counted alike, of the "
            "best evaluated round, which is PFLlib's number and chosen on test samples; PRE, POST and the worst 10 % "
            "of clients are unweighted means of the last round. *Behind* is how many points a row's figure by samples "
            "is below the other's, mean of the paired differences with a 95 % interval over seeds. "
            + published
            + "*Passes* is a participant's work in passes "
            "over its samples; MB are of all clients. The full table, with intervals "
            f"and commands: [{path.stem}]({shown_in(path)})."
        )
        base = next((line for line in lines if line.key == board.reference), None)
        rows = [leaderboard_row(board, setting, line, base) for line in lines]
        left_out = {"PFLlib"} if not setting.paper else set()
        if len(rounds) == len(seeds) == 1:  # said above the table, which is wide
            left_out |= {"rounds", "seeds"}
        head = [name for name in rows[0] if name not in left_out]
        yield sortable(head, [[row[name] for name in head] for row in rows])
        yield from (*majority([cell for line in lines for cell in line.cells.values()]), *diverged(lines))


def leaderboard_row(board: Table, setting: Setting, line: Line, base: Line | None) -> dict[str, str]:
    """The cells of a row, by heading; ``base`` is the row that others are behind."""
    cells = list(line.cells.values())
    method = cells[0]["config"]["method"]["name"]
    by_samples, pre, post, worst = (
        mean_and_spread([100 * value for value in line.by_seed(name).values()])
        for name in ("weighted_best", "pre", "post", "worst_10_percent")
    )
    passes = [cell["gradient_passes"] for cell in cells if "gradient_passes" in cell]
    return {
        "method": f"[{line.row.label}](methods/{method}.md)",
        "rounds": span(sorted({cell["config"]["training"]["rounds"] for cell in cells}), ""),
        "seeds": str(len(cells)),
        "PFLlib": f"{setting.paper[line.key]:g}" if line.key in setting.paper else NONE,
        "by samples, best": by_samples,
        f"behind {board.rows[board.reference].label}": lead(board, None if line is base else base, line)["behind"],
        "PRE": pre,
        "POST": post,
        "worst 10 %": worst,
        "passes": f"{np.max(passes):.1f}" if passes else NONE,
        "MB": line.show("megabytes", 1, 1),
    }


def span(numbers: Sequence[int], what: str) -> str:
    """The ends of some numbers, in words."""
    text = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    return f"{text} {what}{'s' if numbers[-1] != 1 else ''}" if what else text


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; columns of numbers are not told apart."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "&#124;") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sortable(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that a click on a heading sorts (docs/assets/sortable.js)."""
    return f'<div class="sortable" markdown>\n\n{table(head, rows)}\n\n</div>'


HERE = "<!-- the site has the tables here -->"
MADE: dict[str, Callable[[], str]] = {"leaderboard.md": leaderboard, "reference/config.md": config_tables}
