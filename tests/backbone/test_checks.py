"""A plain output head is found by measuring."""

from typing import get_args

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from streamlearn.backbone.checks import find_plain_head, hidden_states, plain_head
from streamlearn.backbone.load import load, outline
from streamlearn.settings import BackboneSettings
from tests.backbone.conftest import Folders
from tests.doubles import Architecture

IDS = torch.tensor([[3, 1, 4, 1, 5]])


@torch.no_grad()
@pytest.mark.parametrize("architecture", get_args(Architecture))
def test_the_linear_over_the_hidden_states_makes_the_logits(architecture: Architecture, folder_of: Folders) -> None:
    """Found when the model is loaded, bit for bit."""
    settings = BackboneSettings(model=str(folder_of(architecture)), dtype="float32", device="cpu")
    model = load(settings, outline(settings)).model
    head = plain_head(model)
    assert head is not None
    assert torch.equal(head(hidden_states(model, input_ids=IDS)), model(input_ids=IDS).logits)


def test_logits_that_are_capped_are_not_plain(folder_of: Folders) -> None:
    """As those of Gemma 2: the loss of the linear's own outputs would be another one."""
    settings = BackboneSettings(model=str(folder_of("gemma3_text")), dtype="float32", device="cpu")
    loaded = load(settings, outline(settings)).model
    model = AutoModelForCausalLM.from_config(loaded.config).eval().requires_grad_(requires_grad=False)
    model.config.final_logit_softcapping = 1.0
    find_plain_head(model)
    assert plain_head(model) is None


def test_a_head_that_is_trained_or_replaced_is_not_plain(folder_of: Folders) -> None:
    """Its gradient would be lost."""
    settings = BackboneSettings(model=str(folder_of("qwen3")), dtype="float32", device="cpu")
    model = load(settings, outline(settings)).model
    model.set_output_embeddings(nn.Linear(32, model.config.vocab_size, bias=False))
    assert plain_head(model) is None
    find_plain_head(model)
    assert plain_head(model) is None
