"""What is kept of records that are too long, and what detection reads of them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamlearn import codec
from streamlearn.errors import Reason, RecordError
from streamlearn.settings import StreamSettings
from streamlearn.shift.features import input_of, input_of_prompt
from streamlearn.stream.decode import Decoder
from streamlearn.stream.record import IGNORED, Example, ImageInputs, RecordImage, StoredExample
from streamlearn.stream.truncate import DETECTION_TOKENS, Draft, cut_tokens
from tests.stream.chat_templates import SHAPES, tokenizer_of

NAME = "llama3"


def decoder(limit: int, name: str = NAME, **limits: Any) -> Decoder:
    tokenizer = tokenizer_of(name)
    return Decoder(tokenizer, StreamSettings(max_tokens=limit, batch_tokens=max(limit, 2048), **limits), len(tokenizer))


def text(ids: Any) -> str:
    return str(tokenizer_of(NAME).decode(ids))


def chat(*contents: str, system: str = "") -> dict[str, Any]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"messages": [{"role": "system", "content": system}, *turns] if system else turns}


PROMPT = {"prompt": "Classify. " + "the fox " * 200 + "Answer:", "completion": " dog"}


def test_a_prompt_loses_its_middle() -> None:
    """Head and tail of the prompt and the whole completion are kept."""
    whole, cut = (decoder(limit).decode_value(PROMPT) for limit in (2000, 40))
    assert len(cut) == 40
    assert text(cut.input_ids).startswith("<s>Classify. the fox") or text(cut.input_ids).startswith("Classify. the fox")
    assert text(cut.input_ids).endswith("the fox Answer: dog</s>")
    kept = 40 - cut.num_learned
    assert cut.input_ids[: kept // 2].tolist() == whole.input_ids[: kept // 2].tolist()
    assert cut.input_ids[kept // 2 :].tolist() == whole.input_ids[-(40 - kept // 2) :].tolist()


def test_a_prompt_loses_its_beginning_with_the_former_rule() -> None:
    whole, cut = (decoder(limit, overlong="truncate").decode_value(PROMPT) for limit in (2000, 40))
    assert cut.input_ids.tolist() == whole.input_ids[-40:].tolist()


def test_a_conversation_keeps_its_system_message_and_last_turns() -> None:
    """Whole turns are dropped, the oldest first; every header stays."""
    contents = [f"{kind} {number} the fox" for number in range(30) for kind in ("question", "answer")]
    cut = decoder(320).decode_value(chat(*contents, system="Be brief."))
    shown = text(cut.input_ids)
    assert "Be brief.<|eot_id|>" in shown
    assert "question 29" in shown
    assert "answer 0 " not in shown
    assert shown.count("<|start_header_id|>") == shown.count("<|eot_id|>")
    kept = shown.count("question")
    assert kept >= 3
    assert text(cut.labels[cut.labels != IGNORED]) == "".join(
        f"answer {number} the fox<|eot_id|>" for number in range(30 - kept, 30)
    )


def test_a_long_question_loses_its_middle_and_keeps_its_header() -> None:
    cut = decoder(200).decode_value(chat("Begin " + "the fox " * 300 + "end?", "dog", system="Be brief."))
    shown = text(cut.input_ids)
    assert len(cut) <= 200
    assert "Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nBegin the fox" in shown
    assert "the fox end?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\ndog<|eot_id|>" in shown
    assert len(cut) > 190


def test_an_answer_that_is_too_long_keeps_its_beginning() -> None:
    cut = decoder(100).decode_value(chat("Begin " + "the fox " * 50 + "end?", "dog " * 300, system="Be brief."))
    assert len(cut) == 100
    assert text(cut.labels[cut.labels != IGNORED]).startswith("dog dog dog")


TEXT = st.text("ab \n", max_size=200)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(SHAPES)),
    st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=6),
    st.integers(2, 300),
    st.sampled_from(["middle", "truncate"]),
)
def test_every_conversation_fits(name: str, exchanges: list[tuple[str, str]], limit: int, overlong: str) -> None:
    """At most max_tokens; the truncation adds up; detection reads the same as without it."""
    value = chat(*(content for exchange in exchanges for content in exchange))
    whole = decoder(4096, name).decode_value(value)
    cut = decoder(limit, name, overlong=overlong).decode_value(value)
    assert len(cut) <= limit
    assert input_of(cut).tolist() == input_of(whole).tolist()
    if len(whole) > limit:
        assert cut.truncation is not None
        assert (cut.truncation.form, cut.truncation.num_cut) == ("messages", len(whole) - len(cut))
    else:
        assert cut.truncation is None


@pytest.mark.parametrize("value", [PROMPT, {"text": "the fox " * 100}, chat("the fox " * 100, "dog")])
def test_detection_reads_the_whole_input(value: dict[str, Any]) -> None:
    """Also of a record that was saved, and of the same text as a request."""
    whole, cut = (decoder(limit).decode_value(value) for limit in (2000, 40))
    saved = codec.load(StoredExample, *codec.dump(StoredExample.from_example(cut)))
    stored = saved.restored(lambda example, _: example)
    assert input_of(stored).tolist() == input_of(cut).tolist() == input_of(whole).tolist()
    assert len(input_of(cut)) > len(cut)


def test_requests_are_cut_as_records_are() -> None:
    """A prompt fits, and routing reads all of it."""
    messages = chat("Begin " + "the fox " * 300 + "end?")["messages"]
    for prompt in (PROMPT["prompt"], messages):
        whole, cut = (decoder(limit).prompt(prompt) for limit in (2000, 100))
        assert len(cut) <= 100
        assert len(cut) > 90
        assert input_of_prompt(cut).tolist() == input_of_prompt(whole).tolist()
    with pytest.raises(RecordError, match="at most 100 tokens") as refused:
        decoder(100, overlong="dead_letter").prompt(messages)
    assert refused.value.reason is Reason.TOO_MANY_TOKENS


def test_what_detection_reads_is_bounded() -> None:
    """A record of a megabyte is not kept whole beside its truncated tokens."""
    ids = list(range(3 * DETECTION_TOKENS))
    found = Draft(ids, [IGNORED] * len(ids), len(ids)).detection_input(max_tokens=64)
    half = DETECTION_TOKENS // 2
    assert found.tolist() == ids[:half] + ids[-half:]


def _image(tokens: int) -> RecordImage:
    inputs = ImageInputs(tuple([7] * tokens), {})
    return RecordImage(b"", np.zeros(0, dtype=np.int32), {}, inputs, lambda: inputs)


@pytest.mark.parametrize("place", [0, 10, 45, 50, 89])
def test_images_are_never_cut(place: int) -> None:
    """The cut moves to where no image is."""
    ids = list(range(100, 200))
    ids[place : place + 10] = [7] * 10
    draft = Draft(ids, [IGNORED] * 100, 99, (_image(10),), (place,))
    cut = cut_tokens(draft, StreamSettings(max_tokens=40), [])
    [start] = cut.image_starts
    assert len(cut.ids) == 40
    assert cut.ids[start : start + 10] == [7] * 10
    assert cut.ids.count(7) == 10
    with pytest.raises(RecordError, match="images cannot be truncated"):
        cut_tokens(draft, StreamSettings(max_tokens=8), [])


def test_labels_of_tokens_lose_their_prompt_first() -> None:
    """Token ids with labels are a prompt and an answer."""
    value = {"input_ids": list(range(100)), "labels": [-100] * 95 + list(range(95, 100))}
    cut = decoder(20).decode_value(value)
    assert cut.labels[cut.labels != IGNORED].tolist() == [95, 96, 97, 98, 99]
    assert isinstance(cut, Example)
    assert cut.truncation is not None
    assert cut.truncation.num_cut == 80
