"""CP-MoE's sum of importance."""

import torch
from torch import Tensor

from streamlearn.adapters.tuner import banks
from streamlearn.baselines.importance import SummedImportance
from tests.learners import MakeLearner, make_learner, tiny

__all__ = ["make_learner", "tiny"]  # fixtures


def test_every_segment_adds_and_a_release_removes_a_fraction(make_learner: MakeLearner) -> None:
    """CP-MoE eq. 13, with and without h; what is released is the regime's fraction of each expert's sum."""
    made = tuple(banks(make_learner(preset="cp-moe").model))
    shapes = {f"{bank.name}.{part}": p.shape for bank in made for part, p in (("A", bank.A), ("B", bank.B))}
    held = {name: torch.zeros(shape) for name, shape in shapes.items()}
    store = SummedImportance(held, made, 3)

    def drawn(seed: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        return {name: torch.rand(shape, generator=draw) for name, shape in shapes.items()}

    h = {bank.name: torch.rand(bank.A.shape[:2], generator=torch.Generator().manual_seed(9)) for bank in made}
    store.add(0, drawn(1))
    store.add(2, drawn(2), h)
    store.add(0, drawn(3))
    store.enter(0)  # holds its own importance too
    for bank in made:
        parts = [f"{bank.name}.{part}" for part in "AB"]
        first = [drawn(1)[name] + drawn(3)[name] for name in parts]
        second = [h[bank.name][:, :, None, None] * drawn(2)[name] for name in parts]
        for name, one, two in zip(parts, first, second, strict=True):
            torch.testing.assert_close(held[name], one + two)
        masses = [torch.stack([omega.sum((2, 3)) for omega in omegas]).sum(0) for omegas in (first, second)]
        mass_HKN = torch.stack([masses[0], torch.zeros_like(masses[1]), masses[1]], dim=2)
        torch.testing.assert_close(store.mass[bank.name], mass_HKN)
    before = {name: value.clone() for name, value in held.items()}
    kept = {bank.name: 1 - store.mass[bank.name][:, :, 0] / store.mass[bank.name].sum(2) for bank in made}
    store.release(0)
    for name, value in held.items():
        torch.testing.assert_close(value, before[name] * kept[name.rpartition(".")[0]][:, :, None, None])
