"""Modules that other packages import but hardly ever use, imported at their first use.

`importlib.util.LazyLoader` does the same, but before Python 3.13 a second `import` of the module counts as a use.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class ModuleToImport(ModuleType):
    """Stands for a module in `sys.modules` until somebody asks it for anything."""

    def __getattr__(self, name: str) -> Any:
        """Import the module, which takes this one's place, and return its attribute.

        Raises:
            AttributeError: the module has no such attribute.
            ImportError: it cannot be imported.
        """
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def import_on_use(name: str) -> None:
    """Let `import NAME` succeed at once, and import the module at its first use; nothing if it is not installed."""
    if name in sys.modules:
        return
    spec = find_spec(name)
    if spec is not None:
        module = ModuleToImport(name)
        module.__spec__, module.__file__ = spec, spec.origin  # inspect asks every module for its file
        sys.modules[name] = module
