"""What OpenAI's client and its like expect of a server, for the daemon and for the gateway."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import NotFoundError, OpenAI

from tests.gateway.kit import ready_gateway
from tests.gateway.sample_publication import publish_sample, served_models
from tests.gateway.stub_upstream import StubUpstream
from tests.serve.doubles import Daemon

CHAT: dict[str, Any] = {"model": "streamlearn", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "streamlearn", "prompt": "hello"}


@pytest.fixture(params=["daemon", "gateway"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[httpx2.Client]:
    if request.param == "daemon":
        daemon = Daemon()
        yield daemon.client
        daemon.stop()
        return
    with (
        StubUpstream(served_models(publish_sample(tmp_path))) as upstream,
        ready_gateway(tmp_path, upstream) as gateway,
    ):
        yield gateway


@pytest.fixture
def official(client: httpx2.Client) -> Iterator[OpenAI]:
    url = f"{str(client.base_url).rstrip('/')}/v1"
    with closing(OpenAI(base_url=url, api_key="none", max_retries=0)) as own:
        yield own


def test_every_model_that_is_listed_can_be_retrieved(official: OpenAI) -> None:
    """As editors do before they use one; what is not listed is not found."""
    listed = list(official.models.list())
    assert [model.id for model in listed][:1] == ["streamlearn"]
    assert {"streamlearn-regime-1", "streamlearn-regime-3"} <= {model.id for model in listed}
    assert [official.models.retrieve(model.id) for model in listed] == listed
    with pytest.raises(NotFoundError) as missing:
        official.models.retrieve("other")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


def test_a_slash_at_the_end_of_a_path_changes_nothing(client: httpx2.Client) -> None:
    """Nor does it pass by a check."""
    for path in ("/v1/models", "/v1/models/streamlearn", "/livez", "/readyz"):
        assert client.get(f"{path}/").json().keys() == client.get(path).json().keys()
        assert client.head(f"{path}/").status_code == 200
    for path, body in (("/v1/chat/completions/", CHAT), ("/v1/completions/", TEXT)):
        assert client.post(path, json=body).json()["choices"]
        assert client.post(path, content=b"{}").status_code == 415
        assert client.post(path, json=body, headers={"origin": "https://evil.example"}).status_code == 403
    assert client.get("/v1/nothing/").status_code == 404


def test_text_and_conversations_are_answered_whole_and_streamed(official: OpenAI) -> None:
    whole = official.completions.create(**TEXT).choices[0].text
    pieces = [chunk.choices[0].text for chunk in official.completions.create(**TEXT, stream=True)]
    assert "".join(pieces) == whole
    answer = official.chat.completions.create(**CHAT).choices[0].message.content
    chunks = official.chat.completions.create(**CHAT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer


def test_a_response_names_what_answered(official: OpenAI) -> None:
    raw = official.completions.with_raw_response.create(**TEXT)
    assert raw.headers["x-streamlearn-model"] == raw.parse().model
