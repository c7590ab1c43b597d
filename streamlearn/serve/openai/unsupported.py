"""Fields of OpenAI's API that the daemon has no use for.

Many clients send every field. A field is accepted if it has no effect on the answer, or with the value that asks for
nothing; with any other value it is refused, because an answer without it would not be what was asked for.
"""

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from streamlearn.http.replies import ApiError

_WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "audio": (),
        "best_of": (1,),
        "echo": (False,),
        "frequency_penalty": (0, 0.0),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "logit_bias": ({},),
        "logprobs": (False,),
        "modalities": (["text"],),
        "prediction": (),
        "presence_penalty": (0, 0.0),
        "reasoning_effort": ("none",),
        "response_format": ({"type": "text"},),
        "suffix": ("",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
        "verbosity": (),
        "web_search_options": (),
    }
)
"""Further fields of the API, and what asks for nothing beside null."""


def refuse_unsupported(fields: Mapping[str, Any], supported: Iterable[str]) -> None:
    """Check the fields of a request that its model does not know.

    Raises:
        ApiError: 400 with the name of a field that would change the answer, or that the API does not have.
    """
    for name, value in fields.items():
        if name in _WITHOUT_EFFECT or (name in _NEUTRAL and _asks_for_nothing(name, value)):
            continue
        if name in _NEUTRAL:
            message, hint = f"{name}: not supported by this server", "leave it out"
        else:
            near = difflib.get_close_matches(name, list(supported), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            message = f"{name[:80]}: unknown field"
        raise ApiError(400, "unsupported_parameter", message, hint=hint, param=name[:80])


def _asks_for_nothing(name: str, value: object) -> bool:
    # The type too: False equals 0, and `logprobs: 0` asks for something.
    return value is None or any(value == each and type(value) is type(each) for each in _NEUTRAL[name])
