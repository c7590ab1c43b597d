"""Formats of an exported regime: a folder that stock PEFT loads, an adapter for llama.cpp, and the model card."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import orjson
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from streamlearn import __version__
from streamlearn.adapters.presets import HeadLoraConfig
from streamlearn.backbone.load import Outline
from streamlearn.backbone.lora import CONFIG, WEIGHTS, PlainLora, StartLora, from_tensors, read
from streamlearn.errors import ConfigError, PublicationError, SnapshotMismatchError, UsageError
from streamlearn.model_files import is_hub_id
from streamlearn.settings import BackboneSettings
from streamlearn.snapshot.parts import Snapshot
from streamlearn.status import SliceScore

Format = Literal["peft", "gguf"]
"""A folder that PEFT loads, or an adapter of llama.cpp."""


@dataclass(frozen=True)
class BaseModel:
    """The backbone, named as users of the export find it."""

    name: str
    """A hub id or a folder."""
    revision: str | None
    start: StartLora | None = None
    """What the learner's backbone has merged and this one has not, so that files have it."""

    @classmethod
    def from_settings(cls, settings: BackboneSettings, shape: Outline, *, name: str | None = None) -> Self:
        """The backbone's hub id, or the folder that it was loaded from; `name` replaces both."""
        if name is not None:
            return cls(name, None, shape.start)
        return cls(settings.model if settings.revision else str(shape.folder), settings.revision, shape.start)

    @property
    def is_on_hub(self) -> bool:
        """Whether the name is a hub's id, rather than a folder or a name that only the model servers know."""
        return _is_on_hub(self.name)

    def complete(self, lora: PlainLora) -> PlainLora:
        """Add the start to a regime's LoRA."""
        return lora if self.start is None else lora.after(self.start.lora)

    def own(self, lora: PlainLora) -> PlainLora:
        """Undo `complete`."""
        return lora if self.start is None else lora.without(self.start.lora)


@dataclass(frozen=True)
class HoldoutLosses:
    """Mean losses over the learned tokens of a regime's hold-out records, nats per token."""

    records: int
    tokens: int
    exported: float
    daemon: float
    backbone: float
    """Of the backbone without a regime."""


@dataclass(frozen=True)
class ExportedRegime:
    """One regime of one snapshot."""

    name: str
    """Name of its folder, for example regime-3."""
    regime: int | None
    """Its number; None for the one adapter that all regimes share."""
    label: str
    """The operator's name for it; empty without one."""
    snapshot: str
    written: str
    """Time of the snapshot, ISO 8601."""
    records: int
    """Records of the regime up to the snapshot."""
    visits: int
    """Times that the stream entered the regime."""
    base: BaseModel
    form: Format
    rank: int
    alpha: float
    num_linears: int
    is_approximate: bool
    """Whether experts among which tokens choose were replaced by their mean."""
    losses: HoldoutLosses | None
    """None where they were not measured."""
    canaries: tuple[SliceScore, ...] = ()
    """By slice; empty where they were not measured."""

    @property
    def fidelity(self) -> str:
        """Relation to the daemon's experts."""
        if self.is_approximate:
            return "approximate: each expert applies with its mean weight, where the daemon's tokens choose one"
        return "exact"


def _is_on_hub(name: str) -> bool:
    return is_hub_id(name) and not Path(name).is_dir()


def _public(name: str) -> str:
    """The name of a model or LoRA for files that leave this machine: a hub's id, or the last part of a path."""
    return name if _is_on_hub(name) else Path(name).name


_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def write_peft(folder: Path, lora: PlainLora, base: BaseModel) -> None:
    """Write a regime's LoRA, with the start, in float32 into an existing folder that PEFT loads."""
    lora = base.complete(lora)
    tensors: dict[str, torch.Tensor] = {}
    for name, matrices in lora.layers.items():
        tensors[f"{_PREFIX}{name}{_A}"] = matrices.A_ND
        tensors[f"{_PREFIX}{name}{_B}"] = matrices.B_ON
    config = {  # every further key of `LoraConfig` is unknown to some older PEFT, which then refuses the file
        "base_model_name_or_path": base.name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": lora.rank,
        "revision": base.revision,
        "target_modules": sorted(lora.layers),  # full names: a last part may match layers without an adapter too
        "task_type": "CAUSAL_LM",
    }
    (folder / CONFIG).write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def read_peft(folder: Path, base: BaseModel) -> PlainLora:
    """Read a folder that `write_peft` wrote for `base`, without the start.

    Raises:
        PublicationError: a file is missing or damaged.
    """
    try:
        return base.own(read(folder))
    except (OSError, ValueError) as error:
        raise PublicationError(f"{folder}: expected a LoRA in PEFT's form, found: {error!s:.200}") from error


def regime_lora(snapshot: Snapshot, adapter: str, config: HeadLoraConfig, base: BaseModel) -> PlainLora:
    """Read what `write_peft` wrote for one of a snapshot's adapters, without the start.

    Raises:
        SnapshotMismatchError: it is no LoRA; an earlier build wrote it.
        SnapshotError: see `Snapshot.weights`.
    """
    try:
        return base.own(from_tensors(snapshot.weights(adapter), lambda *_: config.scaling))
    except ValueError as error:
        raise SnapshotMismatchError(
            f"snapshot {snapshot.name}: adapters must be LoRAs, found {error}: run the build that wrote it, or start "
            "over with --fresh, which keeps the old snapshots in another folder"
        ) from error


