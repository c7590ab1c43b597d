"""Names of models."""

import pytest

from streamlearn.openai_api import NamedModels

NAMES = NamedModels("streamlearn", "HuggingFaceTB/SmolLM2-135M-Instruct")


def test_every_listed_name_asks_for_one_thing() -> None:
    """And no two for the same."""
    listed = NAMES.listed([1, 12])
    assert [NAMES.requested(name) for name in listed] == ["routed", "backbone", 1, 12]


@pytest.mark.parametrize(
    "name",
    ["", "gpt-5", "streamlearn-regime-", "streamlearn-regime-0", "streamlearn-regime-01", "streamlearn-regime-1@3",
     "streamlearn-regime-1\n", "xstreamlearn-regime-1", "streamlearn-regime-" + "9" * 5000],
)  # fmt: skip
def test_every_other_name_asks_for_nothing(name: str) -> None:
    """Numbers are written in one way."""
    assert NAMES.requested(name) is None
