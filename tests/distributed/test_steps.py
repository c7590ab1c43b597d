"""Several processes compute what one does."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.ranks import CHANGES, PRESETS, bytes_of_backbone, run_ranks, train
from tests.doubles import tiny_backbone
from tests.learners import tiny_learner

ROUNDING = 1e-4
"""Of a weight after some twenty updates of up to 0.01 each, whose size Adam does not take from that of the gradient."""
DRAWS = "mot"
"""Its routing noise is drawn in each process."""


@pytest.fixture(scope="module")
def two(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return run_ranks(tiny, tmp_path_factory.mktemp("two") / "out.safetensors", 2)


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != DRAWS])
def test_two_processes_end_with_the_weights_of_one(tiny: Path, two: dict[str, Tensor], preset: str) -> None:
    """Up to the rounding of sums in another order."""
    torch.manual_seed(0)
    one = train(tiny_learner(tiny, preset=preset, changes=CHANGES.get(preset)))
    for name, expected in one.items():
        torch.testing.assert_close(two[f"{preset}: {name}"], expected, rtol=1e-4, atol=ROUNDING, msg=name)


def test_a_run_of_two_processes_repeats_bit_for_bit(tiny: Path, two: dict[str, Tensor], tmp_path: Path) -> None:
    """Whatever the processes wait for, and routing noise too."""
    again = run_ranks(tiny, tmp_path / "out.safetensors", 2, ["streamlearn", DRAWS])
    assert [name for name in again if not torch.equal(two[name], again[name])] == []


def test_a_divided_backbone_changes_no_loss(tiny: Path, two: dict[str, Tensor], tmp_path: Path) -> None:
    """Each process has half of it; the leader's own passes are made by both."""
    presets = ["streamlearn", "cp-moe", "mot"]
    divided = run_ranks(tiny, tmp_path / "out.safetensors", 2, presets, shard=True)
    for preset in presets:
        stored = f"{preset}: bytes of the backbone"
        assert 2 * divided[stored] == two[stored]
        torch.testing.assert_close(divided[f"{preset}: losses"], two[f"{preset}: losses"], rtol=1e-5, atol=1e-5)


def test_tied_embeddings_are_divided_too(tmp_path: Path) -> None:
    """The output linear, which has their weight, computes with it and keeps nothing of its own."""
    folder = tiny_backbone(tmp_path / "tied", tied=True)
    divided = run_ranks(folder, tmp_path / "out.safetensors", 2, ["streamlearn"], shard=True)
    torch.manual_seed(0)
    whole = tiny_learner(folder, preset="streamlearn")
    assert 2 * divided["streamlearn: bytes of the backbone"] == bytes_of_backbone(whole)
    losses = train(whole)["losses"]
    torch.testing.assert_close(divided["streamlearn: losses"], losses, rtol=1e-4, atol=ROUNDING)


def test_more_processes_than_records(tiny: Path, two: dict[str, Tensor], tmp_path: Path) -> None:
    """Some have nothing to compute."""
    four = run_ranks(tiny, tmp_path / "out.safetensors", 4, ["streamlearn"])
    for name, tensor in four.items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-4, atol=ROUNDING, msg=name)
