"""Regimes of a restored snapshot, each written as a folder that other programs load."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import Tensor

from streamlearn.adapters.context import NO_REGIME
from streamlearn.adapters.presets import HeadLoraConfig, regime_adapter
from streamlearn.adapters.tuner import SHARED
from streamlearn.backbone.load import Backbone, Outline, load
from streamlearn.errors import SnapshotError, UsageError
from streamlearn.export import formats as peft_folder
from streamlearn.export.formats import BaseModel, DaemonModel, ExportedRegime, Format, HoldoutFigures, card, measure
from streamlearn.export.lora import PlainLora, mean_gates, plain_lora, with_mean_gates
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import PackedBatch, pack, packed_logits
from streamlearn.regimes.regimes import Regimes
from streamlearn.settings import Settings
from streamlearn.snapshot.manifest import Manifest
from streamlearn.snapshot.parts import snapshot_name
from streamlearn.stream.record import Example

# Shape suffixes: L learned tokens, V vocabulary.


class MergedModel:
    """A backbone to whose weights a plain LoRA was added, rounded to their dtype. The backbone is used up."""

    def __init__(self, backbone: Backbone, lora: PlainLora) -> None:
        self._backbone = backbone
        with TemporaryDirectory(prefix="streamlearn-") as folder:
            peft_folder.write(Path(folder), lora, BaseModel("", None))
            adapted = PeftModel.from_pretrained(backbone.model, folder)
        self._model = adapted.merge_and_unload(safe_merge=True)

    def logits(self, examples: Sequence[Example]) -> tuple[PackedBatch, Tensor]:
        """Return the packed examples, and the logits (L, V) that predict their learned tokens."""
        packed = pack(examples, self._backbone.device)
        with torch.no_grad():
            return packed, packed_logits(self._model, packed)

    def write(self, folder: Path) -> None:
        """Write weights, configuration, tokenizer and, for images, processor into an existing folder."""
        self._model.save_pretrained(folder)
        self._backbone.tokenizer.save_pretrained(folder)
        if self._backbone.vision is not None:
            self._backbone.vision.save(folder)


ALL_REGIMES = "all-regimes"
"""Name of the folder where all regimes share one adapter."""
_STAGING = ".staging-"


@dataclass(frozen=True)
class ExportOptions:
    """What to write, and where."""

    out: Path
    form: Format
    base: BaseModel
    approximate: bool = False
    """Whether experts among which tokens choose may be replaced by their mean."""


class Exporter:
    """Writes regimes of one snapshot.

    Args:
        learner: With the snapshot's weights.
        adaptation: With its regimes and hold-out records.
        manifest: The snapshot's.
        shape: The backbone's.
        settings: The configuration; `backbone` and `stream.batch_tokens` are used.
        options: What to write.

    Raises:
        UsageError: package gguf is missing, or a quantised backbone would be merged.
        ConfigError: the format does not know the backbone.
    """

    def __init__(
        self,
        learner: Learner,
        adaptation: Regimes,
        manifest: Manifest,
        shape: Outline,
        settings: Settings,
        options: ExportOptions,
    ) -> None:
        self._learner, self._adaptation, self._manifest = learner, adaptation, manifest
        self._shape, self._settings, self._options = shape, settings, options
        self._computed_in = str(learner.model.dtype).removeprefix("torch.")
        self._config: HeadLoraConfig = next(iter(learner.model.peft_config.values()))
        quantization = settings.backbone.quantization
        if options.form == "merged" and quantization != "none":
            raise UsageError(
                f"--merge: writes the backbone's weights, which must not be quantised, and backbone.quantization is "
                f"{quantization}; export without --merge, and merge the folder into {shape.folder} with PEFT's "
                "merge_and_unload"
            )
        if options.form == "gguf":
            peft_folder.check(shape.config)

    def slots(self, regimes: Sequence[int]) -> list[int | None]:
        """Find what to export for these regime numbers, each once; without any, all there is. None: what all share.

        Raises:
            UsageError: there is no such regime, or all of them share one adapter; or the folder of one exists.
            SnapshotError: there is no regime yet.
        """
        found = self._find(regimes)
        for slot in found:
            if self._target(slot).exists():
                raise UsageError(f"{self._target(slot)} must not exist yet; remove it, or choose another --out")
        return found

    def _find(self, regimes: Sequence[int]) -> list[int | None]:
        learner, numbers = self._learner, self._adaptation.numbers
        if not learner.per_regime and self._config.num_experts == 1:
            if regimes:
                raise UsageError("--regime: all regimes share one adapter here; use --all")
            return [None]
        learned = [slot for slot in numbers if not learner.per_regime or regime_adapter(slot) in learner.revisions]
        found = {numbers[slot]: slot for slot in sorted(learned, key=numbers.__getitem__)}
        name = snapshot_name(self._manifest.step)
        if not found:
            raise SnapshotError(f"snapshot {name} has no regime yet; export again after the next snapshot")
        if missing := [number for number in regimes if number not in found]:
            raise UsageError(f"snapshot {name} must have regime {missing[0]}, found {', '.join(map(str, found))}")
        return [found[number] for number in dict.fromkeys(regimes or found)]

    def export(self, slot: int | None) -> ExportedRegime:
        """Write one of `slots` into a folder of its own, which appears only when it is complete.

        Raises:
            UsageError: tokens choose among experts, and this may not be approximated. The message says what would be
                lost.
            SnapshotError: it cannot be written.
        """
        target = self._target(slot)
        staging = target.with_name(_STAGING + target.name)
        lora = self._lora(slot)
        merged = self._merged(lora) if self._options.form == "merged" else None
        exported = self._describe(target.name, slot, lora, self._figures(slot, lora, merged))
        try:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            if merged is not None:
                merged.write(staging)
            elif self._options.form == "gguf":
                peft_folder.write_gguf_adapter(staging, lora, self._shape.config)
            else:
                peft_folder.write(staging, lora, self._options.base)
            (staging / "README.md").write_text(card(exported), encoding="utf-8")
            staging.rename(target)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise SnapshotError(f"{target}: cannot be written: {error}") from error
        return exported

    def _target(self, slot: int | None) -> Path:
        """The folder of a regime; None: of all."""
        return self._options.out / (ALL_REGIMES if slot is None else f"regime-{self._adaptation.by_slot[slot].number}")

    def _lora(self, slot: int | None) -> PlainLora:
        """The regime's adapter in a plain form; where that is an approximation, only if it is asked for."""
        weights = self._learner.weights(self._adapter(slot))
        if self._config.num_experts == 1:
            return plain_lora(weights, self._config)
        assert slot is not None
        examples, number = self._examples(slot), self._adaptation.by_slot[slot].number
        choice = f"tokens choose among {self._config.num_experts} experts per head, which no plain LoRA can express"
        if not examples:
            raise UsageError(
                f"regime {number}: {choice}, and without hold-out records the mean weight of an expert is unknown; "
                "leave the regime out"
            )
        adapter, pack_tokens = self._adapter(slot), self._settings.stream.batch_tokens
        gates = mean_gates(self._learner, adapter, slot, examples, pack_tokens=pack_tokens)
        lora = plain_lora(*with_mean_gates(weights, self._config, gates))
        if self._options.approximate:
            return lora
        figures = self._figures(slot, lora, None)
        assert figures is not None
        raise UsageError(
            f"regime {number}: {choice}. With each expert's mean weight for all tokens, its {figures.records} hold-out "
            f"records would have a loss of {figures.loss:.4f} nats per token (now {figures.daemon_loss:.4f}, untouched "
            f"backbone {figures.backbone_loss:.4f}), at a KL divergence of {figures.divergence:.2g}; --approximate "
            "writes that"
        )

    def _merged(self, lora: PlainLora) -> MergedModel:
        return MergedModel(load(self._settings.backbone, self._shape, dtype=self._manifest.dtype), lora)

    def _figures(self, slot: int | None, lora: PlainLora, merged: MergedModel | None) -> HoldoutFigures | None:
        """What is exported, on the hold-out records; None if there are none."""
        examples = self._examples(slot)
        if not examples:
            return None
        daemon = DaemonModel(self._learner)
        return measure(
            examples,
            daemon.adapted(slot or 0),
            daemon.adapted(NO_REGIME),
            daemon.with_lora(lora) if merged is None else merged.logits,
            pack_tokens=self._settings.stream.batch_tokens,
        )

    def _examples(self, slot: int | None) -> tuple[Example, ...]:
        """The hold-out records of a regime; None: of all."""
        slots = self._adaptation.numbers if slot is None else [slot]
        return tuple(example for each in slots for example in self._adaptation.examples(each))

    def _adapter(self, slot: int | None) -> str:
        return regime_adapter(slot) if slot is not None and self._learner.per_regime else SHARED

    def _describe(self, name: str, slot: int | None, lora: PlainLora, figures: HoldoutFigures | None) -> ExportedRegime:
        by_slot = self._adaptation.by_slot
        regimes = list(by_slot.values()) if slot is None else [by_slot[slot]]
        return ExportedRegime(
            name=name,
            regime=None if slot is None else by_slot[slot].number,
            label="" if slot is None else by_slot[slot].name,
            snapshot=snapshot_name(self._manifest.step),
            written=self._manifest.created_at,
            records=sum(regime.records for regime in regimes),
            visits=sum(regime.visits for regime in regimes),
            base=self._options.base,
            form=self._options.form,
            dtype=self._manifest.dtype,
            computed_in=self._computed_in,
            rank=lora.rank,
            alpha=lora.alpha,
            num_linears=len(lora.layers),
            is_approximate=self._config.num_experts > 1,
            figures=figures,
        )
