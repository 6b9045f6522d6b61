"""What the package says of itself: its version, its public names, and that it is typed."""

import importlib.resources
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fedjax_pfl

HOME = Path(__file__).resolve().parent.parent
VERSION = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def test_the_version_is_that_of_pyproject():
    assert fedjax_pfl.__version__ == VERSION


def test_the_citation_is_of_this_version():
    assert re.findall(r"^version: (.*)$", (HOME / "CITATION.cff").read_text(encoding="utf-8"), re.M) == [VERSION]


def test_dir_lists_the_public_names_without_importing_jax():
    program = "import sys, fedjax_pfl; print(*dir(fedjax_pfl)); assert not {'jax', 'numpy'} & set(sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert found == sorted(fedjax_pfl.__all__)
    assert {"simulate", "compare", "Config", "METHODS", "__version__"} <= set(found)


def test_a_name_that_there_is_not_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'simulte'"):
        fedjax_pfl.simulte  # noqa: B018


def test_type_checkers_may_read_the_annotations_and_all_that_is_no_python_is_installed():
    assert importlib.resources.files(fedjax_pfl).joinpath("py.typed").is_file()
    data = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    package = HOME / "fedjax_pfl"
    files = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    others = sorted(str(path) for path in files if path.suffix not in (".py", ".pyc"))
    assert data == {"fedjax_pfl": sorted(others, key=lambda name: (name != "py.typed", name))}
