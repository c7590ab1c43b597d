"""The bundled sample of records."""

from pathlib import Path

SAMPLE = Path(__file__).parents[2] / "configs/sample/superni.train.jsonl.gz"
