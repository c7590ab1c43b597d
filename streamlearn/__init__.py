"""A daemon that keeps a frozen Hugging Face model learning from an endless stream without forgetting."""

__version__ = "0.1.0"
