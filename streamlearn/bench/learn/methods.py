"""Methods: an arm of the one adapter and learner, and how it is run.

All have the same backbone, optimizer, learning rate, batches and, within a tenth, activated parameters: LoRA of rank 20
on the MLP's linears or its equal. Those with a `baseline` are told where tasks begin and end; `streamlearn` and its
ablations run in the daemon, which is told nothing.

| method | what it is |
|---|---|
| streamlearn | the default preset in the daemon |
| lora | one LoRA, trained on whatever comes (SeqLoRA) |
| joint | the same LoRA on all records shuffled: the upper bound |
| cp-moe | CP-MoE (arXiv 2605.20247), boundaries and test regimes given |
| mh-moe | MH-MoE (arXiv 2602.12587) |
| loramoe | LoRAMoE (arXiv 2312.09979), alpha / rank 2; no sample types are named, so L_lbc is not in play |
| ewc | `lora` with elastic weight consolidation (Kirkpatrick et al. 2017) |
| er | `lora` with experience replay from 80 records (Chaudhry et al. 2019) |
| o-lora | a LoRA for each task, kept orthogonal (Wang et al. 2023) |
| gem | `lora` with gradient episodic memory, 10 records a task (Lopez-Paz and Ranzato 2017) |
| mot | MoT (arXiv 2605.29757), its stages restarted at each boundary |
| frozen | the backbone |
| streamlearn-told | the default preset, boundaries and test regimes given: what finding them costs |
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from streamlearn.bench.learn import variants
from streamlearn.bench.learn.baselines.baseline import Baseline
from streamlearn.bench.learn.baselines.ewc import Ewc
from streamlearn.bench.learn.baselines.gem import Gem
from streamlearn.bench.learn.baselines.given import RegimesGiven
from streamlearn.bench.learn.baselines.o_lora import OLora
from streamlearn.bench.learn.baselines.replay import Replay
from streamlearn.bench.learn.suites import Suite
from streamlearn.runtime.components import Components
from streamlearn.runtime.model import Model
from streamlearn.settings import Settings

RANK = 20
"""Of `lora`; the ranks below activate as many parameters on the bundled backbone."""
MLP = "adapter.target_modules=[gate_proj, up_proj, down_proj]"


@dataclass(frozen=True)
class Setting:
    """What a baseline is built from."""

    model: Model
    settings: Settings
    slots: Sequence[int]
    """The regime of each stretch."""


@dataclass(frozen=True)
class Method:
    """One row."""

    arm: str
    """`{rank}` and `{alpha}` stand for those of a LoRA for each stretch."""
    baseline: Callable[[Setting], Baseline] | None = None
    """What trains it; None: the daemon does."""
    shuffled: bool = False
    """Whether all records come in random order."""
    trained: bool = True
    given: bool = False
    """Whether test records are routed with the regime that they are known to belong to."""
    variant: Callable[[Components], None] | None = None
    """What is changed of the daemon that no setting can change."""
    steered_eval: bool = True
    """Whether test records are routed with their regime's bias."""

    def arm_for(self, suite: Suite) -> str:
        """The arm, for as many stretches."""
        rank = RANK * len(suite.stretches)
        return self.arm.format(rank=rank, alpha=2.0 * rank)


def _plain(setting: Setting) -> Baseline:
    return Baseline(setting.model.learner, seed=setting.settings.seed)


def _given(setting: Setting) -> Baseline:
    return RegimesGiven(
        setting.model.learner,
        seed=setting.settings.seed,
        adaptation=setting.model.adaptation,
        warmup_tokens=setting.settings.probe.warmup_tokens or 0,
        slots=setting.slots,
    )


def _gem(setting: Setting) -> Baseline:
    return Gem(setting.model.learner, seed=setting.settings.seed, settings=setting.settings.learner)


METHODS: Mapping[str, Method] = {
    "streamlearn": Method("streamlearn"),
    "lora": Method("lora", _plain),
    "joint": Method("lora", _plain, shuffled=True),
    "cp-moe": Method(f"cp-moe:adapter.rank=10:{MLP}", _given, given=True),
    "mh-moe": Method("mh-moe", _plain),
    # Its paper's alpha / rank of 8 forgets more: AF .033 against .009 on four tasks of order 2, on a seed of its own.
    "loramoe": Method("loramoe:adapter.rank=3:adapter.alpha=6", _plain),
    "ewc": Method("lora", lambda s: Ewc(s.model.learner, seed=s.settings.seed)),
    "er": Method("lora", lambda s: Replay(s.model.learner, seed=s.settings.seed)),
    "o-lora": Method(
        "lora:adapter.rank={rank}:adapter.alpha={alpha}",
        lambda s: OLora(s.model.learner, seed=s.settings.seed, rank=RANK),
    ),
    "gem": Method("lora", _gem),
    "mot": Method("mot:adapter.rank=12", _plain),
    "frozen": Method("lora", _plain, trained=False),
    "streamlearn-told": Method("streamlearn", _given, given=True),
}
"""In the order in which they are run."""


def _at_rate(words: str, lr: float) -> dict[str, Method]:
    """The default and what it is compared with, to see whom the common learning rate suits."""
    named = {"": "streamlearn", **{f"{name}, ": name for name in ("lora", "joint", "cp-moe", "mh-moe", "loramoe")}}
    return {
        prefix + words: replace(METHODS[name], arm=f"{METHODS[name].arm}:learner.lr={lr}")
        for prefix, name in named.items()
    }


ABLATIONS: Mapping[str, Method] = {
    "heads 1": Method("streamlearn:adapter.num_heads=1:adapter.rank=20:adapter.alpha=40"),
    "heads 2": Method("streamlearn:adapter.num_heads=2:adapter.rank=13:adapter.alpha=26"),
    "heads 4": Method("streamlearn:adapter.num_heads=4:adapter.rank=7:adapter.alpha=14"),
    "heads 16": Method("streamlearn:adapter.num_heads=16:adapter.rank=2:adapter.alpha=4"),
    "no probe": Method("streamlearn:probe.enabled=false"),
    "no bias": Method("streamlearn:adapter.bias=none"),
    "soft bias 0.2": Method("streamlearn:adapter.bias=soft:adapter.bias_strength=0.2"),
    "soft bias 2": Method("streamlearn:adapter.bias=soft:adapter.bias_strength=2"),
    "two claims a head": Method("streamlearn:adapter.experts_claimed=2"),
    "two claims, router frozen": Method("streamlearn:adapter.experts_claimed=2:learner.router_lr=0"),
    "two claims, router at full rate": Method("streamlearn:adapter.experts_claimed=2:learner.router_lr=1"),
    "two claims, native gate": Method("streamlearn:adapter.experts_claimed=2:adapter.router_gradient=native"),
    "no consolidation": Method("streamlearn:consolidate.anchor_strength=0"),
    "lambda 10": Method("streamlearn:consolidate.anchor_strength=10"),
    "importance from the probe": Method("streamlearn:consolidate.importance=transient"),
    "plain AdamW": Method("streamlearn", variant=variants.plain_adamw),
    "one bias a stretch": Method("streamlearn", variant=variants.one_bias_a_stretch),
    "no bias at eval": Method("streamlearn", steered_eval=False),
    **_at_rate("a third of the learning rate", 0.0003),
    **_at_rate("three times the learning rate", 0.003),
    "mh-moe, native gate": Method("mh-moe:adapter.router_gradient=native", _plain),
    "mh-moe, router frozen": Method("mh-moe:adapter.router_gradient=none", _plain),
}
"""What each mechanism of the default is worth; `streamlearn` itself is among the methods."""
