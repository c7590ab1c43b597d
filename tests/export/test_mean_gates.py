"""The mean gates of experts that choose, where some of them see nothing."""

import torch

from streamlearn.adapters.presets import resolve
from streamlearn.adapters.tuner import SHARED, attach
from streamlearn.backbone.load import load, outline
from streamlearn.export.lora import mean_gates, plain_lora
from streamlearn.learner.learner import Learner
from streamlearn.settings import AdapterSettings, BackboneSettings, LearnerSettings
from tests.doubles import random_examples


def test_experts_of_a_vision_tower_have_equal_gates_without_images() -> None:
    """Their routers saw nothing, those of the decoder did; the plain LoRA has both."""
    settings = BackboneSettings(model="builtin:nano-vl", dtype="float32", device="cpu")
    backbone = load(settings, outline(settings))
    config = resolve(AdapterSettings(preset="mh-moe", vision_modules=("linear_1", "linear_2")), regimes=1)
    model = attach(backbone.model, config, 0)
    learner = Learner(model, LearnerSettings(lr=1e-2), torch.device("cpu"))
    gates = mean_gates(learner, SHARED, 0, random_examples((5, 9)), pack_tokens=512)
    vision = {bank.linear for bank in learner.banks if bank.info.is_vision}
    assert len(vision) == 2
    for linear, gate_HK in gates.items():
        torch.testing.assert_close(gate_HK.sum(1), torch.ones(config.num_heads))
        assert bool((gate_HK == 1 / config.num_experts).all()) == (linear in vision)
    assert set(plain_lora(learner.weights(SHARED), config, gates).layers) == {bank.linear for bank in learner.banks}
