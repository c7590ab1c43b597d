"""The bundled sample of records."""

from streamlearn.settings.packaged import packaged_folder

SAMPLE = packaged_folder("configs") / "sample/superni.train.jsonl.gz"
