"""The gate: paired tests that hold back what is worse, and little else."""

from dataclasses import dataclass
from itertools import product
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from streamlearn.errors import ConfigError
from streamlearn.publish.gate import Gate, HeldBack, Losses, RegimeGate, compare
from streamlearn.publish.snapshot import RegimeOfSnapshot
from streamlearn.regimes.canaries import Canary
from streamlearn.settings import PublishSettings
from streamlearn.status import RegimePublication
from tests.doubles import example
from tests.publish.test_folder import version

GATE = Gate(level=0.05, min_records=5)


def losses(*values: float) -> dict[str, float]:
    return {f"record {index}": value for index, value in enumerate(values)}


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=2, max_size=8))
def test_the_p_value_is_the_share_of_signs_with_as_large_a_mean(pairs: list[tuple[int, int]]) -> None:
    """Eq. (2), spelled as a loop over all signs."""
    new, other = losses(*(a / 8 for a, _ in pairs)), losses(*(b / 8 for _, b in pairs))
    differences = [(a - b) / 8 for a, b in pairs]
    means = [fmean(s * d for s, d in zip(signs, differences, strict=True)) for signs in _signs(len(pairs))]
    expected = fmean(mean >= fmean(differences) - 1e-12 for mean in means)
    assert compare(new, other).p_value == pytest.approx(expected)


def test_a_version_that_is_no_worse_is_held_back_as_rarely_as_the_level_says() -> None:
    """With equal means, at most the stated share of versions is held back, within what 400 draws allow."""
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(400):
        other = rng.normal(2.0, 0.5, 8)
        new = other + rng.normal(0.0, 0.3, 8)
        held += compare(losses(*new), losses(*other)).p_value <= GATE.level
    assert 0 < held <= 400 * 0.05 + 3 * (400 * 0.05 * 0.95) ** 0.5


def test_a_version_that_is_clearly_worse_is_held_back() -> None:
    """A rise of one deviation of the differences is found in most draws of 9 records."""
    rng = np.random.default_rng(4)
    held = 0
    for _ in range(100):
        other = rng.normal(2.0, 0.5, 9)
        held += compare(losses(*(other + rng.normal(0.3, 0.3, 9))), losses(*other)).p_value <= GATE.level
    assert held > 75


def test_a_version_worse_than_the_backbone_is_held_back() -> None:
    """The first version of a regime is compared with the untouched backbone."""
    decision = GATE.decide(losses(*[2.0] * 5), losses(*[1.0] * 5))
    assert decision.held_back is HeldBack.WORSE_THAN_BACKBONE
    assert decision.backbone is not None
    assert decision.backbone.p_value == pytest.approx(1 / 32)
    assert GATE.decide(losses(*[1.0] * 5), losses(*[2.0] * 5)).held_back is None


def test_learning_bad_records_does_not_hide_what_was_lost_on_good_ones() -> None:
    """On all records the new version is better; on those of the published version's test it is worse: that counts."""
    good, bad = [1.5] * 6, [0.5] * 6
    new, published = losses(*good, *bad), losses(*[1.0] * 6, *[6.0] * 6)
    assert compare(new, published).p_value > 0.5
    tested_on = [f"record {index}" for index in range(6)]
    decision = GATE.decide(new, losses(*[9.0] * 12), published, tested_on)
    assert decision.held_back is HeldBack.WORSE_THAN_PUBLISHED
    assert decision.published is not None
    assert decision.published.records == 6


def test_a_replaced_sample_needs_an_operator() -> None:
    """Without enough of the published version's records nothing shows that the new one is no worse."""
    records = losses(*[1.0] * 9).keys()
    assert GATE.unscored(records, [f"record {index}" for index in range(4)]) is HeldBack.ANSWERS_CHANGED
    assert GATE.unscored(records, [f"record {index}" for index in range(5)]) is None
    assert GATE.unscored(records, None) is None
    assert GATE.unscored(list(records)[:4], None) is HeldBack.TOO_FEW_RECORDS


