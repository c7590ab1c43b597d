"""The tree of errors in `streamlearn/errors.py` is the tree of the classes."""

import importlib
import pkgutil
import re

import connectors
import streamlearn
from streamlearn import errors
from streamlearn.errors import StreamlearnError

_ROW = re.compile(r"^(?P<indent>[ │├└─]*)(?P<name>\w+Error) +(?P<meaning>\S.*?) +(?:exit (?P<code>\d+)|-)$")
_LEVEL = 4
"""Characters by which each level of the tree is indented."""


def documented() -> dict[str, tuple[str | None, int | None]]:
    """Name of each error in the docstring -> its parent's name and its exit code."""
    tree: dict[str, tuple[str | None, int | None]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if row := _ROW.match(line):
            depth = len(row["indent"]) // _LEVEL - 1
            path[depth:] = [row["name"]]
            tree[row["name"]] = (path[depth - 1] if depth else None, int(row["code"]) if row["code"] else None)
    return tree


def classes() -> set[type[StreamlearnError]]:
    """Every error class of both packages."""
    for package in (streamlearn, connectors):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    found, waiting = {StreamlearnError}, [StreamlearnError]
    while waiting:
        waiting += (new := set(waiting.pop().__subclasses__()) - found)
        found |= new
    return {each for each in found if each.__module__.startswith(("streamlearn", "connectors"))}


def test_the_tree_names_every_error_with_its_parent() -> None:
    """Whatever is added must say there what happens next."""
    actual = {each.__name__: each.__bases__[0].__name__ for each in classes() if each is not StreamlearnError}
    assert {name: parent for name, (parent, _) in documented().items() if parent} == actual


def test_exit_codes_are_those_of_the_classes() -> None:
    """`-` stands for errors that never end the process."""
    actual = {each.__name__: each.exit_code for each in classes()}
    for name, (_, code) in documented().items():
        assert code in (actual[name], None)
    never = {name for name, (_, code) in documented().items() if code is None}
    of_clients = {
        "QueueFullError",
        "QueueClosedError",
        "AdapterGoneError",
        "ExampleError",
        "UnknownRegimeError",
    }
    of_publishing = {"PublishingStoppedError", "ReplicaUnreachableError", "ReplicaRefusedError"}
    assert never == {"RecordError", *of_clients, *of_publishing}
