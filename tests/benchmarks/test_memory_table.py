"""`bench memory`: the estimate holds where it was measured, and the figures are those of the documents."""

from dataclasses import asdict

import orjson

from benchmarks.measured_step import largest_batch, run
from benchmarks.memory_table import NANO, ON_NANO, MeasuredConfiguration, on_folder, table
from streamlearn.settings import Settings
from tests.docs.markdown import ROOT


def test_the_published_figures_are_of_these_configurations() -> None:
    """All of them, in this order, and each within 15 % of what was measured."""
    rows = orjson.loads((ROOT / "docs/memory.json").read_bytes())["configurations"]
    wanted = [asdict(each) for each in (*ON_NANO, *on_folder("smollm2"))]
    assert [{name: row[name] for name in wanted[0]} for row in rows] == wanted
    assert max(abs(row["off_percent"]) for row in rows) <= 15
    assert len(table(rows).rows) == len(rows)


def test_the_largest_batch_fills_the_limits() -> None:
    """Records of the greatest length, the last one shorter."""
    settings = Settings.model_validate(
        {"source": {"jsonl": {"path": "x"}}, "stream": {"batch_tokens": 100, "max_tokens": 40}}
    )
    batch = largest_batch(settings, vocab_size=7)
    assert [len(each) for each in batch] == [40, 40, 20]
    assert all(each.input_ids.max() < 7 for each in batch)


def test_a_configuration_is_measured() -> None:
    """Estimate and measurement are of one process, here this one, which has other memory too."""
    configuration = MeasuredConfiguration(NANO, "float32", "none", "lora", 256, 128, checkpointing=False)
    found = run(configuration.sections(None))
    assert found["dtype"] == "float32"
    assert found["measured_mib"] >= found["loaded_mib"] > 0
    assert "activations" in found["estimate"]
