"""Reading of a published folder: all of it, or an error that names what is wrong."""

import shutil
from pathlib import Path

import pytest

from streamlearn.errors import PublicationError
from streamlearn.gateway.publication import PublishedFolder
from tests.gateway.sample_publication import publish_sample


def test_the_tokenizer_is_read_again_only_when_its_files_change(published: Path) -> None:
    """It takes longer than everything else."""
    folder = PublishedFolder(published)
    first = folder.load().router._decoder
    publish_sample(published, 200, sequence=2)
    assert folder.load().router._decoder is first
    (published / "tokenizer" / "tokenizer.json").touch()
    assert folder.load().router._decoder is not first


def test_a_new_publication_is_a_new_version(published: Path) -> None:
    """Also one of the same size, within the resolution of a clock: every publication is a new file."""
    folder = PublishedFolder(published)
    before = folder.version()
    publish_sample(published, 184)
    assert folder.version() != before
    shutil.rmtree(published)
    assert folder.version() is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_an_error_with_its_folder(published: Path, name: str) -> None:
    (published / "tokenizer" / name).write_text("{")
    with pytest.raises(PublicationError, match="tokenizer: the tokenizer cannot be read"):
        PublishedFolder(published).load()


def test_regimes_of_another_state_are_refused(published: Path) -> None:
    """A publication whose slots mean other regimes would answer under wrong names."""
    publication = PublishedFolder(published).load().publication
    first, second, third = publication.regimes
    swapped = (first.model_copy(update={"slot": 1}), second.model_copy(update={"slot": 0}), third)
    publication.model_copy(update={"regimes": swapped}).write(published)
    with pytest.raises(PublicationError, match="expected the regimes of the publication"):
        PublishedFolder(published).load()
