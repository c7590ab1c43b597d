"""Decoding of records into training examples: token ids, and labels for those that are learned.

A record has one of these forms:

    text                    every token is learned
    prompt + completion     the completion is learned
    messages                every assistant turn is learned
    prompt + completion     lists of messages: every assistant turn of the completion is learned; a string is one turn
    input_ids               with optional labels

`meta`, the key, the headers and the timestamp are ignored. What else a topic may hold becomes such a record in
`mapping`.

A prompt or messages may come with images: `image` holds one base64 string or a list of them. They take the places of
`<image>` in the prompt, or of `{"type": "image"}` parts in a message's content, in order. Without such places they come
first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from streamlearn.errors import Reason, RecordError
from streamlearn.settings import RecordsSettings, StreamSettings
from streamlearn.stream.conversation import Conversation, read_conversation
from streamlearn.stream.encode import Encoder
from streamlearn.stream.images import (
    ImagePlaceholders,
    VisionProcessor,
    count_image_parts,
    has_images,
    record_image,
    with_image_parts,
)
from streamlearn.stream.mapping import RecordMapping
from streamlearn.stream.parse import check_tree, json_type, read_integers, read_string
from streamlearn.stream.record import FORMS, IGNORED, Example, Prompt, Record, RecordImage, Truncation
from streamlearn.stream.truncate import Draft, Turns, cut_conversation, cut_tokens, too_long

_FORM_OF = {field: form.name for form in FORMS for field in form.fields}
_WITH_IMAGES = tuple(form.name for form in FORMS if form.takes_images)


class Decoder:
    """Turns a record's bytes into an `Example`; the only error of an unusable record is RecordError."""

    def __init__(
        self,
        tokenizer: Any,
        settings: StreamSettings,
        vocab_size: int,
        sample_types: tuple[str, ...] = (),
        vision: VisionProcessor | None = None,
        template: str | None = None,
        records: RecordsSettings | None = None,
    ) -> None:
        """Build a decoder; `template` is a chat template that replaces the tokenizer's own."""
        self.mapping = RecordMapping(records or RecordsSettings(), settings)
        self._settings = settings
        self._placeholders = ImagePlaceholders(vision, settings)
        self._sample_types = sample_types  # empty: sample types are not used, and any is accepted
        self._vocab_size = vocab_size
        self._encoder = Encoder(tokenizer, template, in_parts=vision is not None)
        self._drafts: dict[str, Callable[[Mapping[str, Any]], _Source]] = {
            "text": self._text,
            "prompt + completion": self._prompt,
            "messages": self._messages,
            "input_ids": self._input_ids,
        }

    def decode(self, record: Record) -> Example:
        """Decode a record's value.

        Raises:
            RecordError: with the reason, what must hold and what was found.
        """
        if record.unreadable:
            raise RecordError(Reason.UNREADABLE, record.unreadable)
        return self._decoded(self.mapping.parse(record.value))

    def decode_value(self, value: Mapping[str, Any]) -> Example:
        """Decode an object that is parsed already, as in a request; it has the form of the topic's records.

        Raises:
            RecordError: with the reason, what must hold and what was found.
        """
        check_tree(dict(value), self._settings)
        return self._decoded(value)

    def _decoded(self, value: Mapping[str, Any]) -> Example:
        value = self.mapping.canonical(value)
        form = self._form(value)
        draft, truncation = self._fitted(self._drafts[form](value), form)
        input_ids, labels = (np.array(tokens, dtype=np.int64) for tokens in (draft.ids, draft.labels))
        labels[:1] = IGNORED  # nothing predicts the first token
        if not (labels != IGNORED).any():
            raise RecordError(
                Reason.NOTHING_TO_LEARN, f"a record must contain a token to learn, found none in {len(labels)} tokens"
            )
        if input_ids.max() >= self._vocab_size:
            raise RecordError(
                Reason.TOKEN_OUT_OF_RANGE,
                f"tokens must be below the model's vocabulary size {self._vocab_size}, its tokenizer returned "
                f"{input_ids.max()}",
            )
        ids = input_ids.astype(np.int32)
        return Example(
            ids,
            labels.astype(np.int32),
            self._sample_type(value),
            draft.images,
            draft.image_starts,
            self._placeholders.positions(ids, draft.images),
            truncation,
        )

    def with_images(self, example: Example, data: Sequence[bytes]) -> Example:
        """Return an example with its images, given their bytes."""
        assert self._placeholders.vision is not None, "only a decoder with vision stores images"
        images = tuple(record_image(image, self._placeholders.vision, self._settings) for image in data)
        ids: list[int] = example.input_ids.tolist()
        image_starts: list[int] = []
        end = 0
        for image in images:
            tokens = list(image.inputs.token_ids)
            image_starts.append(next(at for at in range(end, len(ids)) if ids[at : at + len(tokens)] == tokens))
            end = image_starts[-1] + len(tokens)
        positions = self._placeholders.positions(example.input_ids, images)
        for image in images:
            image.drop_inputs()
        return replace(example, images=images, image_starts=tuple(image_starts), positions=positions)

    @property
    def stop(self) -> frozenset[int]:
        return self._encoder.stop

    def check_template(self) -> None:
        """See `Encoder.check_template`."""
        self._encoder.check_template()

    def text(self, ids: Sequence[int]) -> str:
        return self._encoder.to_text(ids)

    def prompt(self, value: str | Sequence[Mapping[str, Any]], image: object = None) -> Prompt:
        """Encode a text, or a conversation up to the assistant's next turn; `image` is as in a record.

        A longer prompt than `max_tokens` is truncated as that of a record.

        Raises:
            RecordError: the messages are invalid, or the prompt is empty or too long.
        """
        images = self._placeholders.images({} if image is None else {"image": image})
        if isinstance(value, str):
            ids = self._placeholders.encode_prompt(self._encoder, read_string(value, "prompt", self._settings), images)
            source = _Source(self._expanded(ids, [IGNORED] * len(ids), images, answer=len(ids)))
        else:
            check_tree(list(value), self._settings)
            conversation = self._conversation({"messages": list(value)})

            def encode(turns: Turns) -> Draft:
                ids = self._encoder.generation_prompt([message for message, _ in turns], conversation.tools)
                return self._expanded(ids, [IGNORED] * len(ids), images, answer=len(ids))

            turns = [(message, False) for message in with_image_parts(conversation.messages, images)]
            source = _Source(encode(turns), turns, encode)
        draft, truncation = self._fitted(source, "prompt")
        if not draft.ids:
            raise RecordError(Reason.NOTHING_TO_LEARN, "a prompt must have at least one token, found none")
        positions = self._placeholders.positions(np.array(draft.ids, dtype=np.int32), images)
        return Prompt(draft.ids, images, positions, truncation)

    def _form(self, value: Mapping[str, Any]) -> str:
        form = _form(value)
        if has_images(value):
            if self._placeholders.vision is None:
                raise RecordError(
                    Reason.BAD_FORM, "image: this backbone reads only text; set backbone.model to an image-text model"
                )
            if form not in _WITH_IMAGES:
                raise RecordError(Reason.BAD_FORM, f"image requires {' or '.join(_WITH_IMAGES)}, found it with {form}")
        return form

    def _sample_type(self, value: Mapping[str, Any]) -> str | None:
        found: str | None = value.get("sample_type")
        if found is not None and self._sample_types and found not in self._sample_types:
            raise RecordError(
                Reason.BAD_FORM, f"sample_type must be one of {', '.join(self._sample_types)}, found {found[:80]!r}"
            )
        return found

    def _text(self, value: Mapping[str, Any]) -> "_Source":
        text = read_string(value["text"], "text", self._settings)
        ids = [*self._encoder.bos, *self._encoder.text(text), *self._encoder.eos]
        return _Source(Draft(ids, [IGNORED] * len(self._encoder.bos) + ids[len(self._encoder.bos) :], None))

    def _prompt(self, value: Mapping[str, Any]) -> "_Source":
        for name in ("prompt", "completion"):
            if name not in value:
                raise RecordError(Reason.BAD_FORM, f"prompt and completion must come together, {name} is missing")
        if isinstance(value["prompt"], list) or isinstance(value["completion"], list):
            return self._messages(value)
        if value.get("tools"):
            raise RecordError(Reason.BAD_FORM, "tools need a prompt of messages, found a string")
        prompt, completion = (read_string(value[name], name, self._settings) for name in ("prompt", "completion"))
        # Encoded separately, as in generation: no token spans the boundary.
        images = self._placeholders.images(value)
        ids = self._placeholders.encode_prompt(self._encoder, prompt, images)
        ids, labels, image_starts = self._placeholders.expand(ids, [IGNORED] * len(ids), images)
        answer = [*self._encoder.text(completion), *self._encoder.eos]
        return _Source(Draft(ids + answer, labels + answer, len(ids), images, image_starts))

    def _messages(self, value: Mapping[str, Any]) -> "_Source":
        conversation = self._conversation(value)
        images = self._placeholders.images(value)
        placed = with_image_parts(conversation.messages, images)  # before turns are dropped, with their images
        conversation = replace(conversation, messages=placed).up_to_last_answer()
        images = images[: count_image_parts(conversation.messages)]

        def encode(turns: Turns) -> Draft:
            learned = [i for i, (_, is_learned) in enumerate(turns) if is_learned]
            ids, labels = self._encoder.chat([message for message, _ in turns], conversation.tools, learned)
            starts = (t for t in range(len(ids)) if labels[t] != IGNORED and not (t and labels[t - 1] != IGNORED))
            return self._expanded(ids, labels, images, answer=max(starts, default=0))

        turns = [(message, i in conversation.learned) for i, message in enumerate(conversation.messages)]
        return _Source(encode(turns), turns, encode)

    def _expanded(self, ids: list[int], labels: list[int], images: tuple[RecordImage, ...], *, answer: int) -> Draft:
        """The draft with each image's tokens in place of its placeholder; images come before the answer."""
        new_ids, new_labels, image_starts = self._placeholders.expand(ids, labels, images)
        return Draft(new_ids, new_labels, answer + len(new_ids) - len(ids), images, image_starts)

    def _conversation(self, value: Mapping[str, Any]) -> Conversation:
        return read_conversation(
            value,
            self._settings,
            fields=self._encoder.message_fields,
            in_parts=self._placeholders.vision is not None,
        )

    def _input_ids(self, value: Mapping[str, Any]) -> "_Source":
        if "input_ids" not in value:
            raise RecordError(Reason.BAD_FORM, "labels must come with input_ids, which is missing")
        ids = self._tokens(value, "input_ids")
        labels = self._tokens(value, "labels") if "labels" in value else ids.copy()
        if len(labels) != len(ids):
            raise RecordError(
                Reason.BAD_FORM, f"labels must be as long as input_ids, {len(ids)} tokens, found {len(labels)}"
            )
        self._placeholders.expand(ids, labels, ())  # refuses image tokens without an image
        first = next((t for t, label in enumerate(labels) if label != IGNORED), 0)
        return _Source(Draft(ids, labels, first if first > 1 else None))

    def _tokens(self, value: Mapping[str, Any], name: str) -> list[int]:
        tokens = read_integers(value[name], name, self._settings)
        checked = [token for token in tokens if token != IGNORED] if name == "labels" else tokens
        if checked and (min(checked) < 0 or max(checked) >= self._vocab_size):
            wrong = next(token for token in checked if not 0 <= token < self._vocab_size)
            found = str(wrong) if wrong.bit_length() <= 64 else "more than 64 bits"
            raise RecordError(
                Reason.TOKEN_OUT_OF_RANGE, f"{name} must be in 0 to {self._vocab_size - 1}, found {found}"
            )
        return tokens

    def _fitted(self, source: "_Source", form: str) -> tuple[Draft, Truncation | None]:
        """The draft with at most `max_tokens`, and what was cut."""
        draft, limit = source.draft, self._settings.max_tokens
        if len(draft.ids) <= limit:
            return draft, None
        if self._settings.overlong == "dead_letter":
            raise too_long(limit, len(draft.ids))
        fitted = draft
        if source.encode is not None and self._settings.overlong == "middle":
            fitted = cut_conversation(source.turns, draft, limit, source.encode, self._encoder.offsets)
        if len(fitted.ids) > limit:
            fitted = cut_tokens(fitted, self._settings, self._encoder.bos, self._placeholders.margins)
        return fitted, Truncation(form, len(draft.ids) - len(fitted.ids), draft.detection_input(limit))


@dataclass(frozen=True)
class _Source:
    """A record's draft, and if it is a conversation the means to encode a part of it."""

    draft: Draft
    turns: Turns = field(default_factory=list)
    encode: Callable[[Turns], Draft] | None = None


def _form(value: Mapping[str, Any]) -> str:
    """Return the form of a canonical record, which its keys decide."""
    forms = list(dict.fromkeys(form for key, form in _FORM_OF.items() if key in value))
    if len(forms) != 1:
        known = ", ".join(dict.fromkeys(_FORM_OF.values()))
        raise RecordError(
            Reason.BAD_FORM, f"a record must have one of the forms {known}, found {' and '.join(forms) or 'none'}"
        )
    if not isinstance(value.get("sample_type", ""), str):
        raise RecordError(Reason.BAD_TYPE, f"sample_type must be a string, found {json_type(value['sample_type'])}")
    return forms[0]
