"""Saved models, each built once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.doubles import Architecture, tiny_backbone

WINDOW = 5
"""Sliding window of the models with one: shorter than most records here."""

Folders = Callable[[Architecture], Path]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    @cache
    def build(architecture: Architecture) -> Path:
        windowed = architecture in ("mistral", "gemma3_text")
        folder = tmp_path_factory.mktemp(architecture)
        return tiny_backbone(folder, architecture=architecture, sliding_window=WINDOW if windowed else None)

    return build
