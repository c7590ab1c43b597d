"""What the packages import is declared in pyproject.toml, and what is declared is imported."""

import ast
import sys
import tomllib
from collections import defaultdict
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
OURS = ("streamlearn", "connectors")
OPTIONAL = {
    "bitsandbytes": ("quantization", "streamlearn/backbone/"),
    "gguf": ("gguf", "streamlearn/export/"),
    "fastavro": ("registry", "streamlearn/stream/registry.py"),
    "fsspec": ("objects", "streamlearn/publish/objects.py"),
    "google": ("registry", "streamlearn/stream/registry.py"),
    "datasets": ("datasets", "connectors/rows.py"),
    "mlflow": ("mlflow", "streamlearn/track.py"),
    "opentelemetry": ("otel", "streamlearn/http/tracing.py"),
    "pandas": ("pandas", "streamlearn/library.py"),
    "tensorboardX": ("tensorboard", "streamlearn/track.py"),
}
"""Import name: the extra that installs it, and the only folder that may import it."""
INDIRECT = {
    "num2words": "transformers' SmolVLM processor",
    "crc32c": "kafka-python",
    "lz4": "kafka-python",
    "python-snappy": "kafka-python",
    "botocore": "kafka-python",
    "s3fs": "fsspec",
    "gssapi": "kafka-python",
    "zstandard": "kafka-python",
    "uplot-python": "a browser, which the page has load its chart library",
}
"""Distributions that another program imports."""
NOT_INSTALLED = {"kerberos": "gssapi is compiled against the system's Kerberos"}
"""Extras that the tests run without, and why. No version of what they install is tested."""
TESTED_MINOR = {"kafka-python", "peft", "uplot-python"}
"""Distributions whose internal interfaces are used."""


def project() -> dict[str, Any]:
    values: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return values


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(requirement).name) for requirement in requirements}


def imports(file: Path) -> set[str]:
    """Top-level names of every absolute import of a file, those inside functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.fixture(scope="module")
def third_party() -> dict[str, set[str]]:
    """Import name: the files that import it."""
    found: dict[str, set[str]] = defaultdict(set)
    for package in OURS:
        for file in (ROOT / package).rglob("*.py"):
            for name in imports(file) - set(sys.stdlib_module_names) - set(OURS):
                found[name].add(file.relative_to(ROOT).as_posix())
    return found


@pytest.fixture(scope="module")
def distributions() -> dict[str, set[str]]:
    """Import name: the installed distributions that hold it."""
    return {name: {canonicalize_name(each) for each in held} for name, held in packages_distributions().items()}


def test_every_import_is_declared(third_party: dict[str, set[str]], distributions: dict[str, set[str]]) -> None:
    """As a dependency, or in an extra if OPTIONAL lists it."""
    required = names(project()["dependencies"])
    undeclared = {
        name: sorted(files)
        for name, files in third_party.items()
        if name not in OPTIONAL and not distributions.get(name, set()) & required
    }
    assert len(third_party) > 20
    assert undeclared == {}


def test_an_optional_import_stays_in_its_folder(
    third_party: dict[str, set[str]], distributions: dict[str, set[str]]
) -> None:
    """Its extra declares it, and no module outside the folder imports it."""
    for name, (extra, folder) in OPTIONAL.items():
        assert distributions[name] & names(project()["optional-dependencies"][extra])
        assert not distributions[name] & names(project()["dependencies"])
        assert third_party[name]
        assert [file for file in third_party[name] if not file.startswith(folder)] == []


def test_every_dependency_is_imported(third_party: dict[str, set[str]], distributions: dict[str, set[str]]) -> None:
    """No dependency is installed without need."""
    used = {each for name in third_party for each in distributions.get(name, ())}
    assert names(project()["dependencies"]) - used - INDIRECT.keys() == set()


def test_every_distribution_of_an_extra_is_imported(distributions: dict[str, set[str]]) -> None:
    """Each distribution of an extra for users is imported here, or INDIRECT names the package that imports it."""
    extras = project()["optional-dependencies"]
    declared = set().union(*(names(extras[extra]) for extra in extras if extra != "dev"))
    indirect = INDIRECT.keys() - names(project()["dependencies"])
    assert declared == indirect | {each for name in OPTIONAL for each in distributions[name] & declared}


@pytest.mark.parametrize("name", sorted(TESTED_MINOR))
def test_internal_interfaces_are_capped_to_the_tested_minor_version(name: str) -> None:
    """The range admits the version that constraints.txt pins, and not the next minor version."""
    groups = [project()["dependencies"], *project()["optional-dependencies"].values()]
    declared = {requirement for group in groups for requirement in map(Requirement, group)}
    [requirement] = [requirement for requirement in declared if requirement.name == name]
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    [pinned] = [Version(each.partition("==")[2]) for each in pins if canonicalize_name(each.partition("==")[0]) == name]
    assert requirement.specifier.contains(pinned)
    assert not requirement.specifier.contains(f"{pinned.major}.{pinned.minor + 1}.0")


def test_every_direct_dependency_is_pinned_for_the_tests() -> None:
    """constraints.txt has a version for each, the development tools included, that its range admits."""
    pins = [line.partition("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[1:]]
    pinned = {canonicalize_name(name): version for name, _, version in pins}
    extras = project()["optional-dependencies"]
    tested = [extras[extra] for extra in extras if extra not in NOT_INSTALLED]
    declared = [Requirement(each) for group in (project()["dependencies"], *tested) for each in group]
    assert [str(each) for each in declared if canonicalize_name(each.name) not in pinned] == []
    assert [str(each) for each in declared if not each.specifier.contains(pinned[canonicalize_name(each.name)])] == []


def test_make_installs_every_extra_that_is_not_excused() -> None:
    """By its name or, for what the tests need alone, within `dev`."""
    extras = {extra: names(requirements) for extra, requirements in project()["optional-dependencies"].items()}
    [line] = [line for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines() if "--editable" in line]
    installed = line.rpartition("[")[2].partition("]")[0].split(",")
    held = set().union(*(extras[extra] for extra in installed))
    assert {extra for extra, distributions in extras.items() if not distributions <= held} == NOT_INSTALLED.keys()


def test_the_lgpl_extras_are_named() -> None:
    """The notice ships in every wheel."""
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert "LGPL" in notice
    assert all(name in notice for name in ("num2words", "crc32c", "uplot-python"))
