"""Makes the small backbones: SmolLM2 from its GGUF, and the bundled nano models by pre-training."""
