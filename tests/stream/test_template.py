"""Which part of a conversation is learned, with templates of many shapes."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from streamlearn.errors import ConfigError, RecordError
from streamlearn.settings import StreamSettings
from streamlearn.stream.decode import Decoder
from streamlearn.stream.encode import Encoder
from streamlearn.stream.record import IGNORED
from tests.stream.chat_templates import SHAPES, source, tokenizer_of, with_template

USER, ANSWER = ({"role": role} for role in ("user", "assistant"))
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def turns(*contents: str, first: str = "user") -> list[dict[str, Any]]:
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


@cache
def encoder_of(name: str) -> Encoder:
    return Encoder(tokenizer_of(name))


@cache
def decoder(name: str) -> Decoder:
    tokenizer = tokenizer_of(name)
    return Decoder(tokenizer, StreamSettings(max_tokens=4096, batch_tokens=4096), len(tokenizer))


def learned(name: str, value: dict[str, Any]) -> str:
    """Everything that is learned of a record, as text."""
    labels = decoder(name).decode_value(value).labels
    return str(tokenizer_of(name).decode(labels[labels != IGNORED]))


TEXT = st.text(max_size=12) | st.lists(
    st.sampled_from(
        ["\n", " ", "the fox", "é", "\ue000", "<|im_end|>", "</s>", "USER: ", "ASSISTANT:", "42", '"', "[/INST]"]
    ),
    min_size=1,
    max_size=5,
).map("".join)


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), TEXT, st.booleans())
def test_every_answer_is_learned_with_its_end_and_nothing_else(
    name: str, exchanges: list[tuple[str, str]], system: str, has_system: bool
) -> None:
    """Labels decode to the answers, as the template writes them, each with its end."""
    shape = SHAPES[name]
    messages = turns(*(text for exchange in exchanges for text in exchange))
    if has_system and shape.system:
        messages = [{"role": "system", "content": system}, *messages]
    answers = [answer for _, answer in exchanges]
    expected = "".join(shape.turn(answer, is_last=i == len(answers) - 1) for i, answer in enumerate(answers))
    assert learned(name, {"messages": messages}) == expected


@pytest.mark.parametrize("name", sorted(SHAPES.keys() - {"deepseek"}))  # whose prompts begin a reasoning
@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
def test_generation_sees_the_tokens_that_training_saw(name: str, exchanges: list[tuple[str, str]]) -> None:
    """The prompt of the last answer is encoded alike, also where a token could span its end."""
    encoder = encoder_of(name)
    messages = turns(*(text for exchange in exchanges for text in exchange))
    ids, labels = encoder.chat(messages, learned={len(messages) - 1})
    prompt = encoder.generation_prompt(messages[:-1])
    first = next(i for i, label in enumerate(labels) if label != IGNORED)
    assert prompt == ids[:first]


CALL: dict[str, Any] = {
    "id": "a1b2c3d4e",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
}
TOOL_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Bern?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "7 degrees, rain"},
    {"role": "assistant", "content": "7 degrees and rain."},
]
MISTRAL_CALL = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bern"}, "id": "a1b2c3d4e"}]</s>'
QWEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call><|im_end|>\n'


@pytest.mark.parametrize(
    ("name", "call", "answer"),
    [
        ("qwen2", QWEN_CALL, "7 degrees and rain.<|im_end|>\n"),
        ("qwen3", QWEN_CALL, "<think>\n\n</think>\n\n7 degrees and rain.<|im_end|>\n"),
        ("llama3", '{"name": "weather", "parameters": {"city": "Bern"}}<|eot_id|>', "7 degrees and rain.<|eot_id|>"),
        ("mistral-v3", MISTRAL_CALL, " 7 degrees and rain.</s>"),
    ],
)
def test_calls_of_tools_are_learned_as_the_template_writes_them(name: str, call: str, answer: str) -> None:
    """Arguments may be an object or its JSON text; nulls that Arrow adds are ignored; the tool's answer is context."""
    as_object = {"name": "weather", "arguments": {"city": "Bern", "country": None}}
    filled = [{**TOOL_TURNS[1], "tool_calls": [{**CALL, "function": as_object}], "name": None}]
    for turns_ in (TOOL_TURNS, [TOOL_TURNS[0], *filled, *TOOL_TURNS[2:]]):
        assert learned(name, {"messages": turns_, "tools": [WEATHER]}) == call + answer


