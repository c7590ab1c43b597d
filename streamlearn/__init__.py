"""A daemon that keeps a frozen Hugging Face model learning from an endless stream."""

import logging

from streamlearn.lazy_import import import_on_use

__version__ = "0.2.0.dev0"

# PEFT imports bitsandbytes where it is installed: a second and 45 MB, for layers that are not used here.
import_on_use("bitsandbytes")
# Once used, it warns outside of our log of a kernel that it would download.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
