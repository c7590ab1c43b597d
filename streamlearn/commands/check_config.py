"""The check-config command: checks of a configuration that need more than the file."""

from pathlib import Path

from streamlearn.adapters.check import activated_parameters, check
from streamlearn.backbone.load import outline
from streamlearn.runtime.model import adapter_of
from streamlearn.settings import Settings


def check_backbone(settings: Settings) -> str:
    """Whether adapter and backbone fit, as one sentence; a hub model that is not on this machine is not fetched for it.

    Raises:
        ConfigError: the adapter does not fit, or the model cannot be used.
    """
    config = adapter_of(settings)
    name = settings.backbone.model
    if not name.startswith("builtin:") and not Path(name).expanduser().is_dir():
        return f"valid; backbone {name} is on the hub and was not looked at"
    shape = outline(settings.backbone)
    check(config, shape.linears, shape.tower_linears)
    activated = activated_parameters(config, shape.linears)
    return f"valid; adapter {settings.adapter.preset} fits {name}, {activated:,} parameters activated per token"
