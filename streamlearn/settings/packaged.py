"""The configurations and systemd files that ship with the package.

    streamlearn run --config packaged:quickstart

A wheel holds them under `streamlearn/_data`; a source checkout has them in `configs/` and `systemd/` at its root.
"""

import os
from pathlib import Path
from typing import Any, Literal

from streamlearn.errors import ConfigError

PREFIX = "packaged:"
_PACKAGE = Path(__file__).parents[1]


def packaged_folder(name: Literal["configs", "systemd"]) -> Path:
    """Return the folder of packaged files, in a wheel or in a checkout."""
    in_wheel = _PACKAGE / "_data" / name
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parent / name


def packaged_config(name: str) -> Path:
    """Return the path of a packaged configuration, for example `quickstart`.

    Raises:
        ConfigError: no packaged configuration has this name; the message lists those that exist.
    """
    folder = packaged_folder("configs")
    known = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    if name not in known:
        names = ", ".join(known) or f"none in {folder}"
        raise ConfigError(f"{PREFIX}{name}: expected the name of a packaged configuration ({names}), found {name!r}")
    return known[name]


def packaged_name(path: Path) -> str | None:
    """Return NAME of a path spelled `packaged:NAME`, or None for an ordinary path."""
    text = str(path)
    return text.removeprefix(PREFIX) if text.startswith(PREFIX) else None


def with_absolute_paths(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Resolve the relative paths of a packaged configuration, which may lie in a folder that must not be written to.

    Records are read from `folder`, where the sample ships. `state` and a backbone's folder become what they would be if
    the file were `./configs/NAME.yaml`: the quickstart's `../build/quickstart` is `./build/quickstart` in the current
    directory.
    """
    changed = dict(tree)
    if isinstance(state := tree.get("state"), str):
        changed["state"] = os.path.normpath(Path.cwd() / "configs" / state)
    backbone = tree.get("backbone")
    if isinstance(backbone, dict) and isinstance(model := backbone.get("model"), str) and model.startswith("../"):
        changed["backbone"] = {**backbone, "model": os.path.normpath(Path.cwd() / "configs" / model)}
    source = tree.get("source")
    if isinstance(source, dict) and isinstance(jsonl := source.get("jsonl"), dict) and "path" in jsonl:
        changed["source"] = {**source, "jsonl": {**jsonl, "path": str(folder / jsonl["path"])}}
    return changed
