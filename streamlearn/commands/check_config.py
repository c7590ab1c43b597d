"""The check-config command: checks that need more than the configuration file, but no GPU, broker or weights."""

import torch

from streamlearn.adapters.check import activated_parameters, check
from streamlearn.backbone.load import locate, outline
from streamlearn.errors import ConfigError
from streamlearn.publish import open_publisher as publishing
from streamlearn.runtime.model import adapter_of
from streamlearn.settings import Settings
from streamlearn.track import open_trackers as tracking


def check_backbone(settings: Settings) -> str:
    """Check backbone, adapter, publication and trackers as a start does, and return the result as one sentence.

    A hub model that is not on this machine is not fetched; its adapter is then not checked.

    Raises:
        ConfigError: `run` would refuse one of them.
    """
    config = adapter_of(settings)
    _check_device_name(settings.backbone.device)
    name = settings.backbone.model
    shape = None if locate(settings.backbone) is None else outline(settings.backbone)
    if shape is not None:
        check(config, shape.linears, shape.tower_linears)
    publishing.check(settings, config, shape)
    tracking.check(settings)
    if shape is None:
        return f"valid; backbone {name} would be fetched on first start, adapter not checked"
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