@pytest.mark.parametrize(
    ("arguments", "written"), [('{"city": "Bern"}', '{"city": "Bern"}'), ("", "{}"), (None, "{}"), ({}, "{}")]
)
def test_arguments_are_text_where_the_template_joins_strings(arguments: object, written: str) -> None:
    """DeepSeek's template adds them, and the type of the call, to other text."""
    call = {"id": "1", "function": {"name": "weather", "arguments": arguments}}
    messages = [TOOL_TURNS[0], {**TOOL_TURNS[1], "tool_calls": [call]}, *TOOL_TURNS[2:]]
    assert f"function<｜tool▁sep｜>weather\n```json\n{written}\n```" in learned("deepseek", {"messages": messages})


@pytest.mark.parametrize("contents", [("ok", "a", "ok", "b", "ok", "c"), ("ok", "ok", "ok", "ok"), ("[/INST]",) * 4])
def test_equal_questions_are_learned_where_the_template_compares_contents(contents: tuple[str, ...]) -> None:
    """Mistral's writes the tools before each message that equals the last one of the user."""
    answers = "".join(SHAPES["mistral-v3"].turn(answer, is_last=False) for answer in contents[1::2])
    assert learned("mistral-v3", {"messages": turns(*contents), "tools": [WEATHER]}) == answers


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"messages": TOOL_TURNS}, r"messages\[1\] \(assistant\) cannot be learned: .* its tool_calls"),
        (
            {"messages": [TOOL_TURNS[0], {**TOOL_TURNS[1], "content": "I ask weather."}]},
            "does not write its tool_calls",
        ),
        ({"messages": TOOL_TURNS[-1:], "tools": [WEATHER]}, "tools cannot be learned"),
        ({"messages": [{**TOOL_TURNS[1], "tool_calls": [{"function": {}}]}]}, r"tool_calls\[0\].function must be"),
        ({"messages": turns("a", "b"), "tools": "[1"}, "tools must be JSON"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\].content must be .* found null"),
        ({"messages": [{**turns("a")[0], "weight": 1}]}, "only turns of the assistant are learned"),
        ({"messages": [*turns("a"), {**turns("", "b")[1], "weight": 0.5}]}, "must be 0 .* or 1 .* found 0.5"),
        ({"messages": [*turns("a"), {**turns("", "b")[1], "weight": 0}]}, "found only such of weight 0"),
        ({"prompt": turns("a", "b"), "completion": turns("c")}, "found only such .* in the prompt"),
        ({"prompt": "a", "completion": ["b"]}, r"completion\[0\] must be an object, found a string"),
    ],
)
def test_what_cannot_be_learned_is_named(value: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        learned("chatml", value)


def test_a_turn_of_weight_0_is_context() -> None:
    """As with OpenAI; 0.0 and 1.0 too, since Arrow has one type per column."""
    messages = turns("Hi", "Yo.", "Is the shop open?", "Yes, until six.")
    for zero, one in ((0, 1), (0.0, 1.0)):
        weighted = [{**message, "weight": None} for message in messages]
        weighted[1]["weight"], weighted[3]["weight"] = zero, one
        assert learned("chatml", {"messages": weighted}) == "Yes, until six.<|im_end|>\n"


def test_further_fields_of_messages() -> None:
    """A name, reasoning, parts of text, and the empty fields that OpenAI's API returns."""
    assert learned(
        "qwen3", {"messages": [*turns("17 + 5?"), {**turns("", "22")[1], "reasoning_content": "It is 22."}]}
    ) == ("<think>\nIt is 22.\n</think>\n\n22<|im_end|>\n")
    parts = [{"type": "text", "text": "Yes, ", "image": None}, {"type": "text", "text": "open."}]
    answer = {"role": "assistant", "content": parts, "refusal": None, "annotations": [], "audio": None}
    asked = {"role": "user", "name": "customer", "content": [{"type": "text", "text": "Open?"}]}
    assert learned("chatml", {"messages": [asked, answer]}) == "Yes, open.<|im_end|>\n"


def test_prompt_and_completion_may_be_messages() -> None:
    """Only the completion is learned. Either may be one message or, beside messages, its text."""
    question, completion = turns("Open?"), turns("", "No.")[1:]
    for form in (completion, completion[0], "No."):
        prompt = [*turns("Hi", "Yo."), *question]
        assert learned("chatml", {"prompt": prompt, "completion": form}) == "No.<|im_end|>\n"
    whole = decoder("chatml").decode_value({"messages": [*question, *completion]})
    for asked, answer in (("Open?", completion), ("Open?", completion[0]), (question[0], "No."), (question, "No.")):
        example = decoder("chatml").decode_value({"prompt": asked, "completion": answer})
        assert (example.input_ids == whole.input_ids).all()
        assert (example.labels == whole.labels).all()


@pytest.mark.parametrize("prompt", ["Open?", turns("Open?"), turns("Open?", "Why?", "Is it?")])
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_a_completion_that_is_the_whole_conversation_repeats_no_turn(prompt: Any, system: str) -> None:
    """As `chosen` of preference pairs; only what follows the prompt is learned, and system messages may precede it."""
    head = [{"role": "system", "content": system}] if system else []
    asked = turns(prompt) if isinstance(prompt, str) else prompt
    once = decoder("chatml").decode_value({"prompt": [*head, *asked], "completion": "No."})
    for question in (prompt, [*head, *asked]):
        parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in asked]
        for repeated in (asked, parts):
            completion = [*head, *repeated, {"role": "assistant", "content": "No.", "weight": 1}]
            example = decoder("chatml").decode_value({"prompt": question, "completion": completion})
            assert (example.input_ids.tolist(), example.labels.tolist()) == (
                once.input_ids.tolist(),
                once.labels.tolist(),
            )


