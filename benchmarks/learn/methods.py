"""Methods: an arm of the common adapter and learner, and the way it is run.

All methods share the backbone, the optimizer, the batches and, within an eighth, the number of activated parameters:
those of preset `streamlearn` (`ranks`). Methods with a `baseline` are given the task boundaries; those that are given
test regimes also route each test record with the regime of its task, an unseen task's with the first regime.
`streamlearn`, `streamlearn-routed`, `lora-per-regime`, `importance` and the ablations run in the daemon and are given
neither. Without the probe the daemon does not measure what serves unknown requests best; arms without it answer them by
what it found on SmolLM2, the mean of the adapters.

| method | description |
|---|---|
| streamlearn | the default preset in the daemon |
| streamlearn-routed | the same with two experts per head in each regime's adapter, among which tokens choose |
| lora | one LoRA, trained on the stream as it comes (SeqLoRA) |
| joint | a LoRA with as many stored parameters as `streamlearn`, on all records in random order, cosine schedule |
| joint-3 | the same in three passes |
| lora-per-task | a fresh LoRA for each segment's tasks; test records are routed to that of their task |
| lora-per-regime | a fresh LoRA without heads for each regime, behind the daemon's detector and router |
| importance | one LoRA in the daemon, with importance from the path, kept apart by regime, and anchors at shifts |
| er | `lora` with experience replay (Chaudhry et al. 2019), a memory of the size of the daemon's hold-out |
| der++ | `lora` with replay of as many records and their logits (Buzzega et al. 2020) |
| ewc | `lora` with elastic weight consolidation (Kirkpatrick et al. 2017) |
| online-ewc | `lora` with online EWC (Schwarz et al. 2018) |
| cp-moe | CP-MoE (arXiv 2605.20247) with importance from the transient expert, given test regimes |
| loramoe | LoRAMoE (arXiv 2312.09979), alpha / rank 2; sample types are labels and texts |
| mot | MoT (arXiv 2605.29757), its three stages scaled to each segment |
| o-lora | one LoRA per task, kept orthogonal (Wang et al. 2023) |
| sd-lora | SD-LoRA (Wu et al. 2025): frozen directions of earlier LoRAs, trained magnitudes |
| inflora | InfLoRA (Liang and Li 2024): one LoRA per task, outside of what earlier inputs span |
| online-lora | Online-LoRA (Wei et al. 2025): a new LoRA at plateaus of the loss, without boundaries |
| mh-moe | MH-MoE (arXiv 2602.12587) |
| gem | `lora` with gradient episodic memory, as many records per task (Lopez-Paz and Ranzato 2017) |
| frozen | the backbone without training |
| blind | the best answers that ignore the input |
| streamlearn-told | the default preset, given boundaries and test regimes: shows the cost of detection |
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.learn.baselines.baseline import Baseline
from benchmarks.learn.baselines.context import BaselineContext
from benchmarks.learn.baselines.cosine import CosineSchedule
from benchmarks.learn.baselines.dark_replay import DarkReplay
from benchmarks.learn.baselines.ewc import Ewc, OnlineEwc
from benchmarks.learn.baselines.gem import Gem
from benchmarks.learn.baselines.inflora import InfLora
from benchmarks.learn.baselines.o_lora import OLora
from benchmarks.learn.baselines.online_lora import OnlineLora
from benchmarks.learn.baselines.oracle_regimes import OracleRegimes
from benchmarks.learn.baselines.replay import Replay
from benchmarks.learn.baselines.sd_lora import SdLora
from benchmarks.learn.baselines.staged import StagedTraining
from benchmarks.learn.ranks import fill
from benchmarks.learn.segments import regime_slots
from benchmarks.learn.suite import Suite
from streamlearn.adapters.check import LinearShapes

RANK = "adapter.rank={rank}:adapter.alpha={alpha}"
STORED = "adapter.rank={stored}:adapter.alpha={stored_alpha}"
BLOCKS = "adapter.rank={blocks}:adapter.alpha={blocks_alpha}:baseline.rank={rank}"
MLP = "adapter.target_modules=[gate_proj, up_proj, down_proj]"
CP_MOE = f"cp-moe:{RANK}:{MLP}:consolidate.importance=transient:consolidate.coordinates=random"
MEAN = "serve.unknown=mean"
PER_REGIME = f"lora:{RANK}:adapter.per_regime=true:probe.enabled=false"


@dataclass(frozen=True)
class Method:
    """A method or an ablation."""

    arm: str
    """The preset and its changes, with the placeholders of `ranks`."""
    baseline: Callable[[BaselineContext], Baseline] | None = None
    """Builds the baseline that trains this method; None: it runs in the daemon."""
    shuffled: bool = False
    """Whether the records of all tasks come in random order."""
    trained: bool = True
    oracle_regimes: bool = False
    """Whether each test record is routed with the regime of its task."""
    passes: int = 1
    """Number of passes over the records."""
    search: tuple[str, tuple[float, ...]] | None = None
    """Dotted key of the method's strength and the values that a search tries; None: it has none."""
    tuned_as: str | None = None
    """Method whose searched values this one uses; None: its own."""
    blind: bool = False
    """Whether no model answers: the best answers that ignore the input, see `blind`."""

    def arm_for(self, suite: Suite, linears: LinearShapes) -> str:
        """Return the arm for a suite and a backbone with these linears, without placeholders."""
        slots, _ = regime_slots(suite)
        return fill(self.arm, linears, segments=len(slots), regimes=len(set(slots)))


def _built(kind: Callable[..., Baseline]) -> Callable[[BaselineContext], Baseline]:
    """Return the builder of a baseline that needs nothing but its options."""
    return lambda c: kind(c.model.learner, seed=c.settings.seed, **c.options)


