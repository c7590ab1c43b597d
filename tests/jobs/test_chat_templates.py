"""A model that learned conversations answers as they do and stops, with chat templates of several shapes."""

import pytest

from streamlearn.adapters.presets import resolve
from streamlearn.adapters.tuner import attach
from streamlearn.backbone.load import load, outline
from streamlearn.learner.evaluate import run_to_end
from streamlearn.learner.generate import decode
from streamlearn.learner.learner import Learner
from streamlearn.settings import AdapterSettings, BackboneSettings, LearnerSettings, StreamSettings
from streamlearn.stream.decode import Decoder
from tests.stream.chat_templates import source

SHAPES = (
    "chatml",
    "no-end-of-turn",
    "prompt-ends-in-space",
    "prompt-ends-without-space",
    "reasoning-cut-from-history",
)


def question(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is the code word for item {number}?"}


@pytest.mark.long
@pytest.mark.parametrize("name", SHAPES)
def test_the_model_answers_and_stops(name: str) -> None:
    """`zebra`, then the end, before the limit."""
    settings = BackboneSettings(dtype="float32", device="cpu")
    backbone = load(settings, outline(settings))
    model = attach(backbone.model, resolve(AdapterSettings(preset="mh-moe")), seed=0)
    learner = Learner(model, LearnerSettings(lr=3e-3), backbone.device)
    decoder = Decoder(backbone.tokenizer, StreamSettings(), backbone.vocab_size, template=source(name))
    answer = {"role": "assistant", "content": "zebra"}
    for first in range(0, 96, 8):
        values = [{"messages": [question(first + i), answer]} for i in range(8)]
        learner.step([decoder.decode_value(value) for value in values])
    prompt = decoder.prompt([question(200)])
    [output] = run_to_end(decode(learner.model, [prompt], [64], decoder.stop, learner.device))
    assert decoder.text(output).rpartition("</think>")[2].strip() == "zebra"
    assert len(output) < 64
