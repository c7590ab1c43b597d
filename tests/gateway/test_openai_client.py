"""OpenAI's own client, unchanged, in front of a gateway."""

from collections.abc import Iterator

import httpx2
import pytest
from openai import APIError, BadRequestError, NotFoundError, OpenAI

from tests.gateway.stub_upstream import StubUpstream

from .kit import prompts_of_each_task


@pytest.fixture
def official(client: httpx2.Client) -> Iterator[OpenAI]:
    """The client, without retries, so that every failure is seen."""
    with OpenAI(base_url=f"{client.base_url}/v1".replace("//v1", "/v1"), api_key="none", max_retries=0) as own:
        yield own


def test_it_completes_text_and_conversations(official: OpenAI) -> None:
    prompt = prompts_of_each_task()[2]
    completion = official.completions.create(model="streamlearn", prompt=prompt, max_tokens=5)
    assert (completion.model, completion.choices[0].text) == ("streamlearn-regime-3@184-5d3c1f", "one two three")
    # In the chat template the prompt is unlike the regime's records, so the request names the regime.
    chat = official.chat.completions.create(
        model="streamlearn-regime-3", messages=[{"role": "user", "content": prompt}]
    )
    assert (chat.model, chat.choices[0].message.content) == ("streamlearn-regime-3@184-5d3c1f", "one two three")


def test_it_reads_the_routing_from_the_headers(official: OpenAI) -> None:
    raw = official.completions.with_raw_response.create(model="streamlearn", prompt=prompts_of_each_task()[0])
    assert raw.headers["x-streamlearn-model"] == raw.parse().model == "streamlearn-regime-1@184-5d3c1f"


def test_it_streams(official: OpenAI) -> None:
    chunks = [*official.chat.completions.create(model="nano", messages=[{"role": "user", "content": "a"}], stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one two three"
    assert {chunk.model for chunk in chunks} == {"nano"}


def test_it_raises_its_own_errors(official: OpenAI, upstreams: list[StubUpstream]) -> None:
    """By status, with code and field; a stream that breaks is an error, never a short answer."""
    with pytest.raises(NotFoundError) as missing:
        official.completions.create(model="other", prompt="a")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(BadRequestError):
        official.completions.create(model="streamlearn", prompt="")
    for upstream in upstreams:
        upstream.script.append("break")
    with pytest.raises(APIError, match="broke the stream off"):
        list(official.completions.create(model="nano", prompt="a", stream=True))
