"""The trainable experts: one PEFT tuner, registered with PEFT on import.

Call `presets.resolve` on the settings, `presets.check` the result against the backbone's `linear_shapes` before any
weight is loaded, then `tuner.attach` it to the loaded model.
"""

import streamlearn.adapters.tuner  # noqa: F401  registers the tuner
