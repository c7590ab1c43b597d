"""Reuse of the layers below the adapters."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.learn import lower_layers
from benchmarks.learn.methods import METHODS
from benchmarks.learn.profile import Profile
from benchmarks.learn.single_run import run_method
from benchmarks.learn.splits import Draw
from benchmarks.learn.suites import sequential

RESULTS = ("teacher", "record_losses", "answers")


@pytest.fixture
def run(write_tasks: Callable[..., Path], tiny_profile: Profile) -> Callable[..., dict[str, Any]]:
    """A run of a method with adapters in the upper of two layers."""
    suite = sequential("two", Draw([write_tasks("fox", "dog")], 12, 4), ("fox", "dog"))
    profile = replace(tiny_profile, settings={**tiny_profile.settings, "adapter.first_layer": 1})
    return lambda name, reuse: run_method(suite, name, METHODS[name], 0, profile, reuse=reuse)


@pytest.mark.parametrize("name", ["streamlearn", "lora"])
def test_a_run_that_reuses_is_the_run_that_computes(
    run: Callable[..., dict[str, Any]], tmp_path: Path, name: str
) -> None:
    """Losses, accuracies and answers agree; a matrix product over other rows may round differently."""
    plain, first, second = run(name, None), run(name, tmp_path), run(name, tmp_path)
    assert [first[key] for key in RESULTS] == [second[key] for key in RESULTS]
    assert first["record_losses"] == pytest.approx(plain["record_losses"], abs=2e-4)
    assert first["answers"] == plain["answers"]
    assert plain["record_losses"][0] != plain["record_losses"][-1]


def test_lower_layers_compute_a_record_once(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run finds all that the first one wrote."""
    computed: list[int] = []
    compute = lower_layers.LowerLayers._compute

    def counted(self: lower_layers.LowerLayers, records: Any, cache: Any) -> Any:
        computed.append(len(records))
        return compute(self, records, cache)

    monkeypatch.setattr(lower_layers.LowerLayers, "_compute", counted)
    run("lora", tmp_path)
    prompts = 2 * 4
    records = 2 * (12 + 4) + prompts
    caches = list(tmp_path.glob("*/*.cache.npy"))
    assert len(caches) == prompts
    assert sum(computed) == records == len(list(tmp_path.glob("*/*.npy"))) - prompts
    run("lora", tmp_path)
    assert sum(computed) == records


@pytest.mark.parametrize(("caches", "result"), [(False, "record_losses"), (True, "answers")])
def test_what_was_written_is_used(
    run: Callable[..., dict[str, Any]], tmp_path: Path, caches: bool, result: str
) -> None:
    """Other hidden states on disk change the losses, and other caches the answers."""
    before = run("lora", tmp_path)
    for file in tmp_path.glob("*/*.npy"):
        if file.name.endswith(lower_layers.CACHE) == caches:
            kept = lower_layers._read(file, torch.float32)
            lower_layers._write(file, torch.randn(kept.shape, generator=torch.Generator().manual_seed(0)))
    assert run("lora", tmp_path)[result] != before[result]


def test_adapters_in_every_layer_reuse_nothing(
    write_tasks: Callable[..., Path], tiny_profile: Profile, tmp_path: Path
) -> None:
    """Then there is no layer below them."""
    suite = sequential("one", Draw([write_tasks("fox")], 4, 2), ("fox",))
    run_method(suite, "lora", METHODS["lora"], 0, tiny_profile, reuse=tmp_path / "kept", generate=False)
    assert not (tmp_path / "kept").exists()
