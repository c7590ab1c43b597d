"""A tokenizer that was saved to a folder, read without torch."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast


def load_tokenizer(folder: Path) -> Any:
    """Load what `save_pretrained` of a fast tokenizer wrote.

    It is not looked up by the model's type, as AutoTokenizer does, which imports torch: `tokenizer.json` holds the
    whole tokenizer.

    Raises:
        OSError or ValueError: its files are missing or damaged.
    """
    return PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
