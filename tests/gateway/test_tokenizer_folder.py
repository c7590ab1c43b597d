"""A saved tokenizer, read without looking up its model's type."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from streamlearn.publish.publication import load_tokenizer
from tests.gateway.sample_publication import NANO


def test_a_saved_tokenizer_is_the_one_that_was_saved(tmp_path: Path) -> None:
    """Its core, its special tokens and its chat template."""
    own = AutoTokenizer.from_pretrained(NANO, local_files_only=True)
    own.save_pretrained(tmp_path)
    read = load_tokenizer(tmp_path)
    assert read.backend_tokenizer.to_str() == own.backend_tokenizer.to_str()
    assert read.special_tokens_map == own.special_tokens_map
    assert read.get_chat_template() == own.get_chat_template()


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)):
        load_tokenizer(tmp_path)