GGUF = "adapter.gguf"
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "smollm3": "smollm3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma3_text": "gemma3",
}
"""`model_type` of transformers -> architecture of llama.cpp."""
_ROTATES_PAIRS = ("llama", "smollm3")
"""Architectures for which llama.cpp rotates neighbouring features of queries and keys. Transformers rotates the halves
of a head against each other, so the rows of these projections change places."""


def check_gguf(config: Any) -> None:
    """Check that a backbone of this configuration can be exported.

    Raises:
        UsageError: package gguf is missing.
        ConfigError: llama.cpp has no such architecture, or it is not supported here.
    """
    if find_spec("gguf") is None:
        raise UsageError("--format gguf needs package gguf: pip install 'streamlearn[gguf]'")
    if config.model_type not in ARCHITECTURES:
        raise ConfigError(
            f"--format gguf: expected a backbone of type {', '.join(ARCHITECTURES)}, found {config.model_type}; use "
            "--format peft, and convert_lora_to_gguf.py of llama.cpp"
        )


def write_gguf(folder: Path, lora: PlainLora, config: Any) -> None:
    """Write `adapter.gguf`, in float32, into an existing folder. `config` is the backbone's, see `check_gguf`."""
    import gguf  # noqa: PLC0415 - an optional dependency

    name = ARCHITECTURES[config.model_type]
    architecture = next(number for number, label in gguf.MODEL_ARCH_NAMES.items() if label == name)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    writer = gguf.GGUFWriter(folder / GGUF, name)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(lora.alpha))
    for linear, matrices in lora.layers.items():
        B_ON = matrices.B_ON.numpy()
        if name in _ROTATES_PAIRS and linear.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if linear.endswith("q_proj") else config.num_key_value_heads
            B_ON = _paired(B_ON, heads)
        target = names.get_name(linear)
        assert target is not None, f"llama.cpp has no tensor for {linear}"
        writer.add_tensor(f"{target}.weight.lora_a", matrices.A_ND.numpy())
        writer.add_tensor(f"{target}.weight.lora_b", B_ON)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _paired(B_ON: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Put feature i of the first half of each head before feature i of the second half.

    >>> _paired(np.arange(4, dtype=np.float32)[:, None], 1)[:, 0].tolist()
    [0.0, 2.0, 1.0, 3.0]
    """
    num, rank = B_ON.shape
    return np.ascontiguousarray(B_ON.reshape(heads, 2, num // heads // 2, rank).swapaxes(1, 2).reshape(num, rank))


def card(exported: ExportedRegime) -> str:
    """The model card, Markdown."""
    title = "All regimes" if exported.regime is None else f"Regime {exported.regime}"
    title += f" ({exported.label})" if exported.label else ""
    base, library = exported.base, {"peft": "peft", "gguf": "llama.cpp"}[exported.form]
    begins = "" if base.start is None else f"\n| begins from | LoRA {_public(base.start.name)}, which is part of it |"
    revision = f" at revision `{base.revision}`" if base.revision else ""
    link = f'base_model: "{base.name}"\nbase_model_relation: adapter\n' if base.is_on_hub else ""
    return f"""---
{link}library_name: {library}
tags: [lora, streamlearn]
---
# {title} of snapshot {exported.snapshot}

Learned from a stream of records by streamlearn {__version__}. A regime is a stretch of the stream with
one distribution, found by the learner.

| | |
|---|---|
| backbone | `{_public(base.name)}`{revision} |
| snapshot | {exported.snapshot}, written {exported.written} |
| records | {exported.records:,} in {exported.visits} visit{"s" * (exported.visits != 1)} |
| LoRA | rank {exported.rank}, alpha {exported.alpha:g}, on {exported.num_linears} linear layers |
| fidelity | {exported.fidelity} |{begins}

{_losses(exported)}{_canaries(exported)}## Use

{_usage(exported)}"""


def _losses(exported: ExportedRegime) -> str:
    losses, start = exported.losses, exported.base.start
    if losses is None:
        return ""
    name = "untouched backbone" if start is None else f"backbone with {_public(start.name)}"
    return f"""On {losses.records} hold-out records, which were never trained on ({losses.tokens:,} answer tokens):

| | loss, nats per token |
|---|---|
| this export | {losses.exported:.4f} |
| the daemon | {losses.daemon:.4f} |
| {name} | {losses.backbone:.4f} |

"""


def _canaries(exported: ExportedRegime) -> str:
    if not exported.canaries:
        return ""
    rows = [
        f"| {row.slice.replace('|', '/')} | {row.records} | {row.loss:.4f} | {row.backbone_loss:.4f} |"
        for row in exported.canaries
    ]
    return f"""On canaries, records from outside the stream:

| slice | records | loss, nats per token | backbone's |
|---|---|---|---|
{chr(10).join(rows)}

"""


def _usage(exported: ExportedRegime) -> str:
    if exported.form == "gguf":
        return "```\nllama-cli -m BACKBONE.gguf --lora adapter.gguf\n```\n"
    base = exported.base.name if exported.base.is_on_hub else "BACKBONE"
    revision = f', revision="{exported.base.revision}"' if exported.base.revision else ""
    return f"""```python
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

backbone = AutoModelForCausalLM.from_pretrained("{base}"{revision}, dtype=torch.float32)
model = PeftModel.from_pretrained(backbone, "FOLDER")
```

or

```
vllm serve {base} --enable-lora --max-lora-rank {_rank_limit(exported.rank)} --lora-modules {exported.name}=FOLDER
```
"""


def _rank_limit(rank: int) -> int:
    """The smallest limit on the rank that vLLM accepts.

    >>> _rank_limit(20), _rank_limit(32)
    (32, 32)
    """
    return next((limit for limit in (8, 16, 32, 64, 128, 256, 320) if limit >= rank), 512)
