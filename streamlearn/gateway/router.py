"""Routing of requests by a published state: the daemon's own encoding, features, classifier and threshold.

It has no model. The same prompt gets the same regime and score here and from the daemon's `/v1/route`, as of the
snapshot that was published.
"""

from typing import Any

import numpy as np

from streamlearn.errors import RecordError
from streamlearn.gateway.prompt import Prompt
from streamlearn.gateway.routed_prompt import RoutedPrompt
from streamlearn.http.replies import ApiError
from streamlearn.publish.publication import Publication
from streamlearn.settings import StreamSettings
from streamlearn.shift.featurizer import Featurizer, input_of_prompt
from streamlearn.shift.monitor_state import MonitorState
from streamlearn.shift.request_classifier import RequestClassifier
from streamlearn.stream.decode import Decoder

_UNLIMITED = 1 << 40
_LIMITS = StreamSettings(max_string_chars=_UNLIMITED, max_tokens=_UNLIMITED, batch_tokens=_UNLIMITED)
"""The body's size is limited already, and the model servers have limits of their own."""


def decoder_of(tokenizer: Any) -> Decoder:
    """The daemon's encoding of prompts, with this tokenizer."""
    return Decoder(tokenizer, _LIMITS, vocab_size=len(tokenizer))


class Router:
    """The regimes of one publication. Safe to use from several threads."""

    def __init__(self, publication: Publication, state: MonitorState, decoder: Decoder) -> None:
        self._threshold = publication.max_known_rejected
        self._by_slot = {each.slot: each for each in publication.regimes}
        self._featurizer = Featurizer(publication.seed)
        self._classifier = RequestClassifier.of(state) if state.detector.regimes else None
        self._decoder = decoder

    def route(self, prompt: Prompt) -> RoutedPrompt:
        """The regime that explains a prompt, if any.

        Raises:
            ApiError: 400, the prompt cannot be encoded.
        """
        ids = self._encode(prompt)
        if self._classifier is None:  # before the first record nothing is known
            return RoutedPrompt(None, 0.0)
        assigned = self._classifier.assign(self._featurizer.featurize(ids))
        known = assigned.p_value >= self._threshold
        return RoutedPrompt(self._by_slot[assigned.slot] if known else None, assigned.p_value)

    def _encode(self, prompt: Prompt) -> np.ndarray[Any, np.dtype[np.int32]]:
        if prompt and isinstance(prompt, tuple) and isinstance(prompt[0], int):
            return np.array(prompt, dtype=np.int32)
        try:
            return input_of_prompt(self._decoder.prompt(prompt))  # type: ignore[arg-type]  # text or messages
        except RecordError as error:
            raise ApiError(400, "unusable_prompt", str(error), hint="name a model to send it unrouted") from error
