"""One vLLM server: which adapters it has loaded, and loading and unloading them while it runs."""

from typing import Any

import httpx

from streamlearn.errors import StreamlearnError

ASK_S = 5.0
"""Time for a question that needs no weights."""


class ReplicaAwayError(StreamlearnError):
    """The server does not answer; it is asked again later."""


class ReplicaRefusedError(StreamlearnError):
    """The server answers, and refuses; the message is its own."""


class Replica:
    """A client of one server. Every method blocks until the server answers, and may be called from any one thread."""

    def __init__(self, url: str, *, key: str | None, timeout_s: float) -> None:
        self.url = url
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._timeout_s = timeout_s
        # A proxy named in the environment must not receive the key.
        self._client = httpx.Client(base_url=url, headers=headers, trust_env=False)

    def loaded(self) -> frozenset[str]:
        """Ask for the names of all models: the backbone's, and those of the loaded adapters.

        Raises:
            ReplicaAwayError: it does not answer.
            ReplicaRefusedError: its answer is not that of an OpenAI-compatible server.
        """
        answer = self._request("GET", "/v1/models", timeout_s=ASK_S)
        try:
            return frozenset(str(model["id"]) for model in answer.json()["data"])
        except (ValueError, KeyError, TypeError) as error:
            raise ReplicaRefusedError(f"{self.url}/v1/models: expected a list of models, found {error!r}") from error

    def load(self, name: str, folder: str) -> None:
        """Load an adapter from a folder that the server sees; it is complete when this returns.

        Raises:
            ReplicaAwayError: it does not answer.
            ReplicaRefusedError: it cannot load the adapter.
        """
        self._request("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    def unload(self, name: str) -> None:
        """Unload an adapter. Raises like `load`."""
        self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def _request(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> httpx.Response:
        try:
            answer = self._client.request(method, path, json=body, timeout=timeout_s or self._timeout_s)
        except httpx.HTTPError as error:
            raise ReplicaAwayError(f"{self.url}: no answer ({type(error).__name__}: {error})") from error
        if answer.status_code >= 500:
            raise ReplicaAwayError(f"{self.url}{path}: {answer.status_code} {answer.text[:200]}")
        if answer.is_error:
            raise ReplicaRefusedError(f"{self.url}{path}: {answer.status_code} {_message(answer)}")
        return answer


def _message(answer: httpx.Response) -> str:
    """The server's own words, and what to do about those that every new user meets."""
    text = answer.text[:500]
    if "No adapter found" in text:
        return f"{text}; the server must see publish.folder: set publish.vllm.folder to its path there"
    if answer.status_code == httpx.codes.NOT_FOUND:
        return f"{text}; start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"
    if "max_lora_rank" in text or "rank" in text:
        return f"{text}; start the server with --max-lora-rank of at least the adapters' rank"
    return text
