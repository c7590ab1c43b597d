"""Figures of routing."""

import pytest
import torch

from benchmarks.mot.compare import purity, routing
from benchmarks.mot.models import Routing


def test_purity_is_the_share_of_the_experts_main_classes() -> None:
    """Two experts that share a class equally are pure for the other."""
    share_MN = torch.tensor([[1.0, 0.5], [0.0, 0.5]])
    assert purity(share_MN) == pytest.approx(0.75)


def test_an_expert_counts_as_used_from_one_percent_of_the_samples() -> None:
    """Shares are means over equally frequent classes."""
    final_MN = torch.tensor([[0.985, 0.999], [0.015, 0.001], [0.0, 0.0]])
    found = routing(Routing(final_MN, final_MN, torch.tensor([2, 1])))
    assert found["used"] == 1
    assert found["specialized"] == [2, 1]
