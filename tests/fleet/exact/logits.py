"""Logits of the daemon's model, compared with those of transformers and PEFT in an environment without streamlearn."""
# Shape suffixes: T tokens of a prompt, V vocabulary.

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from streamlearn.adapters.context import NO_REGIME, routing_context
from streamlearn.cli.offline import RestoredModel, restored_model
from streamlearn.learner.loss import pack
from streamlearn.settings.settings import load as load_settings
from streamlearn.stream.record import Example
from tests.fleet.exact.learned_run import LearnedRun
from tests.fleet.exact.stock_environment import StockProcess, stock_process

PROMPTS_IN_A_FILE = 8  # some 200 MB with a vocabulary of 49,152


@dataclass
class Difference:
    """Of the logits of all positions of some prompts."""

    prompts: int = 0
    positions: int = 0
    difference: float = 0.0
    """Largest absolute one of a logit."""
    largest: float = 0.0
    """Largest absolute logit."""
    relative: float = 0.0
    """Largest difference over the largest absolute logit of the same position."""

    def add(self, prompts: int, answer: dict[str, Any]) -> None:
        """Count what a stock process found."""
        self.prompts += prompts
        self.positions += answer["positions"]
        self.difference = max(self.difference, answer["difference"])
        self.largest = max(self.largest, answer["largest"])
        self.relative = max(self.relative, answer["relative"])

    def to_json(self) -> dict[str, Any]:
        """For the figures."""
        return asdict(self)


class DaemonLogits:
    """The daemon's model as of the newest snapshot, in any floating-point type."""

    def __init__(self, restored: RestoredModel, dtype: str) -> None:
        self._learner = restored.model.learner
        self._model = self._learner.model.to(getattr(torch, dtype))
        self._tokenizer = restored.model.backbone.tokenizer
        numbers = restored.model.adaptation.numbers
        self._slots = {f"regime-{number}": slot for slot, number in numbers.items()}

    def ids(self, prompt: str) -> Tensor:
        """The prompt's tokens."""
        return torch.tensor(self._tokenizer.encode(prompt, add_special_tokens=False))

    def of(self, ids_T: Tensor, regime: str | None, *, packed: bool) -> Tensor:
        """Logits of all positions, under a regime or of the untouched backbone.

        `packed`: by the attention over packed records, which training and scoring use; else by the backbone's own,
        which generation uses.
        """
        example = Example(ids_T.numpy().astype(np.int32), ids_T.numpy().astype(np.int32))
        batch = pack([example], self._learner.device, [NO_REGIME if regime is None else self._slots[regime]])
        options = {"records": batch.records} if packed else {}
        with torch.no_grad(), routing_context(self._learner.model, batch.context()):
            model = self._learner.model.get_base_model()
            found: Tensor = model(
                input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **options
            ).logits[0]
            return found


@contextmanager
def daemon_logits(run: LearnedRun, dtype: str) -> Iterator[DaemonLogits]:
    """The model of the newest snapshot."""
    with restored_model(load_settings(run.config), "newest", same_dtype=True) as restored:
        yield DaemonLogits(restored, dtype)


def compare(
    run: LearnedRun,
    python: Path,
    backbone: str,
    prompts: Sequence[str],
    *,
    dtype: str,
    folder: Path,
    attention: str = "sdpa",
    packed: bool = True,
    with_backbone: bool = True,
) -> dict[str, Any]:
    """Differences by regime.

    Args:
        run: What was learned.
        python: Interpreter of an environment without streamlearn.
        backbone: Folder of the backbone.
        prompts: Texts whose logits are compared, at every position.
        dtype: Floating-point type of both models.
        folder: For temporary files.
        attention: Implementation in transformers.
        packed: See `DaemonLogits.of`.
        with_backbone: Compare those of the untouched backbone too.
    """
    exports = [str(run.peft / name) for name in run.regimes]
    regimes = (*run.regimes, None) if with_backbone else run.regimes
    with (
        daemon_logits(run, dtype) as daemon,
        stock_process(python, "logits.py", backbone, dtype, attention, *exports) as stock,
    ):
        each = {name: _difference(daemon, stock, prompts, name, folder, packed) for name in regimes}
    return {name or "backbone": found.to_json() for name, found in each.items()}


def _difference(
    daemon: DaemonLogits, stock: StockProcess, prompts: Sequence[str], regime: str | None, folder: Path, packed: bool
) -> Difference:
    file, found = folder / "logits.safetensors", Difference()
    for start in range(0, len(prompts), PROMPTS_IN_A_FILE):
        some = prompts[start : start + PROMPTS_IN_A_FILE]
        tensors: dict[str, Tensor] = {}
        for index, prompt in enumerate(some):
            ids_T = daemon.ids(prompt)
            tensors |= {f"ids.{index}": ids_T, f"expected.{index}": daemon.of(ids_T, regime, packed=packed)}
        save_file(tensors, file)
        found.add(len(some), stock.ask({"regime": regime, "file": str(file)}))
    file.unlink()
    return found
