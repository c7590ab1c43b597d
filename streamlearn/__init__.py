"""A daemon that keeps a frozen Hugging Face model learning from an endless stream."""

import logging

__version__ = "0.2.0.dev0"

# PEFT imports bitsandbytes where it is installed, which warns outside of our log of a kernel that it would download.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
