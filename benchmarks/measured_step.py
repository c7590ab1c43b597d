"""The memory of the largest step of one configuration, in a process of its own, and what is estimated for it.

    python -m streamlearn.bench.measured_step '{"adapter": {"preset": "lora"}, "stream": {"batch_tokens": 1024}}'

The argument holds sections of a configuration. The batch is the largest that they allow: random tokens, all learned.
"""

import sys
from typing import Any

import numpy as np
import orjson

from benchmarks.measuring import peak_mib, resident_mib
from streamlearn.adapters.presets import objective
from streamlearn.adapters.tuner import attach
from streamlearn.backbone.load import load, outline
from streamlearn.baselines.consolidate import hooks_for
from streamlearn.cli.doctor import step_memory
from streamlearn.daemon.model import adapter_of
from streamlearn.daemon.process import return_freed_memory, return_freed_tensors
from streamlearn.events import configure_logging
from streamlearn.learner.learner import Learner
from streamlearn.settings import Settings, with_defaults
from streamlearn.stream.record import Example

STEPS = 2
"""The second has the optimizer's moments from its start."""


def largest_batch(settings: Settings, vocab_size: int) -> list[Example]:
    """Return records of `stream.max_tokens` that fill `stream.batch_tokens`."""
    generator = np.random.default_rng(0)
    length, total = settings.stream.max_tokens, settings.stream.batch_tokens
    lengths = [min(length, total - start) for start in range(0, total, length)]
    ids = [generator.integers(0, vocab_size, size=each, dtype=np.int32) for each in lengths]
    return [Example(input_ids=each, labels=each.copy()) for each in ids]


def run(sections: dict[str, Any]) -> dict[str, Any]:
    """Take the steps; return the measured and the estimated peak."""
    settings = Settings.model_validate({"source": {"jsonl": {"path": "unused"}}, "state": "unused", **sections})
    config, shape = adapter_of(settings), outline(settings.backbone)
    settings = with_defaults(settings, is_vision=shape.is_vision, per_regime=config.per_regime)
    if settings.learner.activation_checkpointing:  # as the daemon does
        return_freed_tensors()
    before = int(resident_mib() * 2**20)
    backbone = load(settings.backbone, shape)
    dtype, wanted = backbone.arithmetic.dtype, objective(settings)
    estimate = step_memory(settings, shape, config, dtype=dtype, on_cpu=True, adapters=1, process=before)
    learner = Learner(attach(backbone.model, config, 0), settings.learner, backbone.device, router_lr=wanted.router_lr)
    learner.hooks = hooks_for(learner, settings)
    batch = largest_batch(settings, backbone.vocab_size)
    slots = [0] * len(batch) if learner.routes_by_regime else None
    return_freed_memory()
    loaded = peak_mib(restart=True)
    for _ in range(STEPS):
        step = learner.step(batch, slots)
        assert step.refusal is None, step.refusal
    measured = peak_mib()
    return {
        "estimated_mib": round(estimate.total / 2**20, 1),
        "measured_mib": round(measured, 1),
        "off_percent": round(100 * (estimate.total / 2**20 / measured - 1), 1),
        "loaded_mib": round(loaded, 1),
        "dtype": backbone.arithmetic.name,
        "estimate": str(estimate),
    }


if __name__ == "__main__":
    configure_logging("error")
    sys.stdout.buffer.write(orjson.dumps(run(orjson.loads(sys.argv[1])), option=orjson.OPT_APPEND_NEWLINE))