def _oracle(c: BaselineContext) -> Baseline:
    return OracleRegimes(
        c.model.learner,
        seed=c.settings.seed,
        adaptation=c.model.adaptation,
        warmup_tokens=c.settings.probe.warmup_tokens or 0,
        slots=c.slots,
        **c.options,
    )


def _cosine(c: BaselineContext) -> Baseline:
    return CosineSchedule(c.model.learner, seed=c.settings.seed, records=c.records, **c.options)


def _replay(c: BaselineContext) -> Baseline:
    return Replay(c.model.learner, seed=c.settings.seed, capacity=c.holdout_records, **c.options)


def _dark_replay(c: BaselineContext) -> Baseline:
    return DarkReplay(c.model.learner, seed=c.settings.seed, capacity=c.holdout_records, **c.options)


def _staged(c: BaselineContext) -> Baseline:
    return StagedTraining(c.model.learner, seed=c.settings.seed, settings=c.settings, **c.options)


def _sd_lora(c: BaselineContext) -> Baseline:
    return SdLora(c.model.learner, seed=c.settings.seed, lr=c.model.learner.lr, **c.options)


def _inflora(c: BaselineContext) -> Baseline:
    return InfLora(c.model.learner, seed=c.settings.seed, segments=len(c.slots), **c.options)


def _gem(c: BaselineContext) -> Baseline:
    records = c.settings.holdout.records_per_regime
    return Gem(c.model.learner, seed=c.settings.seed, settings=c.settings.learner, records=records, **c.options)


_plain = _built(Baseline)
_ANCHORS = ("consolidate.anchor_strength", (0.01, 0.1, 1.0, 10.0))
_FISHER = ("baseline.strength", (0.001, 0.01, 0.1, 1.0))

METHODS: Mapping[str, Method] = {
    "streamlearn": Method("streamlearn"),
    "streamlearn-routed": Method("streamlearn-routed", tuned_as="streamlearn"),
    "lora": Method(f"lora:{RANK}", _plain),
    "joint": Method(f"lora:{STORED}", _cosine, shuffled=True),
    "joint-3": Method(f"lora:{STORED}", _cosine, shuffled=True, passes=3, tuned_as="joint"),
    "lora-per-task": Method(PER_REGIME, _oracle, oracle_regimes=True),
    "lora-per-regime": Method(f"{PER_REGIME}:{MEAN}"),
    "importance": Method(f"lora:{RANK}:consolidate.anchor_strength=0.1:probe.enabled=false", search=_ANCHORS),
    "er": Method(f"lora:{RANK}", _replay),
    "der++": Method(f"lora:{RANK}", _dark_replay, search=("baseline.alpha", (0.01, 0.1, 1.0, 10.0))),
    "ewc": Method(f"lora:{RANK}", _built(Ewc), search=_FISHER),
    "online-ewc": Method(f"lora:{RANK}", _built(OnlineEwc), search=_FISHER),
    "cp-moe": Method(
        CP_MOE,
        _oracle,
        oracle_regimes=True,
        # Up to the order of the paper's 5e3: a path of ten steps gives each weight less importance than a segment's.
        search=("consolidate.anchor_strength", (10.0, 100.0, 1000.0, 10_000.0)),
    ),
    # The paper's alpha / rank of 8 forgets more on nano: AF .033 against .009 on four tasks of order 2, another seed.
    "loramoe": Method(
        f"loramoe:{RANK}:learner.sample_types=[label, text]",
        _plain,
        search=("learner.localized_balance", (0.001, 0.01, 0.1, 1.0)),
    ),
    "mot": Method(f"mot:{RANK}", _staged),
    "o-lora": Method(f"lora:{BLOCKS}", _built(OLora), search=("baseline.strength", (0.005, 0.05, 0.5, 5.0))),
    "sd-lora": Method(f"lora:{BLOCKS}", _sd_lora, search=("baseline.magnitude_lr", (0.1, 1.0, 10.0, 100.0))),
    "inflora": Method(f"lora:{BLOCKS}", _inflora, search=("baseline.threshold", (0.5, 0.9, 0.97, 0.99))),
    "online-lora": Method(f"lora:{BLOCKS}", _built(OnlineLora), search=_FISHER),
    "mh-moe": Method("mh-moe", _plain),
    "gem": Method(f"lora:{RANK}", _gem),
    "frozen": Method(f"lora:{RANK}", _plain, trained=False),
    "blind": Method(f"lora:{RANK}", _plain, trained=False, blind=True),
    "streamlearn-told": Method("streamlearn", _oracle, oracle_regimes=True, tuned_as="streamlearn"),
}
"""In the order in which they are run."""

ABLATIONS: Mapping[str, Method] = {
    "heads 1": Method(f"streamlearn:adapter.num_heads=1:{RANK}"),
    "heads 2": Method(f"streamlearn:adapter.num_heads=2:{RANK}"),
    "heads 4": Method(f"streamlearn:adapter.num_heads=4:{RANK}"),
    "heads 16": Method(f"streamlearn:adapter.num_heads=16:{RANK}"),
    "one adapter": Method("streamlearn:adapter.per_regime=false"),
    "no head start": Method(f"streamlearn:probe.enabled=false:{MEAN}"),
    "nearest for unknown": Method("streamlearn:serve.unknown=nearest"),
    "backbone for unknown": Method("streamlearn:serve.unknown=backbone"),
    "cp-moe, no CKA bias": Method(f"{CP_MOE}:adapter.bias=none", _oracle, oracle_regimes=True),
    "cp-moe, no consolidation": Method(f"{CP_MOE}:consolidate.anchor_strength=0", _oracle, oracle_regimes=True),
}
"""Ablations of the default preset, and of the method that a name starts with."""
