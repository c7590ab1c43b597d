"""What the detector needs to be imported."""

import subprocess
import sys

HEAVY = ("PIL", "orjson", "pydantic", "tokenizers", "torch")
PROGRAM = f"""
import sys
sys.modules.update(dict.fromkeys({HEAVY}))  # importing one of them fails
import streamlearn.shift.drift, streamlearn.shift.monitor
"""


def test_needs_no_tokenizers_and_no_image_library() -> None:
    """Neither torch nor the settings' libraries, as its types come from `stream/record.py`."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
