"""The trainable experts: one PEFT tuner, registered with PEFT on import.

Call `resolve` on the settings, `check` the result against the backbone's `linear_shapes` before any weight is loaded,
then `attach` it to the loaded model.
"""

from streamlearn.adapters.context import RoutingContext, routing_context
from streamlearn.adapters.layer import HeadLoraLinear
from streamlearn.adapters.presets import (
    PRESETS,
    HeadLoraConfig,
    Objective,
    activated_parameters,
    check,
    linear_shapes,
    objective,
    resolve,
)
from streamlearn.adapters.tuner import Bank, HeadLoraModel, add_regime, attach, banks

__all__ = [
    "PRESETS",
    "Bank",
    "HeadLoraConfig",
    "HeadLoraLinear",
    "HeadLoraModel",
    "Objective",
    "RoutingContext",
    "activated_parameters",
    "add_regime",
    "attach",
    "banks",
    "check",
    "linear_shapes",
    "objective",
    "resolve",
    "routing_context",
]
