"""Chat templates: rendering of conversations, and where each assistant turn stands in a rendering.

A template is a program. It may trim contents, cut reasoning from earlier turns, reorder turns, open an assistant turn
always or never, and refuse conversations. Only one thing is assumed: the same messages give the same text. A turn is
found in four steps:

1. Render the conversation twice, the second time with private marks at both ends of every content. If the second
   rendering without its marks equals the first, the marks show where the contents stand. If not (a template may look at
   a content), render once per content, with that content replaced: the difference shows where it stands.
2. A turn starts where the prompt of a generation would end.
3. It ends after what the template writes behind an answer, up to the control token that ends it.
4. The template's `{% generation %}` marks, if it has them, choose what is learned between start and end.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from streamlearn.errors import Reason, RecordError

Message = dict[str, Any]
"""One turn: `role`, `content` (a string, None, or parts {"type": "image"} and {"type": "text", "text": ...}), and other
fields that templates read, such as `tool_calls`."""
Tools = Sequence[Mapping[str, Any]]
_FIXED_DATE = "{% macro strftime_now(format) %}01 Jan 2026{% endmacro %}"  # a replay must not depend on the date
_PRIVATE = range(0xE000, 0xF900)  # private use area
_FIELD = re.compile(r"""\.\s*(\w+)|\[\s*['"](\w+)['"]\s*\]|['"](\w+)['"]\s+(?:not\s+)?in\b|get\(\s*['"](\w+)['"]""")
_REASONING = re.compile(r"</?think>")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TOOL = {"type": "function", "function": {"name": "look_up", "description": "Look up.", "parameters": {}}}
_NO_CALLS = "the chat template does not write its tool_calls"
_CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "look_up", "arguments": {"word": "ink"}}}
SAMPLE: tuple[Message, ...] = tuple(
    {"role": role, "content": content}
    for question, answer in (("Is ink black?", "Often."), ("And milk?", "Milk is white."), ("Thanks", "Welcome!"))
    for role, content in (("user", question), ("assistant", answer))
)
"""Three turns, as the start renders them to check a template."""


class Span(NamedTuple):
    """A part of a text."""

    start: int
    end: int


class Turn(NamedTuple):
    """An assistant turn in a rendering."""

    message: int
    """Index of its message."""
    span: Span
    """From the end of the generation prompt to the end of the turn."""
    learned: tuple[Span, ...]
    """What of it is learned, in order."""
    has_end: bool
    """Whether it ends in a control token."""


class Rendering(NamedTuple):
    """A rendered conversation."""

    text: str
    turns: tuple[Turn, ...]
    """The assistant turns, in the order of the text."""


@dataclass(frozen=True)
class Habits:
    """What the template writes around contents, learned from a small conversation; None: unknown."""

    after_user: str | None = None
    """After the content of a user message, up to the end of the generation prompt."""
    opening: str = ""
    """What opens an assistant turn; empty if the template has no such text of its own."""
    after_answer: str | None = None
    """After an answer, up to the end of its turn."""
    always_opens: bool = False
    """Whether a conversation that ends in an answer is followed by `opening` too."""
    trims: bool = False
    """Whether white space at the end of an answer is removed."""
    arguments_as_text: bool = False
    """Whether arguments of tool calls must be JSON text rather than an object."""
    content_as_null: bool = False
    """Whether a message without content must have none rather than an empty one."""


class ChatTemplate:
    """A chat template of a tokenizer."""

    def __init__(self, tokenizer: Any, source: str, *, in_parts: bool) -> None:
        """Hold a template; `locate` needs `learn_habits` first.

        Args:
            tokenizer: A tokenizer of transformers; its special tokens are given to the template.
            source: The template.
            in_parts: Whether the template expects every content as a list of parts.
        """
        self._tokenizer = tokenizer
        self._source = _dated(source)
        self.control = re.compile("(?!)")
        """Finds control tokens in a rendering."""
        self._in_parts = in_parts
        self._has_marks = _GENERATION.search(source) is not None
        self.reads_tools = re.search(r"\btools\b", source) is not None
        """Whether it renders the tools of a record."""
        self.fields = frozenset(name for names in _FIELD.findall(source) for name in names if name)
        """Names of fields that it may read."""
        self.habits = Habits()

    def learn_habits(self, control: re.Pattern[str]) -> None:
        """Observe what the template writes; `control` finds control tokens in a rendering."""
        self.control = control
        self.habits = self._learn_calls(self._learn_habits())

    @property
    def turn_end(self) -> str | None:
        """The control token that ends an answer, if any."""
        return self.end_token(self.habits.after_answer or "")

    def end_token(self, text: str) -> str | None:
        """The first control token in a text, if any."""
        found = self.control.search(text)
        return None if found is None else found[0].strip()

    def render(self, messages: Sequence[Message], tools: Tools | None = None, *, generate: bool = False) -> str:
        """Render messages, with `generate` up to the start of the assistant's next turn.

        Raises:
            RecordError: the template refuses them.
        """
        if self._in_parts:
            messages = [{**message, "content": parts(message.get("content"))} for message in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tools=tools, chat_template=self._source, tokenize=False, add_generation_prompt=generate
                )
            )
        except Exception as error:  # a template is a program and may raise any error
            raise RecordError(Reason.BAD_FORM, f"messages must fit the chat template: {str(error)[:200]}") from error

    def adapted(self, messages: Sequence[Message]) -> list[Message]:
        """Give tool calls and absent contents the types that the template expects.

        Raises:
            RecordError: the arguments of a tool call are not a JSON object.
        """
        return [self._adapted(message, f"messages[{i}]") for i, message in enumerate(messages)]

    def _adapted(self, message: Message, where: str) -> Message:
        if message.get("content") is None and not self.habits.content_as_null:
            message = {**message, "content": ""}
        if "tool_calls" not in message:
            return message
        change = _arguments_as_text if self.habits.arguments_as_text else _arguments_as_object
        calls = [change(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(message["tool_calls"])]
        return {**message, "tool_calls": calls}

    def locate(self, messages: Sequence[Message], tools: Tools | None = None, *, generate: bool = False) -> Rendering:
        """Render messages and find every assistant turn; `generate` is as in `render`.

        Raises:
            RecordError: the template refuses them, or a turn cannot be found; names the turn and why.
        """
        return _Location(self, messages, tools, generate=generate).rendering()

    def generation_marks(self, messages: Sequence[Message], tools: Tools | None) -> tuple[str, list[Span]] | None:
        """Render messages; return the text and what the template marks as generated, None if it marks nothing."""
        if not self._has_marks:
            return None
        if self._in_parts:
            messages = [{**message, "content": parts(message.get("content"))} for message in messages]
        try:
            texts, marks = render_jinja_template(
                [list(messages)],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=self._source,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:  # a template is a program and may raise any error
            raise RecordError(Reason.BAD_FORM, f"messages must fit the chat template: {str(error)[:200]}") from error
        return texts[0], [Span(*mark) for mark in marks[0]]

    def _learn_habits(self) -> Habits:
        """Render a conversation of two turns whose contents are one private character each."""
        contents = [chr(code) for code in _PRIVATE[:4]]
        turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
        try:
            question, prompt = self.render(turns[:3]), self.render(turns[:3], generate=True)
            answered, continued = self.render(turns), self.render(turns, generate=True)
            spaced = self.render([turns[0], {**turns[1], "content": f"{contents[1]}\t"}, turns[2]])
            after_user = prompt[prompt.rindex(contents[2]) + 1 :]
            between = answered[answered.index(contents[1]) + 1 : answered.index(contents[2])]
            after_last = answered[answered.rindex(contents[3]) + 1 :]
            before_next = continued[continued.rindex(contents[3]) + 1 :]
        except (RecordError, ValueError):  # refused, or a content is not written
            return Habits()
        common = self._common(prompt, question)
        opening = "" if self.control.sub("", question[common:]).strip() else prompt[common:]
        after_answer = before_next.removesuffix(opening)
        if not between.startswith(after_answer):
            # A conversation is always followed by an opened turn: then only the beginning is the end.
            after_answer = between[: self._common(between, before_next)]
            end = self.control.search(after_answer)
            after_answer = after_answer[: 0 if end is None else end.end()]
            after_answer += _leading_space(between[len(after_answer) :])
        if self.end_token(after_answer) is None:
            after_answer = after_answer[: self._common(after_answer, after_last)].rstrip()
        rest = after_last.removeprefix(after_answer).lstrip()
        always_opens = not opening and bool(rest) and after_user.endswith(rest)
        trims = f"{contents[1]}\t" not in spaced
        return Habits(after_user, rest if always_opens else opening, after_answer, always_opens, trims)

    def _learn_calls(self, habits: Habits) -> Habits:
        """Choose the types of arguments and of absent contents with which tool calls are rendered rightly."""
        if "tool_calls" not in self.fields:
            return habits
        for as_text in (False, True):
            for content in ("", None):
                call = (_arguments_as_text if as_text else _arguments_as_object)(_CALL, "")
                answer = {"role": "assistant", "content": content, "tool_calls": [call]}
                try:
                    text = self.render([SAMPLE[0], answer], [_TOOL])
                except RecordError:
                    continue
                if "word" in text and not re.search(r"""\{'word|\\"word|None""", text):
                    return replace(habits, arguments_as_text=as_text, content_as_null=content is None)
        return habits

    def prompt_length(self, gap: str, prompt: str) -> int | None:
        """How much of `gap`, the text before an answer, the prompt of a generation has that continues with `prompt`.

        Templates may differ in white space there, or begin the reasoning in a prompt and not in a record. None if they
        differ in more.
        """
        length = self._common(gap, prompt)
        is_prompt = not _REASONING.sub("", prompt[length:]).strip()
        return length if is_prompt or not gap[length:].strip() else None

    def _common(self, one: str, other: str) -> int:
        """Length of the common beginning, in whole control tokens and marks of reasoning."""
        length = _common_prefix(one, other)
        for text in (one, other):
            for pattern in (self.control, _REASONING):
                cut = (token.start() for token in pattern.finditer(text) if token.start() < length < token.end())
                length = next(cut, length)
        return length


class _Place(NamedTuple):
    """Where a message's content stands in the rendering."""

    message: int
    span: Span


class _Location:
    """The search for the turns of one conversation."""

    def __init__(
        self, template: ChatTemplate, messages: Sequence[Message], tools: Tools | None, *, generate: bool
    ) -> None:
        self._template = template
        self._habits = template.habits
        self._messages = messages
        self._tools = tools
        self._generate = generate
        self._text = template.render(messages, tools, generate=generate)
        self._mark = next((chr(code) for code in _PRIVATE if chr(code) not in self._text), "")
        if not self._mark:
            raise RecordError(Reason.BAD_FORM, "messages contain every private-use character: none is left as a mark")

    def rendering(self) -> Rendering:
        """Find every assistant turn."""
        answers = [i for i, message in enumerate(self._messages) if message["role"] == "assistant"]
        if not answers:
            return Rendering(self._text, ())
        everything = range(len(self._messages))
        places = (
            self._marked_places(everything, empty=True)
            or self._marked_places(everything, empty=False)
            or self._marked_places(answers, empty=False)  # a template may compare the contents of users
        )
        found = {place.message for place in places}
        remaining = [i for i in (answers if places else everything) if i not in found]
        places = sorted([*places, *self._replaced_places(remaining)], key=lambda place: place.span)
        calls = {place.message: place for place in reversed(places) if self._is_call(place.message)}
        # The answer of a tool may repeat the call: the first place is the call's.
        places = [place for place in places if calls.get(place.message, place) is place]
        written = Counter(place.message for place in places)
        for answer in answers:
            if written[answer] > 1:
                raise self._lost(answer, f"the chat template writes it {written[answer]} times")
            if not written[answer]:
                has_calls = "tool_calls" in self._messages[answer]
                beside = "its content beside tool_calls" if has_calls else "it"
                raise self._lost(
                    answer, _NO_CALLS if self._is_call(answer) else f"the chat template does not write {beside}"
                )
        marked = None if self._generate else self._template.generation_marks(self._messages, self._tools)
        marks = marked[1] if marked is not None and marked[0] == self._text else []
        turns: list[Turn] = []
        for number, place in enumerate(places):
            if place.message in answers:
                before = places[number - 1] if number else None
                after = places[number + 1] if number + 1 < len(places) else None
                turns.append(self._turn(place, before, after, marks))
                if len(turns) > 1 and turns[-1].span.start < turns[-2].span.end:
                    raise self._lost(place.message, "it is not apart from another turn")
        return Rendering(self._text, tuple(turns))

    def _turn(self, place: _Place, before: _Place | None, after: _Place | None, marks: Sequence[Span]) -> Turn:
        around = next((mark for mark in marks if mark.start <= place.span.start and place.span.end <= mark.end), None)
        start, end = self._start(place, before), self._end(place, after)
        if start is None:
            if around is None:
                raise self._lost(
                    place.message, "the text that ends the prompt of a generation does not stand before it"
                )
            start = around.start
        if end is None:
            if around is None:
                raise self._lost(place.message, "its end is not found")
            end = around.end
        learned = [Span(max(mark.start, start), min(mark.end, end)) for mark in marks]
        learned = [span for span in learned if span.start < span.end] or [Span(start, end)]
        rest = self._text[learned[-1].end : end]
        if not self._template.control.sub("", rest).strip():  # the end belongs to the turn, also without marks
            learned[-1] = Span(learned[-1].start, end)
        calls = self._messages[place.message].get("tool_calls", ())
        written = self._text[place.span.start if self._is_call(place.message) else place.span.end : end].casefold()
        for name, number in Counter(_function_of(call)["name"].casefold() for call in calls).items():
            if written.count(name) < number:
                raise self._lost(place.message, _NO_CALLS)
        has_end = self._template.end_token(self._text[place.span.end : end]) is not None
        return Turn(place.message, Span(start, end), tuple(learned), has_end)

    def _is_call(self, message: int) -> bool:
        """Whether a message has calls of tools and no text."""
        calls = self._messages[message].get("tool_calls")
        return bool(calls) and not _has_text(self._messages[message].get("content"))

    def _lost(self, message: int, why: str) -> RecordError:
        return RecordError(Reason.BAD_FORM, f"messages[{message}] (assistant) cannot be learned: {why}")

    def _marked_places(self, numbers: Collection[int], *, empty: bool) -> list[_Place]:
        """Step 1 for these messages, with or without contents that are empty. Nothing if marks change the rest."""
        marked = [self._marked(i, empty=empty) if i in numbers else turn for i, turn in enumerate(self._messages)]
        try:
            text = self._template.render(marked, self._tools, generate=self._generate)
        except RecordError:
            return []
        pieces = re.split(f"{self._mark}([0-9]+){self._mark}", text)
        if "".join(pieces[::2]) != self._text:
            return []
        places = []
        position = 0
        starts: dict[int, int] = {}
        for piece, number in zip(pieces[::2], [*map(int, pieces[1::2]), -1], strict=True):
            position += len(piece)
            message, is_end = divmod(number, 2)
            if not is_end:
                starts[message] = position
            elif message >= 0 and message in starts:
                places.append(_Place(message, Span(starts.pop(message), position)))
        return places

    def _marked(self, number: int, *, empty: bool) -> Message:
        """The message with a mark at both ends of its content; the message itself if it has none."""
        message = self._messages[number]
        left, right = (f"{self._mark}{2 * number + side}{self._mark}" for side in (0, 1))
        content = message.get("content")
        texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content or ()]
        filled = [i for i, text in enumerate(texts) if text.strip()]
        if filled:
            first, last = filled[0], filled[-1]
            start, _ = _core(texts[first])
            texts[first] = texts[first][:start] + left + texts[first][start:]
            _, end = _core(texts[last])
            texts[last] = texts[last][:end] + right + texts[last][end:]
            if isinstance(content, str):
                return {**message, "content": texts[0]}
            changed = [
                {**part, "text": text} if "text" in part else part
                for part, text in zip(content or (), texts, strict=True)
            ]
            return {**message, "content": changed}
        if message.get("tool_calls"):
            calls = list(message["tool_calls"])
            calls[0] = _renamed(calls[0], left + _function_of(calls[0])["name"])
            calls[-1] = _renamed(calls[-1], _function_of(calls[-1])["name"] + right)
            return {**message, "tool_calls": calls}
        if empty and isinstance(content, str):
            return {**message, "content": content + left + right}
        return message

    def _replaced_places(self, numbers: Sequence[int]) -> list[_Place]:
        """Step 1 for these messages, each by itself."""
        places = []
        for number in numbers:
            message = self._messages[number]
            if self._is_call(number):
                [first, *others] = message["tool_calls"]
                changed = {**message, "tool_calls": [_renamed(first, self._mark), *others]}
            else:
                changed = {**message, "content": _replaced(message.get("content"), self._mark)}
            turns = [*self._messages[:number], changed, *self._messages[number + 1 :]]
            try:
                other = self._template.render(turns, self._tools, generate=self._generate)
            except RecordError:
                continue
            if self._mark not in other:
                continue
            start = _common_prefix(self._text, other)
            common = _common_prefix(self._text[start:][::-1], other[start:][::-1])
            if self._is_call(number) or other[start : len(other) - common] == self._mark:
                places.append(_Place(number, Span(start, len(self._text) - common)))
        return places

    def _start(self, place: _Place, before: _Place | None) -> int | None:
        """Step 2; None if the prompt of a generation is another text."""
        habits, since = self._habits, before.span.end if before is not None else 0
        gap = self._text[since : place.span.start]
        if before is not None and habits.after_user is not None and self._messages[before.message]["role"] == "user":
            for skipped in self._trailing_space(before, gap):
                length = self._template.prompt_length(gap[skipped:], habits.after_user)
                if length is not None:
                    return since + skipped + length
        elif (  # the content of the user is not found
            habits.after_user
            and habits.after_user in gap
            and self._messages[max(place.message - 1, 0)]["role"] == "user"
        ):
            return since + gap.rindex(habits.after_user) + len(habits.after_user)
        if habits.opening and habits.opening in gap:
            return since + gap.index(habits.opening) + len(habits.opening)
        try:
            prompt = self._template.render(self._messages[: place.message], self._tools, generate=True)
        except RecordError:
            prompt = ""
        if prompt and _common_prefix(prompt, self._text) >= since:
            length = self._template.prompt_length(gap, prompt[since:])
            return None if length is None else since + length
        # No prompt can be rendered, for example before the first message: only the opening remains.
        opening = habits.opening.lstrip()
        if not opening:
            return since + len(gap.rstrip())
        opening = next((opening[:k] for k in range(len(opening), 0, -1) if opening[:k] in gap), "")
        length = self._template.prompt_length(gap[gap.index(opening) :], habits.opening.lstrip())
        return None if length is None else since + gap.index(opening) + length

    def _end(self, place: _Place, following: _Place | None) -> int | None:
        """Step 3; None if the template writes something else."""
        habits, since = self._habits, place.span.end
        rest = self._text[since : None if following is None else following.span.start]
        after, has_calls = habits.after_answer, bool(self._messages[place.message].get("tool_calls"))
        is_end = after is not None and self._template.end_token(after) is not None
        spaces = (0,) if has_calls else self._trailing_space(place, rest)
        spaces = tuple(sorted(spaces)) if habits.trims else spaces
        if after is not None and not has_calls and (is_end or following is not None):
            for skipped in spaces:
                if rest.startswith(after, skipped):
                    return since + skipped + len(after)
        if after and is_end and after in rest:
            return since + rest.index(after) + len(after)
        if following is None and not self._generate:
            rest = rest.removesuffix(habits.opening) if habits.always_opens else rest
            if self._template.end_token(rest) is None:
                return since + spaces[0] + len(rest[spaces[0] :].rstrip())
            return since + len(rest)
        return self._exact_end(place)

    def _exact_end(self, place: _Place) -> int | None:
        """Where a rendering of the messages up to this one ends, if it is the beginning of the text."""
        habits, since = self._habits, place.span.end
        try:
            upto = self._template.render(self._messages[: place.message + 1], self._tools)
        except RecordError:
            return None
        upto = upto.removesuffix(habits.opening) if habits.always_opens else upto
        if not (self._text.startswith(upto) and len(upto) >= since):
            return None
        return len(upto) if self._template.end_token(upto[since:]) else since + len(upto[since:].rstrip())

    def _trailing_space(self, place: _Place, rest: str) -> tuple[int, ...]:
        """How much of `rest` may belong to the content: its trailing white space, if the template kept it."""
        content = self._messages[place.message].get("content")
        text = content if isinstance(content, str) else (content[-1].get("text", "") if content else "")
        space = text[len(text.rstrip()) :] if text.strip() else ""
        return (len(space), 0) if space and rest.startswith(space) else (0,)


def parts(content: str | list[dict[str, str]] | None) -> list[dict[str, str]]:
    """Return a content as parts."""
    if content is None:
        return []
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _dated(template: str) -> str:
    return f"{_FIXED_DATE}{template}" if "strftime_now" in template else template


def _has_text(content: str | list[dict[str, str]] | None) -> bool:
    return any(part.get("text", "").strip() for part in parts(content))


def _replaced(content: str | list[dict[str, str]] | None, text: str) -> str | list[dict[str, str]]:
    """A content whose text is `text`; images stay."""
    if not isinstance(content, list):
        return text
    return [part for part in content if "text" not in part] + [{"type": "text", "text": text}]


def _core(text: str) -> tuple[int, int]:
    """Where a text begins and ends without the white space around it, and without reasoning before it."""
    thoughts = text.rpartition("</think>")
    start = len(text) - len(thoughts[2].lstrip()) if thoughts[2].strip() else len(text) - len(text.lstrip())
    return start, len(text.rstrip())


def _common_prefix(one: str, other: str) -> int:
    """Length of the common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _leading_space(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def _function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function: Mapping[str, Any] = call.get("function", call)
    return function


def _with_function(call: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    function = {**_function_of(call), **changes}
    return {**call, "function": function} if "function" in call else function


def _renamed(call: Mapping[str, Any], name: str) -> dict[str, Any]:
    return _with_function(call, {"name": name})


def _arguments_as_text(call: Mapping[str, Any], where: str) -> dict[str, Any]:  # noqa: ARG001 - as its counterpart
    arguments = _function_of(call).get("arguments", {})
    text = arguments or "{}" if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return _with_function(call, {"arguments": text})


def _arguments_as_object(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = _function_of(call).get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise RecordError(Reason.BAD_TYPE, f"{where}.function.arguments must be a JSON object, or its text")
    return _with_function(call, {"arguments": arguments})
