"""What the documents say holds: links lead somewhere, Python runs as it stands there, commands are commands."""

import importlib
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from fedjax_pfl import load_config, load_sweep, load_tune
from fedjax_pfl.cli.commands import app
from fedjax_pfl.cli.describing import described
from fedjax_pfl.method import Method

HOME = Path(__file__).resolve().parent.parent
DOCS = HOME / "docs"
PAGES = [*sorted(HOME.glob("*.md")), *sorted(DOCS.glob("**/*.md")), *sorted((HOME / "benchmarks").glob("*.md"))]
EXTRAS = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
# Placeholders for what is a reader's.
OWN = {"CONFIG", "CONFIG.toml", "SWEEP.toml", "FOLDER", "NAME", "DIR"}


def text_of(page):
    return page.read_text(encoding="utf-8")


def blocks(page, language):
    """The blocks of code of a page in a language, in their order, without those that are marked as not to be run."""
    pattern = rf"(<!-- not run: [^>]+ -->\n)?^```{language}\n(.*?)^```$"
    return [code for marked, code in re.findall(pattern, text_of(page), re.M | re.S) if not marked]


def without_code(page):
    return re.sub(r"^```.*?^```$|`[^`\n]+`", "", text_of(page), flags=re.M | re.S)


def anchors(page):
    """What the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text_of(page), flags=re.M | re.S), re.M)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).replace("`", "").strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def links(page):
    text = without_code(page)
    found = re.findall(r"\]\(([^)\s]+)\)|^\[[^]]+\]: (\S+)|<img\s[^>]*src=\"([^\"]+)", text, re.M)
    targets = [next(filter(None, each)) for each in found]
    return [target for target in targets if not re.match(r"https?://|mailto:", target)]


def test_links_between_the_documents_lead_somewhere():
    seen, dead = 0, []
    for page in PAGES:
        for link in links(page):
            target, _, anchor = link.partition("#")
            there = (page.parent / target).resolve() if target else page
            seen += 1
            if not there.exists() or (anchor and anchor not in anchors(there)):
                dead.append(f"{page.relative_to(HOME)}: {link}")
    assert seen > 250
    assert dead == []


def test_what_belongs_to_a_list_item_is_in_it_on_the_site_too():
    """The site's Markdown wants four spaces before later parts of an item, and an empty line before the next item."""
    broken = r"\n\n {2,3}\S.*|\n {4}[^-\s].*\n- .*"
    found = [(str(page), line) for page in DOCS.glob("**/*.md") for line in re.findall(broken, without_code(page))]
    assert found == []


def test_every_row_of_a_table_is_one_line_with_the_cells_of_its_head():
    seen, broken = 0, []
    for page in PAGES:
        columns = 0  # of the table in which the line stands
        for line in re.sub(r"\\\||<!--.*?-->", "", without_code(page)).splitlines():
            columns = columns or (line.count("|") if line.lstrip().startswith("|") else 0)
            if columns and line.strip():
                seen += 1
                broken += [f"{page.relative_to(HOME)}: {line}"] if line.count("|") != columns else []
            else:
                columns = 0
    assert seen > 1000
    assert broken == []


def test_a_page_of_the_navigation_is_there_and_every_page_is_in_it():
    nav = text_of(HOME / "mkdocs.yml").partition("\nnav:\n")[2]
    listed = re.findall(r"(\S+\.md)$", nav, re.M)
    assert [page for page in listed if not (DOCS / page).exists()] == []
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.glob("**/*.md")}
    assert {page for page in pages - set(listed) if not page.startswith("decisions/0")} == set()


def run(page, folder, monkeypatch):
    """Runs the Python of a page in a folder, in which configs/ is as in the repository; returns its names."""
    (folder / "configs").symlink_to(HOME / "configs")
    monkeypatch.chdir(folder)
    names = {}
    for code in blocks(page, "python"):
        exec(compile(code, page.name, "exec"), names)
    return names


def test_the_page_about_own_parts_runs(capsys, tmp_path, monkeypatch, tables_as_before):
    for package in ("pandas", "optuna"):
        pytest.importorskip(package, reason=f"the package {package} is not installed")
    page = run(DOCS / "own_parts.md", tmp_path, monkeypatch)
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


# What the other pages with Python print, and what their files are.
SHOWN = {
    "tutorial.md": ("[ 5 10]", "client 3: ["),
    "howto/configs.md": ("'method': {'name': 'fedprox', 'mu': 0.1}", "method.name = 'fedavgg'"),
    "howto/data.md": ("[ 5 10]",),
    "howto/metrics.md": ("[0.",),
    "howto/partitions.md": ("[57, 116, 232, 464, 928]", "{'kind': 'by_size', 'ratio': 2.0}"),
    "howto/resume.md": ("[ 5 10] True",),
    "howto/sweeps.md": ("| training.lr=0.05 |",),
}
WRITTEN = {
    "tutorial.md": ("curve.pdf", "both.html"),
    "howto/sweeps.md": ("runs/sweep/sweep.csv",),
}
SEPARATE = {"own_parts.md", *SHOWN}


