"""What a person's code can rely on: public names and signatures as docs/api.md has them, and their types.

``python -m tests.test_api`` writes the table of docs/api.md anew.
"""

import inspect
import re
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

import fedjax_pfl
from fedjax_pfl import Config, ConfigError
from fedjax_pfl.experiment.config import Tables
from fedjax_pfl.experiment.options import summary_line
from tests.conftest import cache_folder, is_writable

HOME = Path(__file__).resolve().parent.parent
PAGE = HOME / "docs" / "api.md"
BEGIN, END = "<!-- python -m tests.test_api writes what follows -->\n", "<!-- up to here -->\n"


class Shown:
    """A type as it is shown, in the place of an annotation."""

    def __init__(self, annotation):
        if typing.get_origin(annotation) in (typing.Union, types.UnionType):
            self.text = " | ".join(Shown(kind).text for kind in typing.get_args(annotation))
        else:
            text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
            self.text = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])|~", "", text).replace("NoneType", "None")

    def __repr__(self):
        return self.text.replace("'", '"')


def arguments(function, *, bound):
    """A signature, without self; a config takes its tables by name."""
    if function is Config.__init__:
        tables = [name if name in Tables.__required_keys__ else f"{name}=..." for name in Tables.__annotations__]
        return f"(*, protocol: str | None = None, {', '.join(tables)})"
    signature = inspect.signature(function)
    parameters = [
        given if given.annotation is given.empty else given.replace(annotation=Shown(given.annotation))
        for given in list(signature.parameters.values())[bound:]
    ]
    made = inspect.isclass(function) or function.__name__ == "__init__"
    returned = signature.empty if made else Shown(signature.return_annotation)
    text = str(signature.replace(parameters=parameters, return_annotation=returned))
    return text.replace("'", '"').replace("Ellipsis", "...")


def members(name, kind):
    """Name and signature of what a class offers besides its fields, and what another public class has of it."""
    others = [base for base in kind.__mro__[1:] if base.__name__ in fedjax_pfl.__all__]
    known = {member for base in others for member in dir(base)} | set(dir(BaseModel))
    for owner in (owner for owner in reversed(kind.__mro__) if owner.__module__.startswith("fedjax_pfl")):
        for member, given in vars(owner).items():
            if member.startswith("_") or member in known:
                continue
            if isinstance(given, property):
                yield f"{name}.{member}", repr(Shown(given.fget.__annotations__["return"])), given
            elif isinstance(given, classmethod):
                yield f"{name}.{member}", arguments(given.__func__, bound=1), given.__func__
            elif inspect.isfunction(given):
                yield f"{name}.{member}", arguments(given, bound=1), given


def entries():
    """Name, signature or type, and the first line of the documentation, of all that is public."""
    for name in sorted(fedjax_pfl.__all__, key=str.lower):
        given = getattr(fedjax_pfl, name)
        if name == "__version__":
            yield name, "str", "The version of the package."
        elif name == "METHODS":
            yield name, "dict[str, Callable[..., Method]]", "The methods that configs name."
        elif inspect.isclass(given):
            made_by = given.__init__ if "__init__" in vars(given) else given
            yield name, arguments(made_by, bound=made_by is not given), summary_line(given)
            for member, signature, documented in members(name, given):
                yield member, signature, summary_line(documented)
        else:
            yield name, arguments(given, bound=0), summary_line(given)


def table():
    """The table of docs/api.md."""
    rows = ["| name | what it is |", "|---|---|"]
    for name, signature, text in entries():
        shown = f"{name}{signature}" if signature.startswith("(") else f"{name}: {signature}"
        cells = f"`{shown}`", text.replace("``", "`")
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows) + "\n"


def test_the_page_has_all_public_names_with_their_signatures():
    text = PAGE.read_text(encoding="utf-8")
    written = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    assert written == table(), "python -m tests.test_api writes it anew"


def test_every_public_name_can_be_imported_and_is_documented():
    assert set(dir(fedjax_pfl)) == set(fedjax_pfl.__all__)
    for name, signature, text in entries():
        assert text, name
        assert signature, name


