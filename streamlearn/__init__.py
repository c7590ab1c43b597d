"""A daemon that keeps a frozen Hugging Face model learning from an endless stream, and `Learner`, its loop alone."""

import logging
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamlearn.library import Evaluation, Learner, Regime, Scores, Update
    from streamlearn.shift.drift_monitor import DriftMonitor

__all__ = ["DriftMonitor", "Evaluation", "Learner", "Regime", "Scores", "Update", "__version__"]
__version__ = "0.2.0.dev0"

_HOMES = {
    "DriftMonitor": "streamlearn.shift.drift_monitor",
    **dict.fromkeys(("Evaluation", "Learner", "Regime", "Scores", "Update"), "streamlearn.library"),
}
"""The module of each public name, imported when the name is first used."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


# `importlib.util.LazyLoader` does the same, but before Python 3.13 a second `import` of the module counts as a use.
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


# PEFT imports bitsandbytes where it is installed: a second and 45 MB, for layers that are not used here.
import_on_use("bitsandbytes")
# Once used, it warns outside of our log of a kernel that it would download.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
