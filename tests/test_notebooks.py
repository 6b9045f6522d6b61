"""The notebooks as files: what Colab needs of them, and that they show what a run has left. Here none is run.

Running them needs ``pip install -e ".[notebooks]"``, and then ``pytest --nbmake notebooks``. With ``--overwrite`` their
outputs are those of this run; what is left of it that says nothing goes by ``jupyter nbconvert --to notebook --inplace
--CoalesceStreamsPreprocessor.enabled=True --ClearMetadataPreprocessor.enabled=True
--ClearMetadataPreprocessor.preserve_nb_metadata_mask=kernelspec notebooks/*.ipynb``.
"""

import ast
import importlib
import importlib.util
import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import fedjax_pfl

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# On GitHub; badges and install cells name it.
REPOSITORY = "OWNER/fedjax_pfl"
BADGE = (
    "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    f"(https://colab.research.google.com/github/{REPOSITORY}/blob/main/notebooks/{{}})"
)
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
KEYS = {
    "markdown": {"cell_type", "id", "metadata", "source"},
    "code": {"cell_type", "execution_count", "id", "metadata", "outputs", "source"},
}
MOST_BYTES = 400_000

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells_of(path, kind=None):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if kind in (None, cell["cell_type"])]


def source(cell):
    return "".join(cell["source"])


def python(cell):
    """A cell with its magics as calls of a function ``magic``, whose text is formatted as IPython does it."""
    return re.sub(r"^( *)%(.*)$", r"\1magic(rf'''\2''')", source(cell), flags=re.M)


def shown(path):
    """What a notebook shows as text: type of the output, and the text."""
    for cell in cells_of(path, "code"):
        for output in cell["outputs"]:
            yield output["output_type"], "".join(output.get("text", ()))
            for kind, content in output.get("data", {}).items():
                if kind.startswith("text/"):
                    yield kind, "".join(content)


def test_there_are_five_in_an_order():
    assert [path.name[:3] for path in NOTEBOOKS] == ["01_", "02_", "03_", "04_", "05_"]


@each
def test_it_is_a_notebook_and_small(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"] == KERNEL
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(set(names)) == len(names) > 6
    for cell in notebook["cells"]:
        assert set(cell) == KEYS[cell["cell_type"]]
        assert re.fullmatch(r"[a-z][a-z-]*", cell["id"])  # said by hand, and so the same after the next run
        assert cell["metadata"] == {}
        assert cell["source"]
    assert path.stat().st_size < MOST_BYTES


@each
def test_it_begins_with_title_badge_and_the_same_install_cell(path):
    title, about, install, *rest = cells_of(path)
    assert re.match(r"# \S", source(title))
    assert source(title).split("\n\n")[1] == BADGE.format(path.name)
    first = cells_of(NOTEBOOKS[0])
    assert (source(about), source(install)) == (source(first[1]), source(first[2]))
    everything = "".join(source(cell) for cell in (title, about, install, *rest))
    assert set(re.findall(r"github(?:\.com)?/([\w.-]+/\w+)", everything)) == {REPOSITORY}


def installed(monkeypatch, modules):
    """What the install cell asks pip for, where these modules are there."""
    asked, names = [], {}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace() if name in modules else None)
    names["magic"] = asked.append
    exec(compile(python(cells_of(NOTEBOOKS[0], "code")[0]), "install", "exec"), names)
    return [[Requirement(text) for text in re.findall(r'"(.*?)"', command)] for command in asked]


def test_where_the_package_is_there_nothing_is_installed(monkeypatch):
    assert installed(monkeypatch, {"fedjax_pfl", "jax_cuda12_plugin"}) == []


@pytest.mark.parametrize(
    ("modules", "extras"),
    [(set(), set()), ({"jax_cuda12_plugin"}, {"cuda12"}), ({"jax_cuda13_plugin"}, {"cuda13"}), ({"libtpu"}, {"tpu"})],
)
def test_the_install_cell_keeps_a_jax_that_is_new_enough_with_what_it_runs_on(monkeypatch, modules, extras):
    [[jax, package]] = installed(monkeypatch, modules)
    floor = next(bound for bound in map(Requirement, PROJECT["dependencies"]) if bound.name == "jax")
    assert (jax.name, jax.extras, jax.specifier) == ("jax", extras, floor.specifier)
    assert all(Version(version) in jax.specifier for version in ("0.10.0", "0.10.2", "0.11"))
    assert f"version {str(floor.specifier).removeprefix('>=')} or newer" in source(cells_of(NOTEBOOKS[0])[1])
    assert package.name == PROJECT["name"]
    assert package.url == f"git+https://github.com/{REPOSITORY}"
    assert package.extras <= set(PROJECT["optional-dependencies"])


@each
def test_outputs_are_those_of_one_run_from_top_to_bottom(path):
    cells = cells_of(path, "code")
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert cells[0]["outputs"] == []  # run where the package was there
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert all(output["name"] == "stdout" for output in outputs if output["output_type"] == "stream")  # no warnings
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert pictures == sum(bool(re.search(r"plot\w*\(|subplots\(", source(cell))) for cell in cells)


@each
def test_nothing_in_it_is_of_one_machine(path):
    sources = [("source", source(cell)) for cell in cells_of(path)]
    for _, text in [*sources, *shown(path)]:
        assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users|usr|opt|content|mnt|var)/|site-packages|\r", text)


@each
def test_what_it_imports_and_links_to_exists(path):
    imported = {}
    for cell in cells_of(path, "code"):
        for node in ast.walk(ast.parse(python(cell))):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "fedjax_pfl":
                imported.setdefault(node.module, []).extend(alias.name for alias in node.names)
    assert set(imported.pop("fedjax_pfl")) <= set(fedjax_pfl.__all__)
    for module, names in imported.items():
        assert [name for name in names if not hasattr(importlib.import_module(module), name)] == []
    text = "\n".join(source(cell) for cell in cells_of(path, "markdown"))
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (path.parent / target).exists()


def test_pages_link_to_it_and_say_who_owner_is():
    pages = {
        name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/tutorial.md", "docs/status.md")
    }
    assert [path.name for path in NOTEBOOKS if f"](../notebooks/{path.name})" not in pages["docs/tutorial.md"]] == []
    assert "](docs/tutorial.md#notebooks)" in pages["README.md"]
    assert ("`OWNER`" in pages["docs/status.md"]) == REPOSITORY.startswith("OWNER/")


def test_a_backend_that_comes_on_with_the_first_picture_stays_on():
    matplotlib = pytest.importorskip("matplotlib", reason="the package matplotlib is not installed")
    from fedjax_pfl.experiment.plots.style import look

    with matplotlib.rc_context({"interactive": False}):
        with look():
            matplotlib.interactive(True)  # as a notebook's does when it is loaded
        assert matplotlib.is_interactive()
        with look():
            assert matplotlib.rcParams["font.size"] == 8
            matplotlib.interactive(False)
        assert not matplotlib.is_interactive()
