"""A tiny learner and its decoder, for jobs without a runner."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from streamlearn.adapters.presets import resolve
from streamlearn.adapters.tuner import attach
from streamlearn.backbone.load import load, outline
from streamlearn.learner.learner import Learner
from streamlearn.regimes.route import RoutedInput
from streamlearn.settings import AdapterSettings, BackboneSettings, LearnerSettings, StreamSettings
from streamlearn.status import Requested, Route
from streamlearn.stream.decode import Decoder
from tests.doubles import tiny_backbone


@pytest.fixture(scope="module")
def learner_and_decoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Learner, Decoder]:
    folder: Path = tiny_backbone(tmp_path_factory.mktemp("qwen3"))
    settings = BackboneSettings(model=str(folder), dtype="float32", device="cpu")
    backbone = load(settings, outline(settings))
    model = attach(backbone.model, resolve(AdapterSettings()), seed=0)
    learner = Learner(model, LearnerSettings(lr=1e-4), backbone.device, clock=lambda: 0.0)
    return learner, Decoder(backbone.tokenizer, StreamSettings(), backbone.vocab_size)


@pytest.fixture
def learner(learner_and_decoder: tuple[Learner, Decoder]) -> Learner:
    return learner_and_decoder[0]


@pytest.fixture
def decoder(learner_and_decoder: tuple[Learner, Decoder]) -> Decoder:
    return learner_and_decoder[1]


def first_regime(inputs: Sequence[NDArray[np.int32]], _: Requested = "routed") -> list[RoutedInput]:
    """All inputs are known and answered by regime 1."""
    return [RoutedInput(0, Route(1, 0.5, known=True, answered_by="regime"))] * len(inputs)