def test_no_page_with_python_is_left_out():
    with_python = {page.relative_to(DOCS).as_posix() for page in DOCS.glob("**/*.md") if blocks(page, "python")}
    assert with_python == SEPARATE


@pytest.mark.parametrize("page", SHOWN)
def test_the_python_of_a_page_runs(page, capsys, tmp_path, monkeypatch, tables_as_before):
    for package in ("pandas", "matplotlib"):
        pytest.importorskip(package, reason=f"the package {package} is not installed")
    run(DOCS / page, tmp_path, monkeypatch)
    shown = capsys.readouterr().out
    assert [text for text in SHOWN[page] if text not in shown] == [], shown
    assert [name for name in WRITTEN.get(page, ()) if not (tmp_path / name).exists()] == []


def test_what_the_pages_import_is_public_or_said_to_be_stable():
    promised = text_of(DOCS / "api.md").partition("## In a notebook")[0]
    stable = set(re.findall(r"`(fedjax_pfl\.[\w.]+)`", promised))
    for name in stable:
        module, _, function = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function))
    used = set()
    for text in map(text_of, PAGES):
        for module, names in re.findall(r"^from (fedjax_pfl\.\S+) import (.*)$", text, re.M):
            used |= {f"{module}.{name}" for name in names.split(", ")}
        used |= set(re.findall(r"\bfedjax_pfl(?:\.\w+){2,}(?=\()", text))
    used = {name for name in used if not name.startswith("fedjax_pfl.method.")}
    assert used <= stable
    told = text_of(DOCS / "own_parts.md")  # without an import
    assert [name for name in stable - used if f"`{name.rpartition('.')[2]}(" not in told] == []


def test_all_optional_parts_of_the_contract_are_listed():
    listed = re.findall(r"^\| `(\w+)` \|", text_of(HOME / "CONTRIBUTING.md"), re.M)
    assert listed == list(Method._field_defaults)


def commands(page):
    """The commands of a page, as lists of words, without what stands before them: variables, ``srun``."""
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.count("'") % 2:  # a program in quotes, over several lines
                continue
            words = shlex.split(line, comments=True)
            while words:
                at = words.index("&&") if "&&" in words else len(words)
                yield words[: min(at, words.index(">"))] if ">" in words else words[:at]
                words = words[at + 1 :]


def check_own(words):
    """Raises unless a command line of ours can be read, with a config of the repository what is changed in it, too."""
    name, *arguments = words
    group = get_command(app)
    command = group.get_command(group.make_context("fedjax-pfl", [name]), name)
    assert command is not None, f"no command {name}"
    given = command.make_context(name, arguments).params
    config = given.get("config")
    if config is not None and str(config) not in OWN and "=" not in str(config):  # --resume takes changes alone
        load_config(HOME / config, given.get("overrides") or [])
    if name in ("sweep", "tune") and str(given["file"]) not in OWN:
        (load_sweep if name == "sweep" else load_tune)(HOME / given["file"])
    if name == "describe" and given["name"] not in OWN:
        described(given["name"])
    if name == "compare" and given["methods"] != "all":
        for method in given["methods"].split(","):
            described(method)


def check_table(script, arguments):
    """Raises unless a table of a paper, with its settings and rows, is there."""
    from tables.command import parser
    from tables.paper import allow, read_table

    paper = HOME / "benchmarks" / "papers" / f"{script.stem.removesuffix('_tables')}.toml"
    options = parser(paper).parse_args(arguments)
    table = read_table(paper, options.table)
    allow("--settings", options.settings or (), table.settings)
    allow("--methods", options.methods or (), table.rows)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "bash")], ids=lambda page: page.name)
def test_the_commands_of_a_page_are_commands(page, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(HOME / "benchmarks")])
    for words in commands(page):
        if "fedjax-pfl" in words:
            check_own(words[words.index("fedjax-pfl") + 1 :])
        for word in words:
            if re.fullmatch(r"benchmarks/\w+\.py", word):
                assert (HOME / word).exists(), words
                if word.endswith("_tables.py"):
                    check_table(HOME / word, words[words.index(word) + 1 :])
        if words[:2] == ["pip", "install"]:
            asked = [
                extra for word in words for extras in re.findall(r"^\.\[(.*)\]$", word) for extra in extras.split(",")
            ]
            assert [extra for extra in asked if extra not in EXTRAS] == [], words
