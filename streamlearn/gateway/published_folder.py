"""Reading of a published folder: the publication, its routing state and its tokenizer, all or nothing."""

from pathlib import Path
from typing import NamedTuple

from streamlearn.errors import PublicationError
from streamlearn.gateway.model_names import ModelNames
from streamlearn.gateway.router import Router, decoder_of
from streamlearn.publish import routing_state
from streamlearn.publish.publication import FILE, Publication
from streamlearn.stream.decode import Decoder
from streamlearn.stream.tokenizer_folder import load_tokenizer

_FileVersion = tuple[str, int, int, int]
"""Path, inode, size, and time of the last change in ns."""


class LoadedPublication(NamedTuple):
    """A publication, ready to route."""

    publication: Publication
    names: ModelNames
    router: Router


class PublishedFolder:
    """One published folder. Its methods block on the disk; one thread at a time calls them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._decoder: tuple[tuple[_FileVersion, ...], Decoder] | None = None

    def version(self) -> _FileVersion | None:
        """What changes with every publication; None while there is none."""
        return _version(self._folder / FILE)

    def load(self) -> LoadedPublication:
        """Read the current publication. The tokenizer is read again only if its files changed.

        Raises:
            PublicationError: there is none, or a part of it is missing or damaged.
        """
        publication = Publication.read(self._folder)
        state = routing_state.read(self._folder, publication)
        router = Router(publication, state, self._decoder_of(publication))
        return LoadedPublication(publication, ModelNames(publication), router)

    def _decoder_of(self, publication: Publication) -> Decoder:
        folder = self._folder / publication.tokenizer
        files = tuple(version for path in sorted(folder.glob("*")) if (version := _version(path)) is not None)
        if self._decoder is None or self._decoder[0] != files:
            try:
                self._decoder = files, decoder_of(load_tokenizer(folder))
            except Exception as error:  # the loader raises what its parsers raise
                raise PublicationError(f"{folder}: the tokenizer cannot be read: {error}") from error
        return self._decoder[1]


def _version(path: Path) -> _FileVersion | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return str(path), found.st_ino, found.st_size, found.st_mtime_ns
