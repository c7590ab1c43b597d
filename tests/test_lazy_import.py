"""Modules that are imported at their first use."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest

from streamlearn import import_on_use

PACKAGE = "seldom_used"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with a submodule; importing it is seen in `sys.modules`."""
    folder = tmp_path / PACKAGE
    folder.mkdir()
    (folder / "__init__.py").write_text("import seldom_used.part\nvalue = 7\n")
    (folder / "part.py").write_text("other = 8\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in (PACKAGE, f"{PACKAGE}.part"):
        monkeypatch.setitem(sys.modules, name, None)  # so that whatever is imported is removed again
        del sys.modules[name]
    return PACKAGE


def is_imported() -> bool:
    return f"{PACKAGE}.part" in sys.modules


def test_an_import_is_no_use(package: str) -> None:
    """Nor a second one, nor that inspect looks at all modules."""
    import_on_use(package)
    module = importlib.import_module(package)
    assert importlib.import_module(package) is module
    assert inspect.getmodule(is_imported) is sys.modules[__name__]
    assert not is_imported()
    assert module.value == 7
    assert is_imported()
    assert module.part is sys.modules[f"{PACKAGE}.part"]
    assert sys.modules[package] is not module


def test_a_submodule_is_a_use(package: str) -> None:
    """And an attribute that is missing is the module's own error."""
    import_on_use(package)
    assert importlib.import_module(f"{package}.part").other == 8
    with pytest.raises(AttributeError, match=f"'{package}' has no attribute 'absent'"):
        _ = importlib.import_module(package).absent


def test_what_is_absent_or_imported_stays_so(package: str) -> None:
    """`import` of a package that is not installed fails as ever."""
    module = importlib.import_module(package)
    import_on_use(package)
    assert sys.modules[package] is module
    import_on_use("not_installed_anywhere")
    assert "not_installed_anywhere" not in sys.modules
