"""Several processes compute what one does."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.ranks import CHANGES, PRESETS, run_ranks, train
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
    """Whatever the processes wait for."""
    again = run_ranks(tiny, tmp_path / "out.safetensors", 2)
    assert again.keys() == two.keys()
    assert [name for name in two if not torch.equal(two[name], again[name])] == []


def test_a_divided_backbone_changes_no_loss(tiny: Path, two: dict[str, Tensor], tmp_path: Path) -> None:
    """Each process has half of the layers; the leader's own passes are made by both."""
    divided = run_ranks(tiny, tmp_path / "out.safetensors", 2, shard=True)
    assert divided.keys() == two.keys()
    for preset in PRESETS:
        bytes_of_layers = f"{preset}: bytes of layers"
        assert 2 * divided[bytes_of_layers] == two[bytes_of_layers]
        torch.testing.assert_close(divided[f"{preset}: losses"], two[f"{preset}: losses"], rtol=1e-5, atol=1e-5)


def test_more_processes_than_records(tiny: Path, two: dict[str, Tensor], tmp_path: Path) -> None:
    """Some have nothing to compute."""
    four = run_ranks(tiny, tmp_path / "out.safetensors", 4)
    for name, expected in two.items():
        if name.startswith("streamlearn: "):
            torch.testing.assert_close(four[name], expected, rtol=1e-4, atol=ROUNDING, msg=name)
