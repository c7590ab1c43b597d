"""Backbone plus adapter as one model folder."""
# Shape suffixes: L learned tokens, V vocabulary.

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from peft import PeftModel
from torch import Tensor

from streamlearn.backbone.load import Backbone
from streamlearn.export import peft_folder
from streamlearn.export.exported_regime import BaseModel
from streamlearn.export.plain_lora import PlainLora
from streamlearn.learner.loss import packed_logits
from streamlearn.learner.packing import PackedBatch, pack
from streamlearn.stream.decode import Example


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