def test_an_assistant_may_begin() -> None:
    """Its greeting is learned too."""
    for name in (
        "chatml",
        "qwen3",
        "zephyr",
        "no-end-of-turn",
        "deepseek",
        "always-opens",
        "phi3",
        "granite",
        "falcon",
    ):
        shape = SHAPES[name]
        value = {"messages": turns("Welcome", "Do you sell ink?", "Yes", first="assistant")}
        assert learned(name, value) == shape.turn("Welcome", is_last=False) + shape.turn("Yes", is_last=True)
    greeting = learned("nemotron", {"messages": turns("Welcome", first="assistant")})
    assert greeting.strip() == "Welcome</s>"  # and nothing of the text that opens the conversation


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", "does not write it"),
        (
            source("chatml").replace("message['content']", "message['content'][:4]"),
            "lost are 'Often.', 'Milk is white.'",
        ),
        ("{{ raise_exception('not for chats') }}", "not for chats"),
    ],
)
def test_a_template_that_loses_turns_is_refused_at_the_start(template: str, message: str) -> None:
    """A sample conversation of three turns shows it before the first record."""
    with pytest.raises(ConfigError, match=message):
        Encoder(with_template(template)).check_template()


@pytest.mark.parametrize("name", SHAPES)
def test_the_check_at_the_start_accepts_every_shape(name: str) -> None:
    encoder_of(name).check_template()


def test_rendering_does_not_grow_with_the_square_of_the_turns() -> None:
    """The whole conversation is rendered twice, whatever number of turns it has."""
    tokenizer = with_template(source("qwen3"))
    encoder = Encoder(tokenizer)
    renderings: list[Any] = []
    render = tokenizer.apply_chat_template

    def counted(*args: Any, **options: Any) -> Any:
        renderings.append(args)
        return render(*args, **options)

    tokenizer.apply_chat_template = counted
    encoder.chat(turns(*["the fox"] * 200))
    assert len(renderings) == 2


@cache
def spaced(scheme: str, name: str) -> PreTrainedTokenizerFast:
    """A tokenizer like Llama's, which puts a space before a text: always, before the first piece, or never."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))  # noqa: S106 - not a password
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=[chr(code) for code in (10, *range(32, 127), 0x2581)],
        show_progress=False,
    )
    core.train_from_iterator(["the fox zebra positive USER: ASSISTANT: [INST] [/INST]"] * 20, trainer)
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=source(name), **tokens)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@pytest.mark.parametrize("name", ["llama2", "mistral", "prompt-ends-in-space", "zephyr", "no-end-of-turn"])
def test_no_space_is_put_before_an_answer(scheme: str, name: str) -> None:
    """Parts of a rendering are encoded as in the whole, unless a token would span a boundary."""
    tokenizer, messages = spaced(scheme, name), turns("the fox", "zebra", "fox", "positive")
    encoder = Encoder(tokenizer)
    ids, labels = encoder.chat(messages)
    if name != "no-end-of-turn":
        assert ids == tokenizer.apply_chat_template(messages, return_dict=False)
    prompt = encoder.generation_prompt(messages[:3])
    assert ids[: len(prompt)] == prompt
    assert labels[len(prompt) - 1] in (IGNORED, tokenizer.eos_token_id)
    assert labels[len(prompt)] != IGNORED
