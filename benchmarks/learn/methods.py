"""Methods: an arm of the common adapter and learner, and the way it is run.

All methods share the backbone, the optimizer, the batches and, within an eighth, the number of activated parameters:
those of preset `streamlearn` (`fill`). Methods with a `baseline` are given the task boundaries; those that are given
test regimes also route each test record with the regime of its task, an unseen task's with the first regime.
`streamlearn`, `streamlearn-routed`, `lora-per-regime`, `importance`, `mh-cp-moe` and the ablations of `streamlearn` run
in the daemon and are given neither. Without the probe the daemon does not measure what serves unknown requests best;
arms without it answer them by what it found on SmolLM2, the mean of the adapters.

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
| cp-moe | CP-MoE (arXiv 2605.20247), given test regimes |
| mh-cp-moe | the heads of `mh-moe` with CP-MoE's probe, bias and consolidation, in the daemon |
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

An arm is a preset and its changed settings on one line, such as `mh-moe:learner.router_lr=0:adapter.rank=2`. Changes in
the section `baseline` are options of the baseline that trains the arm; all others are settings. A profile has what
depends on the backbone: chosen on development records and kept as a JSON file.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
import yaml

from benchmarks.learn.baselines import (
    Baseline,
    BaselineContext,
    CosineSchedule,
    DarkReplay,
    Ewc,
    Gem,
    OnlineEwc,
    OracleRegimes,
    Replay,
    StagedTraining,
)
from benchmarks.learn.lora_baselines import InfLora, OLora, OnlineLora, SdLora
from benchmarks.learn.suites import Prompts, Suite
from streamlearn.adapters.presets import HeadLoraConfig, LinearShapes, activated_parameters, resolve
from streamlearn.daemon.model import adapter_of
from streamlearn.errors import UsageError
from streamlearn.settings import AdapterSettings, Settings

COMMON: Mapping[str, Any] = {"snapshot.every_records": 1_000_000, "snapshot.every_s": 1e9, "log.level": "error"}
"""Settings of every run: snapshots and log lines would only cost time."""
OPTIONS = "baseline"
"""The section whose values are options of the baseline."""
PACKAGED = ("nano", "smollm2")
"""Names of the profiles in `profiles/`."""
ALPHA_PER_RANK = 2


@dataclass(frozen=True)
class Profile:
    """What the runs of all methods on one backbone have in common, and what is a single method's own."""

    name: str
    backbone: str
    """Name of the backbone in tables, such as `SmolLM2-135M-Instruct`; for a builtin model its setting; or a folder."""
    prompts: Prompts = "plain"
    """Whether a record is prompt and completion, or two messages in the backbone's chat template."""
    records: int = 100
    """Maximum training records per task."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key -> value, for all methods."""
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Method -> dotted key -> value; overrides `settings` and the method's arm, see `own_values`."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """What the values were chosen from; empty for values that were not searched."""

    def backbone_name(self, folder: Path | None) -> str:
        """Return the backbone's name in tables; a folder is the profile's backbone unless that is a builtin model."""
        return self.backbone if folder is None or not self.backbone.startswith("builtin:") else folder.resolve().name

    def model(self, folder: Path | None) -> str:
        """Return the setting `backbone.model`: the given folder, or the profile's backbone.

        Raises:
            UsageError: the folder is none, or none is given and the profile's backbone is neither builtin nor a folder.
        """
        if folder is not None:
            if not folder.is_dir():
                raise UsageError(f"--backbone {folder}: expected the folder of a model")
            return str(folder.resolve())
        if not self.backbone.startswith("builtin:") and not Path(self.backbone).is_dir():
            raise UsageError(f"--backbone: profile {self.name} is for {self.backbone}; name the folder of that model")
        return self.backbone

    def to_json(self) -> bytes:
        """Return the content of the profile's file."""
        values = {key: value for key, value in asdict(self).items() if key != "name"}
        return orjson.dumps(values, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def read_profile(name: str) -> Profile:
    """Read a packaged profile by name, or a profile's file.

    Raises:
        UsageError: there is no such profile, or its file is not a profile.
    """
    file = Path(name)
    if name in PACKAGED:
        text = files(__package__).joinpath("profiles", f"{name}.json").read_bytes()
    elif file.is_file():
        text = file.read_bytes()
    else:
        raise UsageError(f"--profile {name}: expected a file or one of {', '.join(PACKAGED)}")
    try:
        return Profile(name=file.stem, **orjson.loads(text))
    except (orjson.JSONDecodeError, TypeError) as error:
        raise UsageError(f"--profile {name}: not a profile: {error}") from error


@dataclass(frozen=True)
class Arm:
    """Settings, and options of the baseline by name."""

    settings: Settings
    options: Mapping[str, float]


def read_arm(
    arm: str,
    profile: Profile,
    *,
    seed: int,
    state: Path,
    stream: Path,
    shared: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
) -> Arm:
    """Return settings and options of an arm; later ones override: profile, `shared`, the arm's changes, `own`.

    Args:
        arm: `PRESET:section.key=value:...`.
        profile: Gives the settings for all methods.
        seed: Seed of the run.
        state: The daemon's state folder.
        stream: File of the records.
        shared: Changes for all arms, by dotted key.
        own: The method's changes that the profile or a search adds, by dotted key.

    Raises:
        UsageError: a change is not `section.key=value`.
    """
    preset, *changes = arm.split(":")
    sections: dict[str, Any] = {"adapter": {"preset": preset}}
    changed = dict(map(_change, changes))
    for section, values in by_section(COMMON, profile.settings, shared or {}, changed, own or {}).items():
        sections.setdefault(section, {}).update(values)
    options = sections.pop(OPTIONS, {})
    settings = Settings(state=state, seed=seed, source={"jsonl": {"path": stream}}, **sections)
    return Arm(settings, options)


def own_values(name: str, arm: str, profile: Profile) -> dict[str, Any]:
    """Return the values that a profile has for a method, by dotted key; they override the method's arm.

    An ablation has none of its own: it takes those of its preset, except for what its arm changes.
    """
    preset, *changes = arm.split(":")
    if name in profile.methods:
        return dict(profile.methods[name])
    changed = dict(map(_change, changes))
    return {key: value for key, value in profile.methods.get(preset, {}).items() if key not in changed}


def by_section(*layers: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Group values by the section of their dotted key; later layers override earlier ones."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in (item for layer in layers for item in layer.items()):
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections


def _change(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or "." not in key:
        raise UsageError(f"arm: expected PRESET:section.key=value:..., found the change {text!r}")
    return key, yaml.safe_load(value)


def fill(arm: str, linears: LinearShapes, *, segments: int, regimes: int) -> str:
    """Return the arm with its ranks: those at which methods of different shapes have equally many parameters.

    | placeholder | stands for |
    |---|---|
    | {rank}, {alpha} | the rank at which this arm activates as many parameters as preset `streamlearn` |
    | {stored}, {stored_alpha} | the rank at which this arm stores as many as `streamlearn` does for these regimes |
    | {blocks}, {blocks_alpha} | {rank} times the number of segments: one LoRA per segment, side by side |

    Parameters are those of A and B in the linears that the arm adapts, without routers. alpha is always twice the rank,
    as in the preset, so that all methods have the same scaling.

    Args:
        arm: An arm.
        linears: The backbone's linears, name -> (in features, out features).
        segments: Number of segments of the stream.
        regimes: Number of different sets of tasks among them.
    """
    ones = dict.fromkeys(("rank", "alpha", "stored", "stored_alpha", "blocks", "blocks_alpha"), 1)
    unused = Path("unused")
    shape = adapter_of(read_arm(arm.format(**ones), Profile("", ""), seed=0, state=unused, stream=unused).settings)
    reference = resolve(AdapterSettings())
    rank = _equal_rank(reference, shape, linears)
    ranks = {
        "rank": rank,
        "stored": regimes * _equal_rank(replace(reference, top_k=None), replace(shape, top_k=None), linears),
        "blocks": rank * segments,
    }
    alphas = {f"{name}_alpha": ALPHA_PER_RANK * value for name, value in ranks.items()}
    return arm.format(**ranks, alpha=alphas.pop("rank_alpha"), **alphas)


def _equal_rank(reference: HeadLoraConfig, shape: HeadLoraConfig, linears: LinearShapes) -> int:
    """Rank at which `shape` has as many parameters as `reference`, at least 1."""
    one = activated_parameters(replace(shape, r=1), linears)
    return max(1, round(activated_parameters(reference, linears) / one))


RANK = "adapter.rank={rank}:adapter.alpha={alpha}"
STORED = "adapter.rank={stored}:adapter.alpha={stored_alpha}"
BLOCKS = "adapter.rank={blocks}:adapter.alpha={blocks_alpha}:baseline.rank={rank}"
MLP = "adapter.target_modules=[gate_proj, up_proj, down_proj]"
CP_MOE = f"cp-moe:{RANK}:{MLP}"
LORAMOE = f"loramoe:{RANK}:learner.sample_types=[label, text]"
MEAN = "serve.unknown=mean"
PER_REGIME = f"lora:{RANK}:adapter.per_regime=true:probe.enabled=false"


@dataclass(frozen=True)
class Method:
    """A method or an ablation."""

    arm: str
    """The preset and its changes, with the placeholders of `fill`."""
    baseline: Callable[..., Baseline] | None = None
    """Builds the baseline that trains this method from a `BaselineContext`; None: it runs in the daemon."""
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
    """Whether no model answers: the best answers that ignore the input."""

    def arm_for(self, suite: Suite, linears: LinearShapes) -> str:
        """Return the arm for a suite and a backbone with these linears, without placeholders."""
        slots, _ = suite.regime_slots()
        return fill(self.arm, linears, segments=len(slots), regimes=len({slot for own in slots for slot in own}))

    def build(self, context: BaselineContext) -> Baseline:
        """Build the baseline with the options of its arm."""
        assert self.baseline is not None
        return self.baseline(context, **context.options)


_ANCHORS = ("consolidate.anchor_strength", (0.01, 0.1, 1.0, 10.0))
# Up to the order of CP-MoE's 5e3: a path of ten steps gives each weight less importance than a segment's.
_TRANSIENT = ("consolidate.anchor_strength", (10.0, 100.0, 1000.0, 10_000.0))
_FISHER = ("baseline.strength", (0.001, 0.01, 0.1, 1.0))

METHODS: Mapping[str, Method] = {
    "streamlearn": Method("streamlearn"),
    "streamlearn-routed": Method("streamlearn-routed", tuned_as="streamlearn"),
    "lora": Method(f"lora:{RANK}", Baseline),
    "joint": Method(f"lora:{STORED}", CosineSchedule, shuffled=True),
    "joint-3": Method(f"lora:{STORED}", CosineSchedule, shuffled=True, passes=3, tuned_as="joint"),
    "lora-per-task": Method(PER_REGIME, OracleRegimes, oracle_regimes=True),
    "lora-per-regime": Method(f"{PER_REGIME}:{MEAN}"),
    "importance": Method(f"lora:{RANK}:consolidate.anchor_strength=0.1:probe.enabled=false", search=_ANCHORS),
    "er": Method(f"lora:{RANK}", Replay),
    "der++": Method(f"lora:{RANK}", DarkReplay, search=("baseline.alpha", (0.01, 0.1, 1.0, 10.0))),
    "ewc": Method(f"lora:{RANK}", Ewc, search=_FISHER),
    "online-ewc": Method(f"lora:{RANK}", OnlineEwc, search=_FISHER),
    "cp-moe": Method(
        CP_MOE,
        OracleRegimes,
        oracle_regimes=True,
        search=_TRANSIENT,
    ),
    "mh-cp-moe": Method("mh-cp-moe", search=_TRANSIENT),
    # The paper's alpha / rank of 8 forgets more on nano: AF .033 against .009 on four tasks of order 2, another seed.
    "loramoe": Method(
        LORAMOE,
        Baseline,
        search=("learner.localized_balance", (0.001, 0.01, 0.1, 1.0)),
    ),
    "mot": Method(f"mot:{RANK}", StagedTraining),
    "o-lora": Method(f"lora:{BLOCKS}", OLora, search=("baseline.strength", (0.005, 0.05, 0.5, 5.0))),
    "sd-lora": Method(f"lora:{BLOCKS}", SdLora, search=("baseline.magnitude_lr", (0.1, 1.0, 10.0, 100.0))),
    "inflora": Method(f"lora:{BLOCKS}", InfLora, search=("baseline.threshold", (0.5, 0.9, 0.97, 0.99))),
    "online-lora": Method(f"lora:{BLOCKS}", OnlineLora, search=_FISHER),
    "mh-moe": Method("mh-moe", Baseline),
    "gem": Method(f"lora:{RANK}", Gem),
    "frozen": Method(f"lora:{RANK}", Baseline, trained=False),
    "blind": Method(f"lora:{RANK}", Baseline, trained=False, blind=True),
    "streamlearn-told": Method("streamlearn", OracleRegimes, oracle_regimes=True, tuned_as="streamlearn"),
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
    # As the default's rate falls, see DECAY_UPDATES in the settings.
    "lora, falling rate": Method(f"lora:{RANK}:learner.lr_decay_updates=20", Baseline),
    "cp-moe, no CKA bias": Method(f"{CP_MOE}:adapter.bias=none", OracleRegimes, oracle_regimes=True),
    "cp-moe, no consolidation": Method(f"{CP_MOE}:consolidate.anchor_strength=0", OracleRegimes, oracle_regimes=True),
    "cp-moe, no CKA mask": Method(f"{CP_MOE}:consolidate.similarity_mask=false", OracleRegimes, oracle_regimes=True),
    # MH-MoE's Table 4, and its Tables 1 and 2: LoRAMoE with as few routes as one head has, and with as many as all.
    **{f"mh-moe, heads {n}": Method(f"mh-moe:adapter.num_heads={n}:{RANK}", Baseline) for n in (2, 4, 16)},
    "loramoe, 4 experts top-1": Method(f"{LORAMOE}:adapter.num_experts=4:adapter.top_k=1", Baseline),
    "loramoe, 26 experts top-5": Method(f"{LORAMOE}:adapter.num_experts=26:adapter.top_k=5", Baseline),
}
"""Ablations of the default preset, and of the method that a name starts with."""
