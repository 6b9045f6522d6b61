"""The floors of the package (docs/decisions/0006), held against the imports as they stand in the source.

Imports under TYPE_CHECKING and inside functions count: they hide a dependency, they do not remove it. Not read is
``fedjax_pfl/__init__.py``, which looks public names up when they are first used. Every rule is also tried on small
packages that break it.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = "fedjax_pfl"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE
# From the top: a room may use all floors below its own.
BELOW = ({"methods", "engine"}, {"method", "ops"}, {"data", "models"}, {"errors"})
FLOORS = ({"cli"}, {"analysis"}, {"experiment"}, *BELOW)
# Rooms on one floor do not meet, but for these; the command line stands above all, so that it may use public names.
NEIGHBOURS = {("ops", "method"), ("cli", PACKAGE)}
NAMES_AT_THE_TOP = 10
LINES, LINES_OF_THE_LONGEST = 150, 180
LONGEST = ("pfedcspc", "pgfedsplit")


def read(root):
    """Path within the package -> source."""
    return {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in root.rglob("*.py")}


def module_of(path):
    return ".".join([PACKAGE, *Path(path).with_suffix("").parts]).removesuffix(".__init__")


def imports_of(path, source, known):
    """The modules of the package that a file imports; a name that is no module stands for the module it comes from."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = [PACKAGE, *Path(path).parent.parts]
            home = ".".join([*parts[: len(parts) + 1 - node.level], *filter(None, [node.module])])
            home = home if node.level else node.module
            found |= {f"{home}.{alias.name}" if f"{home}.{alias.name}" in known else home for alias in node.names}
    return {name for name in found if name.split(".")[0] == PACKAGE}


def graph_of(files):
    """Module -> the modules it imports."""
    known = {module_of(path) for path in files}
    read_ones = {path: source for path, source in files.items() if path != "__init__.py"}
    return {module_of(path): imports_of(path, source, known) for path, source in read_ones.items()}


def room(module):
    return module.removeprefix(f"{PACKAGE}.").split(".")[0]


def wrong_ways(files):
    """Imports that go up, or across a floor; rooms that are on no floor."""
    floor = {name: number for number, rooms in enumerate(FLOORS) for name in rooms}
    complaints = []
    for module, imported in graph_of(files).items():
        for target in sorted(imported - {module}):
            here, there = room(module), room(target)
            allowed = here == there or (here, there) in NEIGHBOURS
            if not allowed and not floor.get(here, len(FLOORS)) < floor.get(there, -1):
                complaints.append(f"{module} imports {target}")
    return complaints


def circle(files):
    """Modules that import each other in a circle; the first that is found."""
    graph, done = graph_of(files), set()

    def visit(module, path):
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done or module not in graph:
            return []
        found = next(filter(None, (visit(target, [*path, module]) for target in sorted(graph[module] - {module}))), [])
        done.add(module)
        return found

    return next(filter(None, (visit(module, []) for module in sorted(graph))), [])


def too_long(files):
    """Files of methods with too many lines."""
    counts = {path: len(source.splitlines()) for path, source in files.items() if Path(path).parts[0] == "methods"}

    def limit(path):
        defined = {node.name for node in ast.parse(files[path]).body if isinstance(node, ast.FunctionDef)}
        return LINES_OF_THE_LONGEST if defined & set(LONGEST) else LINES

    return [f"{path} has {count} lines" for path, count in sorted(counts.items()) if count > limit(path)]


def names_at_the_top(files):
    return sorted({Path(path).parts[0].removesuffix(".py") for path in files} - {"__init__"})


FILES = read(ROOT)
EMPTY = dict.fromkeys(FILES, "")


def test_imports_go_one_way():
    assert wrong_ways(FILES) == []


def test_no_modules_import_each_other_in_a_circle():
    assert circle(FILES) == []


def test_methods_fit_their_files():
    assert too_long(FILES) == []


def test_the_top_of_the_package_can_be_taken_in_at_a_glance():
    names = names_at_the_top(FILES)
    assert set(names) == set().union(*FLOORS)
    assert len(names) <= NAMES_AT_THE_TOP


def test_what_is_read_is_the_package():
    """Otherwise the rules above would hold of nothing."""
    graph = graph_of(FILES)
    assert f"{PACKAGE}.method" in graph[f"{PACKAGE}.engine.round"]
    assert f"{PACKAGE}.ops.tree" in graph[f"{PACKAGE}.engine.round"]
    assert len(graph) > 50