def test_a_test_that_can_not_fail_is_refused() -> None:
    """Four records have no p-value below 1/16, so a level of .05 would hold nothing back."""
    with pytest.raises(ValidationError, match=r"the smallest p-value is 0\.0625"):
        PublishSettings.model_validate({"folder": "published", "min_holdout_records": 4})
    assert PublishSettings.model_validate({"folder": "published", "min_holdout_records": 4, "level": 0.1}).level == 0.1


CANARIES = [Canary(f"general.jsonl:{i}", f"slice {i % 4}", example([8, 9])) for i in range(48)]


def canary_losses(*, mean: float, rng: np.random.Generator, only: str = "") -> tuple[Losses, Losses]:
    """Losses of a version and of the backbone; on the slice `only`, or on all, the version's are higher by `mean`."""
    backbone = {canary.id: float(rng.normal(2.0, 0.5)) for canary in CANARIES}
    harm = {canary.id: mean if only in ("", canary.slice) else 0.0 for canary in CANARIES}
    return {id_: loss + harm[id_] + float(rng.normal(0.0, 0.3)) for id_, loss in backbone.items()}, backbone


@pytest.mark.parametrize("accepted", [0.0, 0.2])
def test_slices_together_hold_back_no_more_than_the_level(accepted: float) -> None:
    """Four slices without more harm than is accepted: the share held back is the stated level, within 400 draws."""
    gate, rng = Gate(level=0.05, min_records=5, max_canary_harm=accepted), np.random.default_rng(5)
    held = sum(
        bool(gate.harmed(gate.test_canaries(CANARIES, *canary_losses(mean=accepted, rng=rng)))) for _ in range(400)
    )
    assert 400 * 0.05 - 3 * (400 * 0.05 * 0.95) ** 0.5 <= held <= 400 * 0.05 + 3 * (400 * 0.05 * 0.95) ** 0.5


def test_a_harmed_slice_and_its_worst_records_are_named() -> None:
    """Harm to one of four slices; the five records with the largest rise, the largest first."""
    new, backbone = canary_losses(mean=1.0, rng=np.random.default_rng(6), only="slice 2")
    [row] = GATE.harmed(GATE.test_canaries(CANARIES, new, backbone))
    assert (row.slice, row.records) == ("slice 2", 12)
    assert row.loss - row.backbone_loss == pytest.approx(1.0, abs=0.3)
    own = [canary.id for canary in CANARIES if canary.slice == "slice 2"]
    assert list(row.worst) == sorted(own, key=lambda id_: backbone[id_] - new[id_])[:5]


def test_slices_whose_test_can_not_fail_are_refused() -> None:
    """Seven records a slice suffice for four slices at level .05; with more slices than random signs none does."""
    GATE.check_canaries(CANARIES[:28])
    with pytest.raises(ConfigError, match=r"6 records of slice slice 3 .* expected at least 7"):
        GATE.check_canaries(CANARIES[:27])
    with pytest.raises(ConfigError, match="expected fewer slices"):
        Gate(1e-4, 5).check_canaries(CANARIES)


def _signs(number: int) -> list[tuple[int, ...]]:
    return list(product((-1, 1), repeat=number))


@dataclass
class StubSnapshot:
    """A snapshot of one regime without hold-out records, so nothing is scored."""

    step: int
    weights: str

    @property
    def regimes(self) -> list[RegimeOfSnapshot]:
        return [
            RegimeOfSnapshot(
                slot=0,
                number=1,
                label=None,
                weights_sha256=self.weights,
                records=1,
                visits=1,
                is_suspected=False,
                refused_return=None,
                approved_at=None,
            )
        ]

    def holdouts(self, slot: int) -> dict[str, Any]:
        return {}


def test_a_kept_version_has_no_figures_of_other_weights() -> None:
    """Later weights were held back, and the run went back to those that are published."""
    nothing: Any = SimpleNamespace()
    gate = RegimeGate(Gate(0.05, 5), nothing, nothing)
    published = {1: version("s-regime-1@10", weights_sha256="w10", step=10)}

    def status(snapshot: Any) -> RegimePublication:
        [decision] = gate.decide(snapshot, published)
        return decision.status

    assert status(StubSnapshot(20, "w20")).step == 20
    assert status(StubSnapshot(10, "w10")) == RegimePublication(1, "s-regime-1@10")
