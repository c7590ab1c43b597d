"""The first records of the source as the daemon would learn them: their text, with the learned part marked."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import groupby
from typing import Any

from rich.text import Text

from connectors.open import open_source
from streamlearn.backbone.load import load_preprocessing, outline
from streamlearn.cli.options import ignored_counts
from streamlearn.daemon.model import decoder_of
from streamlearn.errors import RecordError
from streamlearn.settings import Settings, SourceSettings
from streamlearn.stream.position import Position
from streamlearn.stream.record import IGNORED, Example, Record
from streamlearn.stream.source import Source

PATIENCE_S = 10.0
"""Time that a source without further records is waited for."""
POLL_S = 1.0
MAX_CONTEXT = 600
"""Characters shown of a part that is not learned; the middle of a longer one is left out."""


def sample(settings: Settings, number: int) -> Iterator[Text]:
    """Read records from the beginning of the source and yield what becomes of each, then the counts.

    Commits nothing, and trains on nothing.

    Raises:
        ConfigError: the backbone's tokenizer cannot be loaded.
        SourceError: the source, or the schema registry, cannot be read.
    """
    preprocessing = load_preprocessing(settings.backbone, outline(settings.backbone))
    decoder = decoder_of(settings, preprocessing)
    refused: Counter[str] = Counter()
    ignored: Counter[str] = Counter()
    learned = 0
    with closing(open_source(_from_earliest(settings.source))) as source:
        source.seek(Position())
        for record in _first(source, number):
            text = Text(f"{record.origin} offset {record.offset}: ", style="bold")
            try:
                example = decoder.decode(record)
            except RecordError as error:
                is_ignored = error.reason in decoder.mapping.ignored
                (ignored if is_ignored else refused)[error.reason] += 1
                outcome = ("ignored", "dim") if is_ignored else (f"dead letter ({error.reason})", "red")
                yield text.append(*outcome).append(f": {error}", style="")
                continue
            learned += 1
            yield text.append(f"{len(example):,} tokens, {example.num_learned:,} learned", style="")
            yield marked(example, preprocessing.tokenizer).append("\n")
    dead = [f"{count:,} {reason}" for reason, count in refused.most_common()]
    counts = [f"{learned:,} learned", *ignored_counts(ignored), f"dead letters: {', '.join(dead) or 'none'}"]
    total = learned + refused.total() + ignored.total()
    yield Text(f"of {total:,} records: {', '.join(counts)}")
    if not total:
        yield Text(f"the source had no record within {PATIENCE_S:.0f} s")


def marked(example: Example, tokenizer: Any) -> Text:
    """The text of an example with ⟦ ⟧ around what is learned; an image is one word."""
    words: list[tuple[bool, int | str]] = []
    lengths = [len(image.inputs.token_ids) for image in example.images]
    spans = dict(zip(example.image_starts, lengths, strict=True))
    end = 0
    for index, (token, label) in enumerate(zip(example.input_ids.tolist(), example.labels.tolist(), strict=True)):
        if index in spans:
            words.append((False, "[image]"))
            end = index + spans[index]
        if index >= end:
            words.append((label != IGNORED, token))
    shown = Text()
    for is_learned, run in groupby(words, key=lambda word: word[0]):
        parts = [
            "".join(map(str, tokens)) if kind is str else tokenizer.decode([*tokens], skip_special_tokens=False)
            for kind, tokens in ((kind, [*group]) for kind, group in groupby((word for _, word in run), key=type))
        ]
        text = "".join(parts)
        if is_learned:
            shown.append(f"⟦{text}⟧", style="green")
        elif len(text) > MAX_CONTEXT:
            shown.append(f"{text[: MAX_CONTEXT // 2]} [... {len(text) - MAX_CONTEXT:,} characters ...] ", style="dim")
            shown.append(text[-MAX_CONTEXT // 2 :], style="dim")
        else:
            shown.append(text, style="dim")
    return shown


def _first(source: Source, number: int) -> Iterator[Record]:
    waited = 0.0
    while number > 0 and waited < PATIENCE_S and not source.exhausted:
        records = source.poll(max_records=number, timeout_s=POLL_S)
        waited = 0.0 if records else waited + POLL_S
        yield from records
        number -= len(records)


def _from_earliest(source: SourceSettings) -> SourceSettings:
    if source.kafka is None:
        return source
    return source.model_copy(update={"kafka": source.kafka.model_copy(update={"offset_start": "earliest"})})
