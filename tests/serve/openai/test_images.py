"""Images of OpenAI's messages, read by a backbone that reads images."""

from pathlib import Path
from typing import Any

from streamlearn.backbone.load import load, outline
from streamlearn.serve.openai_schemas import ChatTurn, conversation_of
from streamlearn.settings import BackboneSettings, StreamSettings
from streamlearn.stream.decode import Decoder
from tests.vision import as_base64, make_image, tiny_vision_backbone


def test_parts_are_the_tokens_and_images_of_a_record(tmp_path: Path) -> None:
    """Texts and images of several turns in their order."""
    settings = BackboneSettings(model=str(tiny_vision_backbone(tmp_path, "llava")), dtype="float32", device="cpu")
    backbone = load(settings, outline(settings))
    decoder = Decoder(backbone.tokenizer, StreamSettings(), backbone.vocab_size, (), backbone.vision, backbone.template)
    first, second = as_base64(make_image(1)), as_base64(make_image(2))
    text, image = {"type": "text", "text": "what is "}, {"type": "image"}

    def part(data: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    given: list[dict[str, Any]] = [
        {"role": "user", "content": [text, part(first)]},
        {"role": "assistant", "content": "a fox"},
        {"role": "user", "content": [part(second), text]},
    ]
    as_record = [{"role": "user", "content": [text, image]}, given[1], {"role": "user", "content": [image, text]}]
    conversation = conversation_of([ChatTurn.model_validate(each) for each in given])
    found = decoder.prompt(conversation.messages or (), conversation.image)
    expected = decoder.prompt(as_record, [first, second])
    assert found.ids == expected.ids
    assert [each.data for each in found.images] == [each.data for each in expected.images] != []
