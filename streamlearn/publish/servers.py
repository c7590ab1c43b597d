"""What differs between model servers that load adapters while they run: vLLM, and SGLang as of 0.5.23.

Both list the backbone and each loaded adapter at /v1/models, with the path that it was loaded from (`root`). SGLang
names itself there as the owner. It takes the model of a request for the backbone unless it is BACKBONE:ADAPTER, so an
adapter's bare name would be answered by the backbone; and it loads no adapter that it was not given.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class ServerKind(NamedTuple):
    """One kind of model server."""

    adapters: str
    """Path of the request that loads or unloads an adapter."""
    model: str
    """What a request for an adapter names."""
    may_load_on_demand: bool
    """Whether it may know how to load an adapter that a request names."""


VLLM = ServerKind("/v1/{action}_lora_adapter", "{adapter}", True)
SGLANG = ServerKind("/{action}_lora_adapter", "{backbone}:{adapter}", False)


def kind_of(models: Iterable[Mapping[str, Any]]) -> ServerKind:
    """The kind of the server that lists these models.

    >>> kind_of([{"id": "base", "owned_by": "sglang"}]) is SGLANG
    True
    """
    return SGLANG if any(model.get("owned_by") == "sglang" for model in models) else VLLM