def indented(source):
    return f"if TYPE_CHECKING:\n    {source}\n", f"def late():\n    {source}\n"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("engine/round.py", "from fedjax_pfl.methods.fedavg import fedavg"),
        ("methods/fedavg.py", "import fedjax_pfl.engine.round"),
        ("methods/fedavg.py", "from fedjax_pfl.engine import round"),
        ("methods/fedavg.py", "from ..engine import round"),
        ("methods/parts/own.py", "from ...engine.round import Engine"),
        ("ops/tree.py", "from fedjax_pfl.methods import METHODS"),
        ("ops/tree.py", "from fedjax_pfl.experiment.config import Config"),
        ("method.py", "from fedjax_pfl.engine.round import Engine"),
        ("method.py", "from fedjax_pfl.ops import tree"),
        ("models/cnn.py", "from fedjax_pfl.data.federated import Batch"),
        ("data/federated.py", "from fedjax_pfl.models.base import Model"),
        ("data/federated.py", "from fedjax_pfl.method import Round"),
        ("errors.py", "from fedjax_pfl.data import federated"),
        ("engine/round.py", "from fedjax_pfl.cli.commands import main"),
        ("experiment/result.py", "from fedjax_pfl.analysis.leakage import leakage"),
        ("analysis/leakage.py", "from fedjax_pfl.cli.commands import main"),
        ("engine/round.py", "from fedjax_pfl import simulate"),
        ("methods/fedavg.py", "from fedjax_pfl.helpers import anything"),
        ("helpers.py", "from fedjax_pfl.errors import ConfigError"),
    ],
)
def test_an_import_the_wrong_way_is_found(path, source):
    for planted in (source, *indented(source)):
        assert len(wrong_ways({**EMPTY, path: planted})) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("cli/commands.py", "from fedjax_pfl.models import MODELS"),
        ("cli/commands.py", "from fedjax_pfl import __version__"),
        ("experiment/driver.py", "from fedjax_pfl.engine.round import Engine"),
        ("experiment/driver.py", "from . import config"),
        ("analysis/leakage.py", "from fedjax_pfl.experiment.result import Result"),
        ("methods/fedavg.py", "from fedjax_pfl.methods.fedprox import fedprox"),
        ("methods/fedavg.py", "from fedjax_pfl.method import Method"),
        ("ops/tree.py", "from fedjax_pfl.method import Round"),
        ("ops/tree.py", "import jax\nfrom numpy import fedjax_pfl"),
        ("data/federated.py", "from fedjax_pfl.errors import ConfigError"),
    ],
)
def test_an_import_downstairs_or_within_a_room_is_not(path, source):
    assert wrong_ways({**EMPTY, path: source}) == []


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        ({"a": "from fedjax_pfl.ops.b import f", "b": "", "c": "from fedjax_pfl.ops import b"}, ""),
        ({"a": "from fedjax_pfl.ops.b import f", "b": "from fedjax_pfl.ops.a import g"}, "aba"),
        ({"a": "from fedjax_pfl.ops import b", "b": "from .c import f", "c": "import fedjax_pfl.ops.a"}, "abca"),
        ({"a": "", "b": "from fedjax_pfl.ops import c", "c": "from fedjax_pfl.ops.b import f"}, "bcb"),
        ({"a": indented("from fedjax_pfl.ops import b")[0], "b": indented("from fedjax_pfl.ops import a")[1]}, "aba"),
    ],
)
def test_a_circle_is_found(sources, found):
    files = {f"ops/{name}.py": source for name, source in sources.items()}
    assert circle(files) == [f"fedjax_pfl.ops.{name}" for name in found]


def test_a_circle_through_the_entry_of_a_folder_is_found():
    files = {
        "methods/__init__.py": "from fedjax_pfl.methods import fedavg",
        "methods/fedavg.py": "from . import METHODS",
    }
    assert circle(files) == ["fedjax_pfl.methods", "fedjax_pfl.methods.fedavg", "fedjax_pfl.methods"]


@pytest.mark.parametrize(
    ("path", "source", "lines", "found"),
    [
        ("methods/fedavg.py", "def fedavg(): ...", 150, False),
        ("methods/fedavg.py", "def fedavg(): ...", 151, True),
        ("methods/pfedcspc/__init__.py", "def pfedcspc(): ...", 180, False),
        ("methods/pfedcspc/__init__.py", "def pfedcspc(): ...", 181, True),
        ("methods/pfedcspc/parts.py", "def relations(): ...", 151, True),
        ("ops/training.py", "def train(): ...", 500, False),
    ],
)
def test_a_method_that_has_outgrown_its_file_is_found(path, source, lines, found):
    assert bool(too_long({path: source + "\n" * lines})) == found


def test_an_eleventh_name_at_the_top_is_found():
    assert len(names_at_the_top({**FILES, "helpers.py": ""})) > NAMES_AT_THE_TOP
