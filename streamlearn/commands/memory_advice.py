"""Which settings make a step fit into memory."""

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

from streamlearn.settings import Settings

RECORD_TOKENS = 256
"""Length of records, and of batches, that is the last thing advised: longer records lose their start."""


def advice(settings: Settings, needed: Callable[[Settings], int], available: int) -> str | None:
    """Return the settings that make a step fit: as few as possible, and first those that change least of the result.

    Args:
        settings: What does not fit.
        needed: Estimates the memory of a step of settings, bytes.
        available: Memory that there is, bytes.

    Returns:
        For example `set backbone.quantization: int8 and stream.batch_tokens: 1024`; None: nothing helps.
    """
    changes = list(_changes(settings))
    for number in range(1, len(changes) + 1):
        for chosen in combinations(changes, number):
            if needed(_changed(settings, chosen)) <= available:
                return "set " + " and ".join(f"{section}.{key}: {_yaml(value)}" for section, key, value in chosen)
    return None


def _changes(settings: Settings) -> Iterator[tuple[str, str, Any]]:
    """Section, key and value of what takes less, from what changes nothing of the result to what changes most."""
    if not settings.learner.activation_checkpointing:
        yield "learner", "activation_checkpointing", True
    for number in (8, 1):
        if settings.adapter.max_in_memory > number:
            yield "adapter", "max_in_memory", number
    if settings.backbone.quantization == "none":
        yield "backbone", "quantization", "int8"
    if settings.backbone.quantization != "nf4":
        yield "backbone", "quantization", "nf4"
    if settings.stream.batch_tokens > settings.stream.max_tokens:
        yield "stream", "batch_tokens", settings.stream.max_tokens
    if settings.stream.max_tokens > RECORD_TOKENS:
        yield "stream", "max_tokens", RECORD_TOKENS
        yield "stream", "batch_tokens", RECORD_TOKENS


def _changed(settings: Settings, changes: tuple[tuple[str, str, Any], ...]) -> Settings:
    """The settings with changes; of two to one key the later one holds."""
    for section, key, value in changes:
        changed = getattr(settings, section).model_copy(update={key: value})
        settings = settings.model_copy(update={section: changed})
    return settings


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
