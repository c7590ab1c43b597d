"""A daemon that keeps a frozen Hugging Face model learning from an endless stream."""

__version__ = "0.2.0.dev0"
