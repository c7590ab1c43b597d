"""SGLang beside vLLM: the publisher loads versions, the gateway asks for them by SGLang's names."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamlearn.publish.publication import Publication
from streamlearn.publish.replicas import ReplicaSet
from tests.gateway.kit import ask, prompts_of_each_task, ready_gateway, wait_until
from tests.gateway.sample_publication import publish_sample
from tests.publish.stub_replica import StubReplica, replica_set


class StubSglang(StubReplica):
    """SGLang 0.5.23 as its source has it, without a model; an answer's text names the adapter that made it.

    Paths, status codes and bodies: `load_lora_adapter`, `unload_lora_adapter` and `available_models` of
    sglang/srt/entrypoints/http_server.py, `ModelCard` of entrypoints/openai/protocol.py, `LoRAUpdateOutput` of
    managers/io_struct.py. A request's adapter: `_parse_model_parameter` of entrypoints/openai/serving_base.py,
    `_resolve_lora_path` of managers/tokenizer_manager.py, which loads again what was loaded once. Messages:
    lora/lora_manager.py, lora/lora_registry.py and, for a path that is not there, huggingface_hub's.
    """

    backbone = "nano"

    def __init__(self) -> None:
        super().__init__()
        self.references: dict[str, str] = {}
        self.asked: list[str] = []
        self.lists_in_vain = False
        """Whether it was restarted since it listed its adapters."""

    def answer(self, method: str, path: str, body: dict[str, str]) -> tuple[int, object]:
        if path == "/v1/models":
            rows: list[dict[str, Any]] = [{"id": self.backbone, "root": self.backbone, "parent": None}]
            rows += [{"id": name, "root": root, "parent": self.backbone} for name, root in self.roots.items()]
            return 200, {"object": "list", "data": [{**row, "object": "model", "owned_by": "sglang"} for row in rows]}
        if path == "/load_lora_adapter":
            self.calls.append(("load", body["lora_name"]))
            return self._update(self.refusal or self._load(body["lora_name"], body["lora_path"]))
        if path == "/unload_lora_adapter":
            self.calls.append(("unload", body["lora_name"]))
            gone = self.roots.pop(body["lora_name"], None)
            return self._update(None if gone else f"LoRA with name {body['lora_name']} does not exist. Loaded LoRAs: ")
        if path == "/v1/completions":
            return self._complete(body["model"])
        return 404, {"detail": "Not Found"}

    def _load(self, name: str, path: str) -> str | None:
        if name in self.roots:
            return f"LoRA with name {name} already exists. Loaded LoRAs: "
        if not Path(path).is_dir():
            return f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{path}'."
        self.roots[name] = self.references[name] = path
        return None

    def _update(self, fault: str | None) -> tuple[int, object]:
        body = {"success": fault is None, "error_message": fault or "", "loaded_adapters": self.roots}
        return 200 if fault is None else 400, body

    def _complete(self, model: str) -> tuple[int, object]:
        self.asked.append(model)
        own = f"{self.backbone}:"
        adapter = model.removeprefix(own) if model.startswith(own) else model.partition(":")[2]
        if adapter and (adapter not in self.roots or self.lists_in_vain):
            if adapter not in self.references or self.lists_in_vain:
                return 400, {
                    "message": f"Got LoRA adapter that has never been loaded: {adapter}\nAll loaded adapters: "
                }
            self._load(adapter, self.references[adapter])
        choice = {"index": 0, "text": adapter or self.backbone, "finish_reason": "stop", "logprobs": None}
        return 200, {"id": "1", "object": "text_completion", "created": 0, "model": model, "choices": [choice]}


@pytest.fixture
def stubs() -> Iterator[list[StubSglang]]:
    running = [StubSglang(), StubSglang()]
    for stub in running:
        stub.start()
    yield running
    for stub in running:
        stub.stop()


@pytest.fixture
def fleet(stubs: list[StubSglang], tmp_path: Path) -> Iterator[ReplicaSet]:
    with replica_set(stubs, tmp_path, ("s-regime-1@10-5d3c1f", "s-regime-1@20-5d3c1f")) as built:
        yield built


def test_versions_are_loaded_and_unloaded(fleet: ReplicaSet, stubs: list[StubSglang], tmp_path: Path) -> None:
    """By SGLang's paths; another folder's adapter of the name is replaced, and others are left alone."""
    old, new = "s-regime-1@10-5d3c1f", "s-regime-1@20-5d3c1f"
    stubs[0].roots = {old: "/elsewhere", "another": "/elsewhere"}
    assert fleet.fault_of_loading([old]) is None
    assert stubs[0].calls == [("unload", old), ("load", old)]
    fleet.reconcile([new], draining=[old])
    fleet.reconcile([new])
    assert set(stubs[0].roots) == {new, "another"}
    assert stubs[1].roots == {new: f"{tmp_path}/{new}"}
    assert [(row.is_up, row.loaded, row.fault) for row in fleet.status] == [(True, 1, None)] * 2


def test_a_refusal_is_reported_with_what_to_do(fleet: ReplicaSet, stubs: list[StubSglang]) -> None:
    assert "set publish.vllm.folder to its path there" in (fleet.fault_of_loading(["s-regime-9@1-5d3c1f"]) or "")
    for stub in stubs:
        stub.refusal = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
    assert "Please set `--enable-lora`" in (fleet.fault_of_loading(["s-regime-1@10-5d3c1f"]) or "")


@pytest.fixture
def published(tmp_path: Path) -> Publication:
    """With empty folders for adapters."""
    written = publish_sample(tmp_path / "published")
    for name in written.adapters:
        (tmp_path / "published/adapters" / name).mkdir(parents=True)
    return written


def test_the_gateway_asks_for_adapters_by_the_names_that_they_have_there(
    stubs: list[StubSglang], published: Publication, tmp_path: Path
) -> None:
    """A bare name would be answered by the backbone."""
    for stub in stubs:
        for name in published.adapters:
            stub.answer("POST", "/load_lora_adapter", body(tmp_path, name))
    with ready_gateway(tmp_path / "published", *(stub.url for stub in stubs)) as client:
        answers = [ask(client, prompt) for prompt in prompts_of_each_task()]
        assert [answer.json()["choices"][0]["text"] for answer in answers] == list(published.adapters)
        assert [answer.headers["x-streamlearn-model"] for answer in answers] == list(published.adapters)
        assert ask(client, "a", model="nano").json()["choices"][0]["text"] == "nano"


def test_a_version_that_is_not_loaded_is_never_answered_by_the_backbone(
    stubs: list[StubSglang], published: Publication, tmp_path: Path
) -> None:
    """Nor is SGLang asked for it on demand. One that no longer has it is passed over."""
    first = published.adapters[0]
    stubs[0].answer("POST", "/load_lora_adapter", body(tmp_path, first))
    with ready_gateway(tmp_path / "published", *(stub.url for stub in stubs), on_demand=True) as client:
        prompts = prompts_of_each_task()
        assert ask(client, prompts[0]).json()["choices"][0]["text"] == first
        assert [ask(client, prompt).status_code for prompt in prompts[1:]] == [503, 503]
        assert [stub.asked for stub in stubs] == [[f"nano:{first}"], []]
        stubs[0].lists_in_vain = True
        assert ask(client, prompts[0]).status_code == 503
        stubs[1].answer("POST", "/load_lora_adapter", body(tmp_path, first))
        wait_until(lambda: ask(client, prompts[0]).status_code == 200, "the other server's adapter")


def body(tmp_path: Path, name: str) -> dict[str, str]:
    """What the publisher sends to have a version loaded."""
    return {"lora_name": name, "lora_path": f"{tmp_path}/published/adapters/{name}"}
