"""Decoding of records into training examples: token ids, and labels for those that are learned.

A record has one of these forms:

    text                    every token is learned
    prompt + completion     the completion is learned
    messages                every assistant turn is learned
    prompt + completion     lists of messages: every assistant turn of the completion is learned
    input_ids               with optional labels

`meta`, the key, the headers and the timestamp are ignored. What else a topic may hold becomes such a record in
`mapping`.

A prompt or messages may come with images: `image` holds one base64 string or a list of them. They take the places of
`<image>` in the prompt, or of `{"type": "image"}` parts in a message's content, in order. Without such places they come
first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from streamlearn.errors import Reason, RecordError
from streamlearn.settings import RecordsSettings, StreamSettings
from streamlearn.stream.conversation import Conversation, read_conversation
from streamlearn.stream.encode import Encoder
from streamlearn.stream.images import ImagePlaceholders, VisionProcessor, has_images, record_image, with_image_parts
from streamlearn.stream.mapping import RecordMapping
from streamlearn.stream.parse import json_type, read_integers, read_string
from streamlearn.stream.record import FORMS, IGNORED, Example, Prompt, Record, RecordImage

_FORM_OF = {field: form.name for form in FORMS for field in form.fields}
_WITH_IMAGES = tuple(form.name for form in FORMS if form.takes_images)


class _Draft(NamedTuple):
    """Tokens before truncation; `answer` is the index where the last completion starts, None without a prompt."""

    ids: list[int]
    labels: list[int]
    answer: int | None
    images: tuple[RecordImage, ...] = ()
    image_starts: tuple[int, ...] = ()


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
        self._drafts: dict[str, Callable[[Mapping[str, Any]], _Draft]] = {
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
        return self.decode_value(self.mapping.parse(record.value))

    def decode_value(self, value: Mapping[str, Any]) -> Example:
        """Decode an object that is parsed already, as in a request; it has the form of the topic's records.

        Raises:
            RecordError: with the reason, what must hold and what was found.
        """
        value = self.mapping.canonical(value)
        draft = self._truncate(self._drafts[self._form(value)](value))
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

    def text(self, ids: Sequence[int]) -> str:
        return self._encoder.to_text(ids)

    def prompt(self, value: str | Sequence[Mapping[str, Any]], image: object = None) -> Prompt:
        """Encode a text, or a conversation up to the assistant's next turn; `image` is as in a record.

        Raises:
            RecordError: the messages are invalid, or the prompt is empty or longer than `max_tokens`.
        """
        images = self._placeholders.images({} if image is None else {"image": image})
        if isinstance(value, str):
            ids = self._placeholders.encode_prompt(self._encoder, read_string(value, "prompt", self._settings), images)
        else:
            conversation = self._conversation({"messages": list(value)})
            ids = self._encoder.generation_prompt(with_image_parts(conversation.messages, images))
        ids, _, _ = self._placeholders.expand(ids, [IGNORED] * len(ids), images)
        if not 0 < len(ids) <= self._settings.max_tokens:
            raise RecordError(
                Reason.TOO_MANY_TOKENS, f"a prompt must have 1 to {self._settings.max_tokens} tokens, found {len(ids)}"
            )
        return Prompt(ids, images, self._placeholders.positions(np.array(ids, dtype=np.int32), images))

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

    def _text(self, value: Mapping[str, Any]) -> _Draft:
        text = read_string(value["text"], "text", self._settings)
        ids = [*self._encoder.bos, *self._encoder.text(text), *self._encoder.eos]
        return _Draft(ids, [IGNORED] * len(self._encoder.bos) + ids[len(self._encoder.bos) :], None)

    def _prompt(self, value: Mapping[str, Any]) -> _Draft:
        for name in ("prompt", "completion"):
            if name not in value:
                raise RecordError(Reason.BAD_FORM, f"prompt and completion must come together, {name} is missing")
        if isinstance(value["prompt"], list):
            return self._messages(value)
        if value.get("tools"):
            raise RecordError(Reason.BAD_FORM, "tools need a prompt of messages, found a string")
        prompt, completion = (read_string(value[name], name, self._settings) for name in ("prompt", "completion"))
        # Encoded separately, as in generation: no token spans the boundary.
        images = self._placeholders.images(value)
        ids = self._placeholders.encode_prompt(self._encoder, prompt, images)
        ids, labels, image_starts = self._placeholders.expand(ids, [IGNORED] * len(ids), images)
        answer = [*self._encoder.text(completion), *self._encoder.eos]
        return _Draft(ids + answer, labels + answer, len(ids), images, image_starts)

    def _messages(self, value: Mapping[str, Any]) -> _Draft:
        conversation = self._conversation(value).up_to_last_answer()
        images = self._placeholders.images(value)
        messages = with_image_parts(conversation.messages, images)
        ids, labels = self._encoder.chat(messages, conversation.tools, conversation.learned)
        ids, labels, image_starts = self._placeholders.expand(ids, labels, images)
        starts = (t for t in range(len(ids)) if labels[t] != IGNORED and not (t and labels[t - 1] != IGNORED))
        return _Draft(ids, labels, max(starts, default=0), images, image_starts)

    def _conversation(self, value: Mapping[str, Any]) -> Conversation:
        return read_conversation(
            value,
            self._settings,
            fields=self._encoder.message_fields,
            in_parts=self._placeholders.vision is not None,
        )

    def _input_ids(self, value: Mapping[str, Any]) -> _Draft:
        if "input_ids" not in value:
            raise RecordError(Reason.BAD_FORM, "labels must come with input_ids, which is missing")
        ids = self._tokens(value, "input_ids")
        labels = self._tokens(value, "labels") if "labels" in value else ids.copy()
        if len(labels) != len(ids):
            raise RecordError(
                Reason.BAD_FORM, f"labels must be as long as input_ids, {len(ids)} tokens, found {len(labels)}"
            )
        self._placeholders.expand(ids, labels, ())  # refuses image tokens without an image
        return _Draft(ids, labels, None)

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

    def _truncate(self, draft: _Draft) -> _Draft:
        """Truncate to `max_tokens`: a prompt loses its beginning (bos stays), a record without a prompt its end."""
        limit = self._settings.max_tokens
        ids, labels, answer, _, image_starts = draft
        if len(ids) <= limit:
            return draft
        if self._settings.overlong == "dead_letter":
            raise RecordError(
                Reason.TOO_MANY_TOKENS, f"a record may hold at most {limit} tokens (max_tokens), found {len(ids)}"
            )
        if answer is None:
            return _Draft(ids[:limit], labels[:limit], None)
        bos = ids[:1] if answer > 0 and ids[:1] == self._encoder.bos else []
        space = limit - len(bos)
        # An answer that is itself too long keeps its beginning, after bos or else after the prompt's last token.
        start = min(len(ids) - space, max(answer - 1 + len(bos), 0))
        if image_starts:
            end = start + space - len(draft.images[-1].inputs.token_ids)
            if not start <= image_starts[0] <= image_starts[-1] < end:
                raise RecordError(
                    Reason.TOO_MANY_TOKENS,
                    f"a record may hold at most {limit} tokens (max_tokens), found {len(ids)}, and images cannot be "
                    "truncated",
                )
        kept = bos + ids[start : start + space], [IGNORED] * len(bos) + labels[start : start + space]
        moved = tuple(image_start - start + len(bos) for image_start in image_starts)
        return _Draft(*kept, answer, draft.images, moved)


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
