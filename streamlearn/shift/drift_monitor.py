"""Shift detection by itself: texts in, each one's regime and the shifts out. Needs no torch and no model in memory."""
# Shape suffixes: T tokens, V vocabulary, W width of a backbone.

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ValidationError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from streamlearn.errors import ConfigError, Reason, RecordError
from streamlearn.model_files import embedding_rows, fetch, load_tokenizer, pinned, text_folder
from streamlearn.settings import BackboneSettings, ShiftSettings
from streamlearn.settings.faults import explain
from streamlearn.shift.detector import Shift
from streamlearn.shift.features import CHUNK, Featurizer, token_vectors
from streamlearn.shift.monitor import AssignedBatch, Monitor
from streamlearn.stream.encode import Encoder
from streamlearn.stream.record import IGNORED, Batch, Example


@dataclass(frozen=True)
class Decision:
    """The final decision about one text. All fields are empty while too few texts follow the first one."""

    record: int | None = None
    """Ordinal of the text that it is about, from 1 in the order of the updates."""
    regime: int | None = None
    """Number of its regime, from 1 in the order of their first appearance. Numbers are never reused."""
    shifts: tuple[Shift, ...] = ()
    """Shifts that begin with it, in order. The first regime of the stream is none."""

    @property
    def shift(self) -> Shift | None:
        """The last of `shifts`; None if there is none."""
        return self.shifts[-1] if self.shifts else None


class DriftMonitor:
    """Finds where a stream of texts changes, without labels, as the daemon does (`streamlearn.shift.monitor`).

        monitor = DriftMonitor("builtin:nano")
        for text in texts:
            decision = monitor.update(text)
            if decision.shift:
                print(decision.record, decision.regime, decision.shift.known)
        for decision in monitor.flush():   # about the last texts
            ...

    A decision needs `lookahead_records` later texts: with the default of 16, the update with text 17 returns the
    decision about text 1. A change is usually declared (`Shift.declared_at`) a few texts after its first one
    (`Shift.onset`), within this look-ahead. One that is declared later belongs to the oldest text not yet decided.

    The inputs alone decide. Changes of the answers to the same inputs need the losses of a model, which the daemon has.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        revision: str | None = None,
        embeddings: ArrayLike | None = None,
        seed: int = 0,
        **shift: Any,
    ) -> None:
        """Start before the first text.

        Args:
            tokenizer: A model as in `backbone.model`: `builtin:nano`, a folder, or a hub id; its tokenizer and its
                token embeddings are read from the files. Or a tokenizer of `tokenizers`, or a fast one of transformers.
            revision: Commit of a hub id, 40 hex digits; by default the newest.
            embeddings: (V, W) token embeddings of a model, by token id. They find changes of meaning that the tokens
                by themselves show late. By default those of the model; for a bare tokenizer, random vectors.
            seed: Seed of the random vectors, as `seed` in the configuration.
            shift: Settings of the section `shift`, such as `lookahead_records=0`.

        Raises:
            ConfigError: a setting is wrong or unknown, named as in the configuration (`shift.lookahead_records`), or
                the model, tokenizer or embeddings cannot be used.
        """
        try:
            settings = ShiftSettings(**shift)
        except ValidationError as error:
            raise ConfigError("\n".join(explain(error, ShiftSettings, "shift"))) from None
        vectors = None if embeddings is None else token_vectors(_chunks(embeddings))
        if isinstance(tokenizer, str | Path):
            model = str(tokenizer)
            folder = text_folder(fetch(BackboneSettings(model=model, revision=pinned(model, revision))))
            try:
                tokenizer = load_tokenizer(folder)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{folder}: its tokenizer cannot be loaded: {error}") from error
            if vectors is None:
                vectors = token_vectors(embedding_rows(folder, CHUNK))
        elif isinstance(tokenizer, Tokenizer):
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        self._encoder = Encoder(tokenizer)
        self._monitor = Monitor(settings, Featurizer(seed, vectors))
        self._num_decided = 0

    def update(self, text: str | Sequence[int] | NDArray[np.integer]) -> Decision:
        """Read the next text; return the decision that it makes final.

        Args:
            text: A text, which is encoded like the prompt of a record, or the (T,) ids of its tokens.

        Raises:
            RecordError: it has no token, or the ids are not integers from 0. The monitor is unchanged.
        """
        ids_T = np.array([*self._encoder.bos, *self._encoder.text(text)] if isinstance(text, str) else text)
        if ids_T.ndim != 1 or not ids_T.size:
            raise RecordError(
                Reason.NOTHING_TO_LEARN, f"a text must have at least one token, found ids of shape {ids_T.shape}"
            )
        if not np.issubdtype(ids_T.dtype, np.integer) or ids_T.min() < 0:
            raise RecordError(Reason.TOKEN_OUT_OF_RANGE, "token ids must be integers from 0")
        input_ids = ids_T.astype(np.int32)
        self._monitor.update(Batch((), (Example(input_ids, np.full_like(input_ids, IGNORED)),)))
        assigned = self._monitor.take()
        return Decision() if assigned is None else self._decision(assigned)

    def flush(self) -> list[Decision]:
        """Return the decisions about all texts that are not decided, without waiting for later ones. Then go on."""
        self._monitor.flush()
        return [self._decision(assigned) for assigned in iter(self._monitor.take, None)]

    def _decision(self, assigned: AssignedBatch) -> Decision:
        self._num_decided += 1
        [slot] = assigned.slots
        shifts = tuple(shift for shift in assigned.shifts if shift.previous is not None)
        return Decision(self._num_decided, self._monitor.state.detector.numbers[slot], shifts)


def _chunks(embeddings: ArrayLike) -> list[NDArray[np.float32]]:
    table_VW = np.asarray(embeddings, dtype=np.float32)
    if table_VW.ndim != 2 or not table_VW.size:
        raise ConfigError(f"embeddings must be an array (vocabulary, width), found shape {table_VW.shape}")
    return [table_VW[start : start + CHUNK] for start in range(0, len(table_VW), CHUNK)]
