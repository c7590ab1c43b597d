"""Methods: an arm of the common adapter and learner, and the way it is run.

All methods share the backbone, the optimizer, the learning rate, the batches and, within a tenth, the number of
activated parameters: those of a LoRA of rank 20 on the MLP linears. Methods with a `baseline` are given the task
boundaries. `streamlearn` and its ablations run in the daemon and are given none.

| method | description |
|---|---|
| streamlearn | the default preset in the daemon |
| lora | one LoRA, trained on the stream as it comes (SeqLoRA) |
| joint | the same LoRA on all records in random order: the upper bound |
| cp-moe | CP-MoE (arXiv 2605.20247), given the boundaries and the regime of each test record ("test regimes") |
| mh-moe | MH-MoE (arXiv 2602.12587) |
| loramoe | LoRAMoE (arXiv 2312.09979), alpha / rank 2; without sample types, so L_lbc does not apply |
| ewc | `lora` with elastic weight consolidation (Kirkpatrick et al. 2017) |
| er | `lora` with experience replay from 80 records (Chaudhry et al. 2019) |
| o-lora | one LoRA per task, kept orthogonal (Wang et al. 2023) |
| gem | `lora` with gradient episodic memory, 10 records per task (Lopez-Paz and Ranzato 2017) |
| mot | MoT (arXiv 2605.29757), its stages restarted at each boundary |
| frozen | the backbone without training |
| blind | the best answers that ignore the input |
| streamlearn-told | the default preset, given boundaries and test regimes: shows the cost of detection |
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from streamlearn.bench.learn import variants
from streamlearn.bench.learn.baselines.baseline import Baseline
from streamlearn.bench.learn.baselines.ewc import Ewc
from streamlearn.bench.learn.baselines.gem import Gem
from streamlearn.bench.learn.baselines.o_lora import OLora
from streamlearn.bench.learn.baselines.oracle_regimes import OracleRegimes
from streamlearn.bench.learn.baselines.replay import Replay
from streamlearn.bench.learn.suite import Suite
from streamlearn.runtime.components import Components
from streamlearn.runtime.model import Model
from streamlearn.settings import Settings

RANK = 20
"""Rank of `lora`; the ranks of the other methods below activate as many parameters on the bundled backbone."""
MLP = "adapter.target_modules=[gate_proj, up_proj, down_proj]"


@dataclass(frozen=True)
class BaselineContext:
    """What a baseline is built from."""

    model: Model
    settings: Settings
    slots: Sequence[int]
    """The regime slot of each segment."""


@dataclass(frozen=True)
class Method:
    """A method or an ablation."""

    arm: str
    """The preset and its changes; `{rank}` and `{alpha}` stand for those of one LoRA per segment."""
    baseline: Callable[[BaselineContext], Baseline] | None = None
    """Builds the baseline that trains this method; None: it runs in the daemon."""
    shuffled: bool = False
    """Whether the records of all tasks come in random order."""
    trained: bool = True
    blind: bool = False
    """Whether no model answers: the best answers that ignore the input, see `blind`."""
    oracle_regimes: bool = False
    """Whether each test record is routed with the regime of its task."""
    variant: Callable[[Components], None] | None = None
    """A change to the daemon that no setting can make."""
    eval_bias: bool = True
    """Whether the daemon routes test records with the bias of their regime."""

    def arm_for(self, suite: Suite) -> str:
        """Return the arm for a suite, its rank multiplied by the number of segments."""
        rank = RANK * len(suite.segments)
        return self.arm.format(rank=rank, alpha=2.0 * rank)


def _plain(context: BaselineContext) -> Baseline:
    return Baseline(context.model.learner, seed=context.settings.seed)


def _oracle(context: BaselineContext) -> Baseline:
    return OracleRegimes(
        context.model.learner,
        seed=context.settings.seed,
        adaptation=context.model.adaptation,
        warmup_tokens=context.settings.probe.warmup_tokens or 0,
        slots=context.slots,
    )


def _gem(context: BaselineContext) -> Baseline:
    return Gem(context.model.learner, seed=context.settings.seed, settings=context.settings.learner)


METHODS: Mapping[str, Method] = {
    "streamlearn": Method("streamlearn"),
    "lora": Method("lora", _plain),
    "joint": Method("lora", _plain, shuffled=True),
    "cp-moe": Method(f"cp-moe:adapter.rank=10:{MLP}", _oracle, oracle_regimes=True),
    "mh-moe": Method("mh-moe", _plain),
    # The paper's alpha / rank of 8 forgets more: AF .033 against .009 on four tasks of order 2, on a separate seed.
    "loramoe": Method("loramoe:adapter.rank=3:adapter.alpha=6", _plain),
    "ewc": Method("lora", lambda c: Ewc(c.model.learner, seed=c.settings.seed)),
    "er": Method("lora", lambda c: Replay(c.model.learner, seed=c.settings.seed)),
    "o-lora": Method(
        "lora:adapter.rank={rank}:adapter.alpha={alpha}",
        lambda c: OLora(c.model.learner, seed=c.settings.seed, rank=RANK),
    ),
    "gem": Method("lora", _gem),
    "mot": Method("mot:adapter.rank=12", _plain),
    "frozen": Method("lora", _plain, trained=False),
    "blind": Method("lora", _plain, trained=False, blind=True),
    "streamlearn-told": Method("streamlearn", _oracle, oracle_regimes=True),
}
"""In the order in which they are run."""


def _at_rate(label: str, lr: float) -> dict[str, Method]:
    """The default and five other methods at another learning rate, to show which methods the common rate suits."""
    prefixes = {"": "streamlearn", **{f"{name}, ": name for name in ("lora", "joint", "cp-moe", "mh-moe", "loramoe")}}
    return {
        prefix + label: replace(METHODS[name], arm=f"{METHODS[name].arm}:learner.lr={lr}")
        for prefix, name in prefixes.items()
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
    "one bias a stretch": Method("streamlearn", variant=variants.one_bias_per_segment),
    "no bias at eval": Method("streamlearn", eval_bias=False),
    **_at_rate("a third of the learning rate", 0.0003),
    **_at_rate("three times the learning rate", 0.003),
    "mh-moe, native gate": Method("mh-moe:adapter.router_gradient=native", _plain),
    "mh-moe, router frozen": Method("mh-moe:adapter.router_gradient=none", _plain),
}
"""Ablations of the default preset and of the methods it is compared with; `streamlearn` itself is among `METHODS`."""
