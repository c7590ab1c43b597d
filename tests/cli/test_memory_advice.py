"""Advice on settings that make a step fit."""

from typing import Any

import pytest

from streamlearn.cli.doctor import advice
from streamlearn.settings import Settings


def settings(**sections: Any) -> Settings:
    return Settings.model_validate({"source": {"jsonl": {"path": "stream.jsonl"}}, **sections})


def needed(given: Settings) -> int:
    """A step in which checkpointing halves what a token takes."""
    weights = {"none": 400, "int8": 200, "nf4": 100}[given.backbone.quantization]
    tokens = given.stream.batch_tokens // (2 if given.learner.activation_checkpointing else 1)
    return weights + 10 * given.adapter.max_in_memory + tokens


@pytest.mark.parametrize(
    ("available", "text"),
    [
        (2000, "set learner.activation_checkpointing: true"),
        (1600, "set learner.activation_checkpointing: true and adapter.max_in_memory: 8"),
        (1330, "set learner.activation_checkpointing: true and backbone.quantization: int8"),
        (
            238,
            "set learner.activation_checkpointing: true and adapter.max_in_memory: 1 and backbone.quantization: nf4 "
            "and stream.max_tokens: 256 and stream.batch_tokens: 256",
        ),
        (100, None),
    ],
)
def test_only_what_is_needed_and_changes_least_is_named(available: int, text: str | None) -> None:
    """What changes no result comes first, shorter records last; none is named if none helps."""
    given = settings(stream={"batch_tokens": 2048}, adapter={"max_in_memory": 10 if available == 1330 else 32})
    assert advice(given, needed, available) == text


def test_what_is_set_already_is_not_named() -> None:
    """A configuration that saves memory everywhere gets no advice."""
    least = settings(
        learner={"activation_checkpointing": True},
        adapter={"max_in_memory": 1},
        backbone={"quantization": "nf4"},
        stream={"max_tokens": 256, "batch_tokens": 256},
    )
    assert advice(least, needed, 0) is None
