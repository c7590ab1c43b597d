"""Which names exist, and what answers each."""

from pathlib import Path

import pytest

from streamlearn.gateway.publication import ModelNames, RoutedPrompt, Target
from streamlearn.http.responses import ApiError
from tests.gateway.sample_publication import publish_sample

SERVED = ("nano", "streamlearn-regime-1@184", "streamlearn-regime-2@100", "streamlearn-regime-x@1", "other")


@pytest.fixture
def names(tmp_path: Path) -> ModelNames:
    """Three regimes; the third has no published version."""
    return ModelNames(publish_sample(tmp_path, held_back=(3,)))


@pytest.mark.parametrize(
    ("model", "target"),
    [
        ("nano", Target("nano")),
        ("streamlearn-regime-1", Target("streamlearn-regime-1@184", 1)),
        ("streamlearn-regime-3", Target("nano", 3)),
        ("streamlearn-regime-2@184", Target("streamlearn-regime-2@184", 2)),
        ("streamlearn-regime-2@100", Target("streamlearn-regime-2@100", 2)),
    ],
)
def test_a_name_has_one_meaning(names: ModelNames, model: str, target: Target) -> None:
    """A version that is published no longer is answered for as long as a server has it."""
    assert names.named(model, SERVED) == target


@pytest.mark.parametrize(
    "model", ["", "other", "streamlearn-regime-9", "streamlearn-regime-1@1", "streamlearn-regime-x@1"]
)
def test_any_other_name_is_unknown(names: ModelNames, model: str) -> None:
    """Even if a server has a model of that name: it is no model of this gateway."""
    with pytest.raises(ApiError) as caught:
        names.named(model, SERVED)
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")


def test_a_routed_prompt_is_answered_by_its_regimes_version_or_the_backbone(names: ModelNames, tmp_path: Path) -> None:
    first, _, third = publish_sample(tmp_path, held_back=(3,)).regimes
    assert names.routed(RoutedPrompt(first, 0.5)) == Target("streamlearn-regime-1@184", 1, 0.5)
    assert names.routed(RoutedPrompt(third, 0.5)) == Target("nano", 3, 0.5)
    assert names.routed(RoutedPrompt(None, 0.001)) == Target("nano", None, 0.001)


def test_the_list_has_every_name_once(names: ModelNames) -> None:
    listed = [row["id"] for row in names.rows(SERVED)]
    assert listed == [
        "streamlearn",
        "nano",
        "streamlearn-regime-1",
        "streamlearn-regime-2",
        "streamlearn-regime-3",
        "streamlearn-regime-1@184",
        "streamlearn-regime-2@100",
        "streamlearn-regime-2@184",
    ]
