"""Rules for the sources of this project: no names that load code from data, start a shell or read the wall clock.

`uses` finds references to names, including aliases; `faults` checks a source against the rules.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "streamlearn").rglob("*.py"), *(ROOT / "connectors").rglob("*.py")])

MODULES = ("pickle", "_pickle", "cPickle", "dill", "shelve", "marshal", "joblib", "cloudpickle")
"""Modules that run code from the data they load."""
NAMES = (
    "eval",
    "exec",
    "compile",
    "torch.load",
    "torch.serialization.load",
    "torch.jit.load",
    "torch.hub.load",
    "torch.package.PackageImporter",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.unsafe_load_all",
    "yaml.full_load",
    "yaml.full_load_all",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell",
)
"""Forbidden names, whether called or passed on."""
ONLY_WITH = {"numpy.load": "allow_pickle"}
"""A function and the keyword that must be a literal False."""
FALSE = ("shell", "trust_remote_code", "allow_pickle")
"""Keywords and dictionary keys that must be a literal False everywhere."""


def faults(source: str) -> list[str]:
    """Violations as `line: description`, by line."""
    tree = ast.parse(source)
    return [f"{line}: {what}" for line, what in sorted({*_forbidden_names(tree), *_forbidden_keywords(tree)})]


def uses(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Every node that refers to an imported or builtin name, with the full name: `np.load` is `numpy.load`."""
    imported = dict(_imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Name | ast.Attribute):
            name = _dotted(node, imported)
            if name is not None:
                yield node, name
        elif isinstance(node, ast.Call):
            yield from ((node, name) for name in _by_text(node, imported))


def _forbidden_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node, name in uses(tree):
        passed_on = name in ONLY_WITH and isinstance(node, ast.Name | ast.Attribute) and node not in called
        if name.partition(".")[0] in MODULES or name in NAMES or passed_on:
            yield getattr(node, "lineno", 0), name


def _forbidden_keywords(tree: ast.AST) -> Iterator[tuple[int, str]]:
    imported = dict(_imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            pairs = [(keyword.arg, keyword.value) for keyword in node.keywords]
            name = _dotted(node.func, imported)
            if name in ONLY_WITH and ONLY_WITH[name] not in dict(pairs):
                yield node.lineno, f"{name} without {ONLY_WITH[name]}"
        elif isinstance(node, ast.Dict):
            pairs = [
                (key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None, value)
                for key, value in zip(node.keys, node.values, strict=True)
            ]
        else:
            continue
        for key, value in pairs:
            if key in FALSE and not (isinstance(value, ast.Constant) and value.value is False):
                yield node.lineno, f"{key} is not False"


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Local name to full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                yield alias.asname or whole, whole
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _dotted(node: ast.AST, imported: dict[str, str]) -> str | None:
    """The full name of an expression; None unless it begins with an imported or builtin name."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, node.id if node.id in ("eval", "exec", "compile") else None)
    if isinstance(node, ast.Attribute):
        front = _dotted(node.value, imported)
        return f"{front}.{node.attr}".removeprefix("builtins.") if front else None
    return None


def _by_text(call: ast.Call, imported: dict[str, str]) -> Iterator[str]:
    """Names given as text: `getattr(torch, "load")`, `import_module("pickle")`, `__import__("pickle")`."""
    texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    name = call.func.id if isinstance(call.func, ast.Name) else None
    if not texts:
        return
    if name == "getattr" and (front := _dotted(call.args[0], imported)):
        yield f"{front}.{texts[0]}".removeprefix("builtins.")
    if name == "__import__" or _dotted(call.func, imported) == "importlib.import_module":
        yield texts[0]
