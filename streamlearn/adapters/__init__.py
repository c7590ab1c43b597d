"""The trainable experts: one PEFT tuner, registered with PEFT on import.

Call `resolve` on the settings, `check` the result against the backbone's `linear_shapes` before any weight is loaded,
then `attach` it to the loaded model.
"""

from streamlearn.adapters.check import activated_parameters, check, linear_shapes
from streamlearn.adapters.config import HeadLoraConfig
from streamlearn.adapters.layer import HeadLoraLinear
from streamlearn.adapters.model import Bank, HeadLoraModel, add_regime, attach, banks
from streamlearn.adapters.presets import OBJECTIVES, SHAPES, Objective, objective, resolve
from streamlearn.adapters.routing_context import RoutingContext, routing_context

__all__ = [
    "OBJECTIVES",
    "SHAPES",
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
