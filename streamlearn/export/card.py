"""The model card of an export: README.md, with the metadata that the Hugging Face hub reads."""

from collections.abc import Sequence

from streamlearn import __version__
from streamlearn.export.exported_regime import ExportedRegime

_LIBRARY = {"peft": "peft", "gguf": "llama.cpp", "merged": "transformers"}


def card(exported: ExportedRegime, figures: Sequence[str] | None = None) -> str:
    """The text of the card; `figures` are lines that replace the hold-out figures of `exported`."""
    what = "All regimes" if exported.regime is None else f"Regime {exported.regime}"
    what += f" ({exported.label})" if exported.label else ""
    return "\n".join(
        [
            "---",
            f"base_model: {exported.base.name}",
            f"base_model_relation: {'merge' if exported.form == 'merged' else 'adapter'}",
            f"library_name: {_LIBRARY[exported.form]}",
            "tags: [lora, streamlearn]",
            "---",
            f"# {what} of snapshot {exported.snapshot}",
            "",
            f"Learned from a stream of records by streamlearn {__version__}. A regime is what the learner found to be",
            "one kind of records.",
            "",
            *_table(exported),
            "",
            *(_figures(exported) if figures is None else figures),
            "## Use",
            "",
            *_usage(exported),
            "",
        ]
    )


def _table(exported: ExportedRegime) -> list[str]:
    revision = f" at revision `{exported.base.revision}`" if exported.base.revision else ""
    rows = {
        "backbone": f"`{exported.base.name}`{revision}",
        "snapshot": f"{exported.snapshot}, written {exported.written}",
        "records": f"{exported.records:,} in {exported.visits} visit{'s' * (exported.visits != 1)}",
        "LoRA": f"rank {exported.rank}, alpha {exported.alpha:g}, beside {exported.num_linears} linear layers",
        "fidelity": exported.fidelity,
    }
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]


def _figures(exported: ExportedRegime) -> list[str]:
    figures = exported.figures
    if figures is None:
        return ["There were no hold-out records to measure it on.", ""]
    return [
        f"On {figures.records} hold-out records, which were never trained on ({figures.tokens:,} answer tokens):",
        "",
        "| | loss, nats per token | token accuracy |",
        "|---|---|---|",
        f"| this export | {figures.loss:.4f} | {figures.accuracy:.4f} |",
        f"| the daemon | {figures.daemon_loss:.4f} | {figures.daemon_accuracy:.4f} |",
        f"| untouched backbone | {figures.backbone_loss:.4f} | {figures.backbone_accuracy:.4f} |",
        "",
        f"Between this export and the daemon, computed in {exported.computed_in}: KL divergence "
        f"{figures.divergence:.2g} nats per token, largest difference of a logit {figures.largest_difference:.2g}.",
        "",
    ]


def _usage(exported: ExportedRegime) -> list[str]:
    if exported.form == "gguf":
        return ["```", "llama-cli -m BACKBONE.gguf --lora adapter.gguf", "```"]
    if exported.form == "merged":
        return [
            "```python",
            "from transformers import AutoModelForCausalLM",
            "",
            'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
            "```",
        ]
    return [
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f'backbone = AutoModelForCausalLM.from_pretrained("{exported.base.name}")',
        'model = PeftModel.from_pretrained(backbone, "FOLDER")',
        "```",
        "",
        "or",
        "",
        "```",
        f"vllm serve {exported.base.name} --enable-lora --max-lora-rank {_rank_limit(exported.rank)} \\",
        f"  --lora-modules {exported.name}=FOLDER",
        "```",
    ]


def _rank_limit(rank: int) -> int:
    """The smallest limit on the rank that vLLM accepts.

    >>> _rank_limit(20), _rank_limit(32)
    (32, 32)
    """
    return next((limit for limit in (8, 16, 32, 64, 128, 256, 320) if limit >= rank), 512)
