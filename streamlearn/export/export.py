"""Regimes of a restored snapshot, each written as a folder that other programs load."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from streamlearn.adapters.context import NO_REGIME
from streamlearn.adapters.presets import HeadLoraConfig, regime_adapter
from streamlearn.adapters.tuner import SHARED
from streamlearn.backbone.load import Outline
from streamlearn.backbone.lora import PlainLora
from streamlearn.errors import SnapshotError, UsageError
from streamlearn.export import formats
from streamlearn.export.formats import BaseModel, ExportedRegime, Format, HoldoutLosses, card
from streamlearn.export.lora import PlainLoraAdapter, mean_gates, plain_lora
from streamlearn.learner.evaluate import run_to_end, score
from streamlearn.learner.learner import Learner
from streamlearn.regimes.regimes import Regimes
from streamlearn.settings import Settings
from streamlearn.snapshot.files import share
from streamlearn.status import SliceScore
from streamlearn.stream.record import Example

ALL_REGIMES = "all-regimes"
"""Name of the folder where all regimes share one adapter."""
_STAGING = ".staging-"


@dataclass(frozen=True)
class ExportOptions:
    """Form and place of the output."""

    out: Path
    form: Format
    base: BaseModel
    approximate: bool = False
    """Whether experts among which tokens choose may be replaced by their mean."""


class Exporter:
    """Writes regimes of one snapshot.

    Args:
        learner: The learner with the snapshot's weights.
        adaptation: Its regimes and hold-out records.
        snapshot: The snapshot's name.
        written: Its time, ISO 8601.
        shape: Outline of the backbone.
        settings: The configuration; `stream.batch_tokens` is used.
        options: The output.

    Raises:
        UsageError: package gguf is missing.
        ConfigError: the format does not know the backbone.
    """

    def __init__(
        self,
        learner: Learner,
        adaptation: Regimes,
        snapshot: str,
        written: str,
        shape: Outline,
        settings: Settings,
        options: ExportOptions,
    ) -> None:
        self._learner, self._adaptation, self._snapshot = learner, adaptation, snapshot
        self._written = written
        self._shape, self._options, self._pack_tokens = shape, options, settings.stream.batch_tokens
        self._config: HeadLoraConfig = next(iter(learner.model.peft_config.values()))
        if options.form == "gguf":
            formats.check_gguf(shape.config)

    def slots(self, regimes: Sequence[int]) -> list[int | None]:
        """The slots of these regime numbers, each once; all regimes without any. None is the one adapter of all.

        Raises:
            UsageError: there is no such regime, or all of them share one adapter; or the folder of one exists.
            SnapshotError: there is no regime yet.
        """
        slots = self._slots(regimes)
        for target in map(self._target, slots):
            if target.exists():
                raise UsageError(f"{target} must not exist yet; remove it, or choose another --out")
        return slots

    def _slots(self, regimes: Sequence[int]) -> list[int | None]:
        learner, numbers = self._learner, self._adaptation.numbers
        if not learner.per_regime and self._config.num_experts == 1:
            if regimes:
                raise UsageError("--regime: all regimes share one adapter here; use --all")
            return [None]
        learned = [slot for slot in numbers if not learner.per_regime or regime_adapter(slot) in learner.revisions]
        slots = {numbers[slot]: slot for slot in sorted(learned, key=numbers.__getitem__)}
        name = self._snapshot
        if not slots:
            raise SnapshotError(f"snapshot {name} has no regime yet; export again after the next snapshot")
        if missing := [number for number in regimes if number not in slots]:
            raise UsageError(f"snapshot {name} must have regime {missing[0]}, found {', '.join(map(str, slots))}")
        return [slots[number] for number in dict.fromkeys(regimes or slots)]

    def export(self, slot: int | None) -> ExportedRegime:
        """Write one of `slots` into a folder of its own, which appears only when it is complete.

        Raises:
            UsageError: tokens choose among experts, and `approximate` is not set, or there are no hold-out records.
            SnapshotError: it cannot be written.
        """
        target = self._target(slot)
        staging = target.with_name(_STAGING + target.name)
        lora, examples, regimes = self._lora(slot), self._examples(slot), self._adaptation.by_slot
        own = list(regimes.values()) if slot is None else [regimes[slot]]
        losses = holdout_losses(self._learner, examples, slot or 0, lora, pack_tokens=self._pack_tokens)
        complete = self._options.base.complete(lora)
        exported = ExportedRegime(
            name=target.name,
            regime=None if slot is None else own[0].number,
            label="" if slot is None else own[0].name,
            snapshot=self._snapshot,
            written=self._written,
            records=sum(regime.records for regime in own),
            visits=sum(regime.visits for regime in own),
            base=self._options.base,
            form=self._options.form,
            rank=complete.rank,
            alpha=complete.alpha,
            num_linears=len(complete.layers),
            is_approximate=self._config.num_experts > 1,
            losses=losses,
            canaries=self._canaries(lora),
        )
        try:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            if self._options.form == "gguf":
                formats.write_gguf(staging, complete, self._shape.config)
            else:
                formats.write_peft(staging, lora, self._options.base)
            (staging / "README.md").write_text(card(exported), encoding="utf-8")
            share(staging)
            staging.rename(target)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise SnapshotError(f"{target}: cannot be written: {error}") from error
        return exported

    def _target(self, slot: int | None) -> Path:
        return self._options.out / (ALL_REGIMES if slot is None else f"regime-{self._adaptation.numbers[slot]}")

    def _lora(self, slot: int | None) -> PlainLora:
        """The regime's adapter in a plain form, approximated only with `approximate`."""
        adapter = regime_adapter(slot) if slot is not None and self._learner.per_regime else SHARED
        weights = self._learner.weights(adapter)
        if self._config.num_experts == 1:
            return plain_lora(weights, self._config)
        assert slot is not None
        examples, number = self._examples(slot), self._adaptation.numbers[slot]
        if not self._options.approximate:
            raise UsageError(
                f"regime {number}: tokens choose among {self._config.num_experts} experts per head, which no plain "
                "LoRA can express; --approximate gives each expert its mean weight, and shows what that costs in loss"
            )
        if not examples:
            raise UsageError(
                f"regime {number}: the mean weight of an expert is unknown without hold-out records; leave it out"
            )
        gates = mean_gates(self._learner, adapter, slot, examples, pack_tokens=self._pack_tokens)
        return plain_lora(weights, self._config, gates)

    def _canaries(self, lora: PlainLora) -> tuple[SliceScore, ...]:
        scores = self._adaptation.scorer.canary_scores
        return scores.measure(NO_REGIME, parallel_adapter=PlainLoraAdapter(lora)) if scores.canaries else ()

    def _examples(self, slot: int | None) -> tuple[Example, ...]:
        slots = self._adaptation.numbers if slot is None else [slot]
        return tuple(example for number in slots for example in self._adaptation.examples(number))


def holdout_losses(
    learner: Learner, examples: Sequence[Example], slot: int, lora: PlainLora, *, pack_tokens: int
) -> HoldoutLosses | None:
    """Score records three times: with `lora`, under the regime in `slot`, and without any adapter."""
    if not examples:
        return None

    def loss_sum(slot: int, adapter: PlainLoraAdapter | None) -> tuple[float, int]:
        scores = run_to_end(
            score(
                learner.model,
                examples,
                learner.device,
                pack_tokens=pack_tokens,
                slots=[slot] * len(examples),
                parallel_adapter=adapter,
            )
        )
        return sum(row.loss_sum for row in scores), sum(row.tokens for row in scores)

    exported, tokens = loss_sum(NO_REGIME, PlainLoraAdapter(lora))
    daemon, backbone = loss_sum(slot, None)[0], loss_sum(NO_REGIME, None)[0]
    return HoldoutLosses(len(examples), tokens, exported / tokens, daemon / tokens, backbone / tokens)
