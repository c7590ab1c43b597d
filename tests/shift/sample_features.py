"""Features of the bundled sample as SmolLM2-135M-Instruct sees it: its tokenizer, and its table of token embeddings.

`python -m tests.shift.sample_features FOLDER` computes them with the model in a folder and writes them to
`sample_features.npz`, so that the tests need no model.
"""

import sys
from pathlib import Path

import numpy as np

from connectors.jsonl import JsonlSource
from streamlearn.backbone.load import load, outline
from streamlearn.daemon.model import decoder_of
from streamlearn.settings import BackboneSettings, JsonlSettings, Settings, SourceSettings
from streamlearn.shift.features import Features, Featurizer, input_of
from streamlearn.stream.position import Position

SAMPLE = Path("configs/sample/superni.train.jsonl.gz")
FILE = Path(__file__).with_suffix(".npz")


def smollm2_features() -> list[Features]:
    """The stored features, in the order of the records."""
    with np.load(FILE) as arrays:
        parts = np.split(arrays["buckets"], np.cumsum(arrays["lengths"])[:-1])
        rows = zip(arrays["x_ND"].astype(np.float32), parts, arrays["log_lengths"].tolist(), strict=True)
        return [Features(x_D, buckets, log_length) for x_D, buckets, log_length in rows]


def main() -> None:
    """Compute and store them."""
    jsonl = JsonlSettings(path=SAMPLE)
    settings = Settings(source=SourceSettings(jsonl=jsonl), backbone=BackboneSettings(model=sys.argv[1]))
    backbone = load(settings.backbone, outline(settings.backbone))
    decoder, featurizer = decoder_of(settings, backbone), Featurizer(settings.seed, backbone.token_vectors)
    source = JsonlSource(jsonl)
    source.seek(Position())
    features = []
    while records := source.poll(max_records=64, timeout_s=0.0):
        features += [featurizer.featurize(input_of(decoder.decode(record))) for record in records]
    source.close()
    np.savez_compressed(
        FILE,
        x_ND=np.array([each.x_D for each in features], np.float16),
        buckets=np.concatenate([each.buckets for each in features]),
        lengths=np.array([len(each.buckets) for each in features]),
        log_lengths=np.array([each.log_length for each in features]),
    )


if __name__ == "__main__":
    main()
