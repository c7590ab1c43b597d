"""Offloaded adapters: no bit of training or of an answer depends on where an adapter is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from streamlearn.adapters.context import NO_REGIME, Slot
from streamlearn.adapters.presets import regime_adapter
from streamlearn.errors import AdapterGoneError, SnapshotError
from streamlearn.events import Event
from streamlearn.learner.cache import AdapterCache
from streamlearn.learner.evaluate import ExampleScore, run_to_end, score
from streamlearn.learner.learner import Learner
from tests.doubles import random_examples
from tests.learners import REGIMES, MakeLearner, restore, same, snapshot

EXAMPLES = random_examples([9, 6], prompt_length=2)


def with_cache(make_learner: MakeLearner, folder: Path, max_in_memory: int, **options: Any) -> Learner:
    return make_learner(preset="streamlearn", cache=AdapterCache(folder / "offloaded", max_in_memory), **options)


@pytest.fixture
def cached(make_learner: MakeLearner, tmp_path: Path) -> Learner:
    """Two of its four adapters are in memory."""
    return with_cache(make_learner, tmp_path, 2)


def trained(learner: Learner, slots: list[int], seed: int = 0) -> float:
    return learner.step(random_examples([8] * len(slots), prompt_length=3, seed=seed), slots).loss


def scored(learner: Learner, slots: list[Slot]) -> list[ExampleScore]:
    return run_to_end(score(learner.model, EXAMPLES, torch.device("cpu"), pack_tokens=64, slots=slots))


def in_memory(learner: Learner) -> set[int]:
    """Slots whose weights are not placeholders."""
    weights = {slot: learner.banks[0].layer.head_lora_A[regime_adapter(slot)] for slot in range(REGIMES)}
    return {slot for slot, weight in weights.items() if not weight.isnan().any()}


def test_the_least_recently_used_are_evicted(cached: Learner) -> None:
    """The limit holds after every use, and an offloaded tensor takes no memory."""
    assert in_memory(cached) == {2, 3}
    trained(cached, [0])
    assert in_memory(cached) == {0, 3}
    trained(cached, [3])
    scored(cached, [1, 1])
    assert in_memory(cached) == {1, 3}
    offloaded = cached.banks[0].layer.head_lora_A[regime_adapter(0)]
    assert offloaded.untyped_storage().nbytes() == offloaded.element_size()
    moments = cached._groups[regime_adapter(0)][0].moments.values()
    assert all(moment.untyped_storage().nbytes() == moment.element_size() for moment in moments)


def test_training_and_scoring_are_bit_equal_to_those_in_memory(
    make_learner: MakeLearner, tmp_path: Path, cached: Learner
) -> None:
    """Steps of one and of several regimes, and copies of offloaded adapters; one, two or all adapters in memory."""
    learners = [cached, with_cache(make_learner, tmp_path / "one", 1), make_learner(preset="streamlearn")]
    result = []
    for learner in learners:
        losses = [trained(learner, slots, seed) for seed, slots in enumerate([[0, 1], [2], [3, 1, 0], [2, 2], [1]])]
        learner.add_regime(3, seed=9, start=2)
        losses.append(trained(learner, [3, 0], seed=9))
        result.append((losses, scored(learner, [0, 3]), snapshot(learner)))
    assert learners[1].cache.num_reads > learners[0].cache.num_reads > learners[2].cache.num_reads == 0
    for losses, scores, state in result[:2]:
        assert (losses, scores) == result[2][:2]
        assert same(state, result[2][2])


def test_it_goes_on_from_a_saved_state_bit_for_bit(make_learner: MakeLearner, tmp_path: Path, cached: Learner) -> None:
    """Saving reads offloaded adapters from their files, and changes nothing."""
    for seed, slots in enumerate([[0, 1], [2], [3]]):
        trained(cached, slots, seed)
    before, reads = in_memory(cached), cached.cache.num_reads
    saved = snapshot(cached)
    assert (in_memory(cached), cached.cache.num_reads) == (before, reads)
    assert not any(tensor.isnan().any() for tensor in saved.values())
    resumed = with_cache(make_learner, tmp_path / "resumed", 2, seed=5)
    restore(resumed, saved)
    for learner in (cached, resumed):
        trained(learner, [1, 3], seed=7)
    assert same(snapshot(cached), snapshot(resumed))


def test_a_job_sees_the_weights_of_its_start(make_learner: MakeLearner, cached: Learner) -> None:
    """Although its adapters are offloaded, read back and train in between; only what trains is copied."""
    trained(cached, [0, 1, 2, 3])
    expected = [scored(cached, [slot, slot]) for slot in range(REGIMES)]
    pinned = cached.pin()
    for seed, slots in enumerate([[0], [1], [0], [2]]):
        trained(cached, slots, seed)
        with pinned.swapped_in():
            assert [scored(cached, [slot, slot]) for slot in range(REGIMES)] == expected
    assert set(pinned._copies) == {regime_adapter(slot) for slot in (0, 1, 2)}
    after = snapshot(cached)
    assert scored(cached, [0, 0]) != expected[0]
    assert scored(cached, [3, 3]) == expected[3]
    plain = make_learner(preset="streamlearn")
    trained(plain, [0, 1, 2, 3])
    for seed, slots in enumerate([[0], [1], [0], [2]]):
        trained(plain, slots, seed)
    assert same(after, snapshot(plain))


def test_a_full_disk_keeps_adapters_in_memory(cached: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning goes on, the log says so, and the limit holds again once there is room."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, capture_logs() as logs:
        patched.setattr("streamlearn.learner.cache.save_file", full)
        trained(cached, [2])
        trained(cached, [0])
        assert in_memory(cached) == {0, 2, 3}
        errors = {log["error"] for log in logs if log["event"] == Event.ADAPTER_NOT_WRITTEN}
        assert errors == {"[Errno 28] No space left on device"}
    trained(cached, [1])
    assert len(in_memory(cached)) == 2


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"nothing")])
def test_a_lost_file_is_an_error_that_names_it(cached: Learner, tmp_path: Path, damage: Any) -> None:
    damage(tmp_path / "offloaded" / "regime0.safetensors")
    with pytest.raises(
        SnapshotError, match=r"offloaded/regime0\.safetensors must hold an offloaded adapter, found: .*"
    ):
        trained(cached, [0])


def test_the_folder_is_emptied_at_start_and_at_the_end(tmp_path: Path) -> None:
    """What a killed process left there is not read."""
    left = tmp_path / "offloaded" / "regime0.safetensors"
    left.parent.mkdir()
    left.write_bytes(b"left")
    cache = AdapterCache(left.parent, 2)
    assert not left.exists()
    left.parent.mkdir()
    cache.clear_folder()
    assert not left.parent.exists()


def replaced(learner: Learner, slot: int) -> None:
    learner.add_regime(slot, seed=9)


def removed(learner: Learner, slot: int) -> None:
    learner.remove_regime(slot)


def rolled_back(learner: Learner, slot: int) -> None:
    """As `runtime.model.load_adapters` does."""
    saved = snapshot(learner)
    learner.add_regime(slot, seed=0)
    restore(learner, saved)


@pytest.mark.parametrize("change", [replaced, removed, rolled_back])
@pytest.mark.parametrize("has_trained", [False, True], ids=["before it trains", "after it has trained"])
def test_a_job_whose_adapter_is_gone_is_an_error(cached: Learner, change: Any, has_trained: bool) -> None:
    """Not an answer of other weights; a job that does not use it goes on, and later ones have the live weights."""
    trained(cached, [0, 1, 2, 3])
    expected = scored(cached, [0, NO_REGIME])
    pinned = cached.pin()
    trained(cached, [0, 1] if has_trained else [0])
    change(cached, 1)
    with pinned.swapped_in():
        assert scored(cached, [0, NO_REGIME]) == expected
        mean: Slot = (0, 1)
        for slot in (1, mean):
            with pytest.raises(AdapterGoneError, match="the regime that answers it was removed, replaced or rolled"):
                scored(cached, [slot, 0])
    assert scored(cached, [1, NO_REGIME])[1] == expected[1]
    with cached.pin().swapped_in():
        scored(cached, [1, 0])