def test_checkers_of_types_see_the_names_that_are_there():
    """The imports under TYPE_CHECKING, the names that are looked up, and __all__ are three lists of the same."""
    source = Path(fedjax_pfl.__file__).read_text(encoding="utf-8")
    block = source[source.index("if TYPE_CHECKING:") : source.index("    __version__: str")]
    seen = set(re.findall(r"\b\w+\b", " ".join(re.findall(r"import (\([^)]*\)|.*)", block))))
    assert seen | {"__version__"} == set(fedjax_pfl.__all__) == set(fedjax_pfl._HOME) | {"__version__"}


MYPY = """[mypy]
strict = True
follow_imports = skip
[mypy-fedjax_pfl.*,pydantic.*]
follow_imports = silent
"""
MISTAKES = """
from fedjax_pfl import Config, Result, compare, simulate
config = Config(daat={"source": "digits"}, data={"source": "digits"}, method={"name": "fedavg"})
Config(data={"source": "digits"})
Config(data={"source": "digits"}, method="fedavg")
config.replace("training.lr")
config.trainnig
simulate(config, progres=print)
compare(config, [1])
number: int = simulate(config).history
simulate(config, progress="bar")
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """What mypy says of the user's file, and of a file with mistakes; it reads no other packages, which takes long."""
    folder = tmp_path_factory.mktemp("mypy")
    (folder / "mypy.ini").write_text(MYPY, encoding="utf-8")
    (folder / "mistakes.py").write_text(MISTAKES, encoding="utf-8")
    known = cache_folder() / "mypy"
    cache = known if is_writable(known) else folder / "cache"
    command = [sys.executable, "-m", "mypy", "--config-file", folder / "mypy.ini", "--cache-dir", cache]
    files = [HOME / "tests" / "user_file.py", folder / "mistakes.py"]
    done = subprocess.run([*command, *files], capture_output=True, text=True, cwd=HOME, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_a_users_file_passes_mypy_strict(checked):
    assert [line for line in checked if "user_file.py" in line] == []
    assert "checked 2 source files" in checked[-1]


def test_mypy_finds_a_users_mistakes(checked):
    found = [
        int(re.search(r"mistakes\.py:(\d+): error", line)[1])
        for line in checked
        if "error" in line and "mistakes" in line
    ]
    assert sorted(set(found)) == list(range(3, 12))
    assert any('Unexpected keyword argument "daat" for "Config"' in line for line in checked)


def test_a_misspelt_table_is_also_a_mistake_at_run_time():
    with pytest.raises(ConfigError, match=r"^daat = .*no such key; did you mean data. allowed: protocol, data, model"):
        Config(daat={"source": "digits"}, method={"name": "fedavg"})


def test_the_tables_that_checkers_know_are_those_of_the_config():
    assert list(Tables.__annotations__) == list(Config.model_fields)
    required = {name for name, field in Config.model_fields.items() if field.is_required()}
    assert required == Tables.__required_keys__


CONFIG = Config(data={"source": "digits"}, method={"name": "fedavg"})


def test_one_field_is_replaced_as_several_are():
    changed = CONFIG.replace("training.lr", 0.1)
    assert changed == CONFIG.replace({"training.lr": 0.1})
    assert (changed.training.lr, CONFIG.training.lr) == (0.1, 0.005)
    assert CONFIG.replace("run.out", "runs/a").replace("run.out", None) == CONFIG
    assert CONFIG.replace("method.name", "ditto").method["lam"] == 1.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ("training.lr",),
            "training.lr = '(missing)' is not usable: a value, as in config.replace(\"training.lr\", value)",
        ),
        (("training.lr", -1), "training.lr = -1 is not usable: input should be greater than 0"),
        (("lr", 0.1), "lr = 0.1 is not usable: a dotted field such as training.lr, or protocol"),
        ((0.1,), 'changes = 0.1 is not usable: a field with its value, or a mapping such as {"training.lr": 0.1}'),
        (({"training.lr": 1}, 2), "changes = {'training.lr': 1} is not usable: a field with its value, or a mapping"),
    ],
)
def test_what_cannot_be_replaced_is_one_line(given, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        CONFIG.replace(*given)


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text[: text.index(BEGIN)] + BEGIN + table() + text[text.index(END) :], encoding="utf-8")
