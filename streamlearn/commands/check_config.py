"""The check-config command: checks that need more than the configuration file, but no GPU, broker or weights."""

import torch

from streamlearn.adapters.check import activated_parameters, check
from streamlearn.backbone.load import locate, outline
from streamlearn.errors import ConfigError
from streamlearn.runtime.model import adapter_of
from streamlearn.settings import Settings


def check_backbone(settings: Settings) -> str:
    """Check that backbone and adapter fit together and return the result as one sentence.

    A hub model that is not on this machine is not fetched; its adapter is then not checked.

    Raises:
        ConfigError: `run` would refuse the backbone or the adapter.
    """
    config = adapter_of(settings)
    _check_device_name(settings.backbone.device)
    name = settings.backbone.model
    if locate(settings.backbone) is None:
        return f"valid; backbone {name} would be fetched on first start, adapter not checked"
    shape = outline(settings.backbone)
    check(config, shape.linears, shape.tower_linears)
    activated = activated_parameters(config, shape.linears)
    return f"valid; adapter {settings.adapter.preset} fits {name}, {activated:,} parameters activated per token"


def _check_device_name(name: str) -> None:
    """Refuse a device that no machine has. Whether this machine has it is for `doctor` to check."""
    if name == "auto":
        return
    try:
        torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"backbone.device: expected auto, cpu, cuda or cuda:N, found {name!r}") from error
