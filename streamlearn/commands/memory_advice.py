"""Which settings make a step fit into memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from streamlearn.settings import Quantization, Settings

RECORD_TOKENS = 256
"""Length of records, and of batches, that is the last thing advised: longer records lose their start."""

Change = Mapping[str, Any]
"""SECTION.KEY -> value, of what is changed together."""


def advice(settings: Settings, needed: Callable[[Settings], int], available: int) -> str | None:
    """Return the settings that make a step fit, of those that change least of the result.

    1. Changes are added, the most harmless first, until the step fits.
    2. Those that it fits without are taken back.

    Args:
        settings: What does not fit.
        needed: Estimates the memory of a step of settings, bytes.
        available: Memory that there is, bytes.

    Returns:
        For example `set learner.activation_checkpointing: true and backbone.quantization: int8`; None: nothing helps.
    """
    # 1.
    chosen: list[Change] = []
    for change in _changes(settings):
        chosen.append(change)
        if needed(_changed(settings, chosen)) <= available:
            break
    else:
        return None
    # 2.
    for change in list(chosen):
        others = [each for each in chosen if each is not change]
        if needed(_changed(settings, others)) <= available:
            chosen = others
    values = {key: value for change in chosen for key, value in change.items()}
    return "set " + " and ".join(f"{key}: {_yaml(value)}" for key, value in values.items())


def _changes(settings: Settings) -> Iterator[Change]:
    """What takes less memory, from what changes nothing of the result to what changes most."""
    if not settings.learner.activation_checkpointing:
        yield {"learner.activation_checkpointing": True}
    for number in (8, 1):
        if settings.adapter.max_in_memory > number:
            yield {"adapter.max_in_memory": number}
    kinds = get_args(Quantization)  # from the largest
    for kind in kinds[kinds.index(settings.backbone.quantization) + 1 :]:
        yield {"backbone.quantization": kind}
    if settings.stream.batch_tokens > settings.stream.max_tokens:
        yield {"stream.batch_tokens": settings.stream.max_tokens}
    if settings.stream.max_tokens > RECORD_TOKENS:
        yield {"stream.max_tokens": RECORD_TOKENS, "stream.batch_tokens": RECORD_TOKENS}


def _changed(settings: Settings, changes: Sequence[Change]) -> Settings:
    """The settings with changes; of two to one key the later one holds."""
    for change in changes:
        for name, value in change.items():
            section, _, key = name.partition(".")
            changed = getattr(settings, section).model_copy(update={key: value})
            settings = settings.model_copy(update={section: changed})
    return settings


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
