"""Encoding of text to token ids, with the assistant's turns marked.

Text cannot forge a turn. A string that names a control token, such as `<|im_end|>`, is encoded letter by letter where a
record contains it, and as the control token where the chat template writes it. The encoder keeps two private copies of
the tokenizer's core for this: `encode_special_tokens`, which makes the difference, is a flag of the core that any call
through transformers may change.
"""

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Encoding, Tokenizer

from streamlearn.errors import ConfigError, Reason, RecordError
from streamlearn.stream.record import IGNORED
from streamlearn.stream.template import SAMPLE, ChatTemplate, Message, Rendering, Tools, Turn

_MASKS = range(0xF0000, 0xF0100)  # private use: one of them masks the names of control tokens during rendering
_REASONING_MARKS = ("<think>", "</think>")  # the model's own words, though templates write them too


class Encoder:
    """A tokenizer in which only the chat template can write control tokens; a record's text cannot."""

    def __init__(self, tokenizer: Any, template: str | None = None, *, in_parts: bool = False) -> None:
        """Build an encoder.

        Args:
            tokenizer: a fast tokenizer of transformers.
            template: a chat template that replaces the tokenizer's own.
            in_parts: whether the template expects every content as a list of parts.
        """
        core = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(core, Tokenizer):
            raise ConfigError(
                f"the backbone must have a fast tokenizer (tokenizer.json), found {type(tokenizer).__name__}"
            )
        self._tokenizer = tokenizer
        self._template, self._tool_template = (
            None if source is None else ChatTemplate(tokenizer, source, in_parts=in_parts)
            for source in ((template, template) if template is not None else _templates(tokenizer))
        )
        self.bos = _bos(core, tokenizer.bos_token_id)
        self.eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        description = json.loads(core.to_str()) | {"post_processor": None, "truncation": None, "padding": None}
        controls = self._controls(description["added_tokens"])
        for token in controls:
            token["special"] = True
        self._plain = Tokenizer.from_str(json.dumps(description))
        self._plain.encode_special_tokens = True
        self._ids = {token["content"]: token["id"] for token in controls}
        self._forged = frozenset(self._ids.values()) - {tokenizer.unk_token_id}
        self._names = list(self._ids)
        self._name = re.compile("|".join(re.escape(name) for name in self._names) or "(?!)")
        self._marker = re.compile("|".join(_marker(token) for token in controls) or "(?!)")
        for chat_template in filter(None, {self._template, self._tool_template}):
            chat_template.learn_habits(self._marker)
        turn_end = None if self._template is None else self._template.turn_end
        self.stop = frozenset([*self.eos, *([] if turn_end is None else [self._ids[turn_end]])])
        joint = Tokenizer.from_str(json.dumps(description))
        self._adds_prefix = True
        self._newline = self._encode_each(["\n"])[0]
        self._adds_prefix = self._encode_each(["a"]) != self._continued(["a"])
        after_control = joint.encode(f"{self._names[-1]}a", add_special_tokens=False).ids[1:] if self._names else []
        self._prefix_after_control = after_control == self._encode_each(["a"])[0]

    def _controls(self, added: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The special tokens and other tokens that the chat template writes by itself; longest first, for matching."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
        try:
            written = "" if self._template is None else self._template.render([*turns, turns[0]], generate=True)
        except RecordError:
            written = ""
        chosen = [
            token
            for token in added
            if token["special"]
            or (
                token["content"] in written
                and token["content"] not in _REASONING_MARKS
                and re.search(r"[^\w\s]", token["content"])
            )
        ]
        return sorted(chosen, key=lambda token: -len(token["content"]))

    def text(self, text: str) -> list[int]:
        """Encode a record's text; names of control tokens are encoded letter by letter."""
        [encoding] = self._plain.encode_batch_fast([text], add_special_tokens=False)  # without offsets
        return self._without_controls(encoding).ids

    def check_template(self) -> None:
        """Check that every answer of a sample conversation of three turns is learned.

        Raises:
            ConfigError: names what is lost.
        """
        if self._template is None:
            return
        advice = "write chat_template.jinja in the backbone's folder so that it renders every turn"
        try:
            _, labels = self.chat(SAMPLE)
        except RecordError as error:
            message = f"the backbone's chat template must render a conversation of three turns: {error}; {advice}"
            raise ConfigError(message) from error
        text = str(self._tokenizer.decode([label for label in labels if label != IGNORED])).casefold()
        answers = [message["content"] for message in SAMPLE if message["role"] == "assistant"]
        lost = [answer for answer in answers if answer.casefold() not in text]
        if lost:
            raise ConfigError(
                f"the backbone's chat template must render every answer of a conversation of three turns, lost are "
                f"{', '.join(map(repr, lost))}; {advice}"
            )

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Return where each token of a record's text starts and ends."""
        return self._plain.encode(text, add_special_tokens=False).offsets

    def chat(
        self, messages: Sequence[Message], tools: Tools | None = None, learned: Collection[int] | None = None
    ) -> tuple[list[int], list[int]]:
        """Encode messages up to the last answer; return the tokens, and their labels.

        1. Mask the names of control tokens in the contents: those in the rendering are then the template's own.
        2. Find each turn in the rendering.
        3. Restore the names and encode prompts and answers apart, as generation does.

        Args:
            messages: The messages.
            tools: What the model may call.
            learned: Indices of the messages that are learned, of those of the assistant; None: all.
        """
        template = self._template_for(tools)
        masked, masked_tools, unmask = self._mask(template.adapted(messages), tools)  # 1.
        rendering = template.locate(masked, masked_tools)  # 2.
        segments = list(_segments(rendering))
        encoded = self._encode(rendering.text, [(start, end) for start, end, _ in segments], unmask)  # 3.
        ids: list[int] = []
        labels: list[int] = []
        ends: list[int] = []  # where an answer without an end ends
        for tokens, (_, end, turn) in zip(encoded, segments, strict=True):
            is_learned = turn is not None and (learned is None or turn.message in learned)
            ids += tokens
            labels += tokens if is_learned else [IGNORED] * len(tokens)
            if turn is not None and is_learned and not turn.has_end and end == turn.learned[-1].end:
                ends.append(len(ids))
        for position in ends:
            self._learn_end(ids, labels, position)
        return ids, labels

    def _learn_end(self, ids: list[int], labels: list[int], position: int) -> None:
        """Make eos the token to learn at `position`, after an answer without an end.

        Between turns only the label changes: prompts of later turns stay as generation has them.
        """
        if position == len(ids):
            ids += self.eos
            labels += self.eos
        elif self.eos and labels[position] == IGNORED:
            [labels[position]] = self.eos

    def generation_prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Encode a conversation up to the start of the assistant's next turn."""
        template = self._template_for(tools)
        masked, masked_tools, unmask = self._mask(template.adapted(messages), tools)
        try:
            rendering = template.locate(masked, masked_tools, generate=True)
        except RecordError:  # an answer that cannot be learned can still be part of a prompt
            rendering = Rendering(template.render(masked, masked_tools, generate=True), ())
        cuts = [0, *(cut for turn in rendering.turns for cut in turn.span), len(rendering.text)]
        encoded = self._encode(rendering.text, list(itertools.pairwise(cuts)), unmask)
        return [token for tokens in encoded for token in tokens]

    @property
    def message_fields(self) -> frozenset[str]:
        """Names of fields that the chat template may read from a message."""
        templates = filter(None, {self._template, self._tool_template})
        return frozenset(name for template in templates for name in template.fields)

    def _template_for(self, tools: Tools | None) -> ChatTemplate:
        template = self._tool_template if tools else self._template
        if template is None:
            raise RecordError(Reason.BAD_FORM, "messages need a chat template, the backbone's tokenizer has none")
        if tools and not template.reads_tools:
            raise RecordError(Reason.BAD_FORM, "tools cannot be learned: the chat template does not write them")
        return template

    def to_text(self, ids: Sequence[int]) -> str:
        """Decode tokens to text, without control tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _mask(
        self, messages: list[Message], tools: Tools | None
    ) -> tuple[list[Message], Tools | None, Callable[[str], str]]:
        """Messages and tools with the names of control tokens masked, and the function that restores them."""
        texts = list(_strings([messages, tools or ()]))
        if not any(self._name.search(text) for text in texts):
            return messages, tools, str
        mark = next((chr(c) for c in _MASKS if not any(chr(c) in text for text in texts)), None)
        if mark is None:
            raise RecordError(
                Reason.BAD_FORM,
                "messages contain names of control tokens and every private-use character: none is left to mask them",
            )

        def mask(text: str) -> str:
            return self._name.sub(lambda m: f"{mark}{self._names.index(m[0])}{mark}", text)

        def unmask(text: str) -> str:
            return re.sub(f"{mark}([0-9]+){mark}", lambda m: self._names[int(m[1])], text)

        masked = [{**_mapped(message, mask), "role": message["role"]} for message in messages]
        return masked, None if tools is None else _mapped(tools, mask), unmask

    def _encode(self, text: str, segments: Sequence[tuple[int, int]], unmask: Callable[[str], str]) -> list[list[int]]:
        """Token ids of each segment of a rendering; the segments are consecutive."""
        encoded: list[list[int]] = [[] for _ in segments]
        pieces: list[tuple[int, list[int] | str, bool]] = []  # its segment, token or text, whether a prefix is added
        adds_prefix = True
        for number, (start, end) in enumerate(segments):
            for piece, control in self._pieces(text[start:end]):
                if control is not None:
                    pieces.append((number, [control], False))
                    adds_prefix = self._prefix_after_control
                elif piece:
                    pieces.append((number, unmask(piece), adds_prefix))
                    adds_prefix = False
        starts = iter(self._encode_each([piece for _, piece, prefix in pieces if isinstance(piece, str) and prefix]))
        others = iter(self._continued([piece for _, piece, prefix in pieces if isinstance(piece, str) and not prefix]))
        for number, token_or_text, prefix in pieces:
            encoded[number] += token_or_text if isinstance(token_or_text, list) else next(starts if prefix else others)
        return encoded

    def _encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts in which no control token is recognized."""
        encodings = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)  # without offsets
        return [self._without_controls(encoding).ids for encoding in encodings]

    def _continued(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts that follow another one: tokenizers like SentencePiece put a space before the first only."""
        if not self._adds_prefix:
            return self._encode_each(texts)
        newline = len(self._newline)
        encoded = zip(texts, self._encode_each([f"\n{text}" for text in texts]), strict=True)
        return [
            ids[newline:] if ids[:newline] == self._newline else self._encode_each([text])[0] for text, ids in encoded
        ]

    def _pieces(self, whole: str) -> Iterator[tuple[str, int | None]]:
        """Split the rendering at the template's control tokens: each piece, with its id if it is a control token."""
        end = 0
        for match in self._marker.finditer(whole):
            yield whole[end : match.start()], None
            name = self._name.search(match[0])
            assert name is not None
            yield match[0], self._ids[name[0]]
            end = match.end()
        yield whole[end:], None

    def _without_controls(self, encoding: Encoding) -> Encoding:
        if not self._forged.isdisjoint(encoding.ids):
            name = next(name for name in self._names if self._ids[name] in encoding.ids)
            raise RecordError(
                Reason.BAD_FORM,
                f"text must not contain {name}: this tokenizer can encode it only as the control token",
            )
        return encoding


def _segments(rendering: Rendering) -> Iterator[tuple[int, int, Turn | None]]:
    """Divide a rendering at its turns, up to the end of the last one; each part, with its turn if it is learned."""
    position = 0
    for turn in rendering.turns:
        cuts: list[tuple[int, Turn | None]] = [(turn.span.start, None)]
        for start, end in turn.learned:
            cuts += [(start, None), (end, turn)]
        for cut, learned in (*cuts, (turn.span.end, None)):
            yield position, cut, learned
            position = cut


def _templates(tokenizer: Any) -> tuple[str | None, str | None]:
    """The tokenizer's chat templates: for conversations, and for those with tools."""
    try:
        return str(tokenizer.get_chat_template()), str(tokenizer.get_chat_template(tools=[{}]))
    except ValueError:
        return None, None


def _strings(value: object) -> Iterator[str]:
    """Every string in a tree, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A tree with `change` applied to every string, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_mapped(item, change) for item in value]
    return value


def _bos(core: Tokenizer, bos: int | None) -> list[int]:
    """The bos token, if the tokenizer puts it before a text."""
    first = core.encode("a", add_special_tokens=True).ids[:1]
    return [bos] if bos is not None and first == [bos] else []


def _marker(token: dict[str, Any]) -> str:
    """Pattern of a control token in a rendering; some include the whitespace beside them."""
    left, right = (r"\s*" if token[side] else "" for side in ("lstrip", "rstrip"))
    return f"{left}{re.escape(token['content'])}{right}"
