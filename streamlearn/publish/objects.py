"""A published folder in an object store, such as `s3://bucket/prefix`: a copy that the publisher keeps.

An object appears complete, and there is no rename. So the copy follows the folder in this order:

1. Files of versions, routing states and tokenizers are uploaded. They never change.
2. `publication.json` is uploaded, by one PUT: from here on readers use what it names.
3. Objects that are no longer in the folder are deleted.

The folder loses nothing while the store has an older publication, and the store loses it one publication later. So a
reader that was slow finds what the publication before names.

A gateway copies what it needs into a folder of its own, `publication.json` last.

Credentials come from the places that the store's client knows: environment, profile, or the machine's identity.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from streamlearn.errors import ConfigError, PublicationError
from streamlearn.publish.publication import ADAPTERS, FILE, MAX_BYTES, ROUTING, TOKENIZER, Publication
from streamlearn.snapshot.files import LOCK, SharedFiles

_OWN = re.compile(rf"{ADAPTERS}/[^/]+-regime-\d+@[^/]+/|{ROUTING}/\d+(r\d+)?\.safetensors$|{TOKENIZER}[0-9a-f]{{8}}/")
"""Objects that may be deleted: others put theirs beside them."""
_OPTIONS: dict[str, dict[str, Any]] = {"s3": {"config_kwargs": {"retries": {"total_max_attempts": 1}}}}
"""By scheme: the publisher and the gateway ask again by themselves, and do other things in between."""


class ObjectStore:
    """A client of one place in a store. Its methods block, and raise PublicationError. Any thread may call them."""

    def __init__(self, url: str, *, setting: str = "publish.folder") -> None:
        """Check that the store's client is installed; it connects when it is used.

        Args:
            url: SCHEME://BUCKET/PREFIX.
            setting: What the operator set to it, for messages.

        Raises:
            ConfigError: no client is installed, or the scheme is unknown.
        """
        self.url = url
        self._scheme = url.partition("://")[0]
        try:
            import fsspec  # noqa: PLC0415 - an extra

            fsspec.get_filesystem_class(self._scheme)
        except ImportError as error:
            raise ConfigError(
                f"{setting} {url}: needs a client of {self._scheme}:// (pip install 'streamlearn[objects]' for s3://), "
                f"found: {error}"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{setting} {url}: expected a scheme such as s3, found {self._scheme!r}") from error

    def publication(self) -> Publication | None:
        """The newest publication; None before the first."""
        data = self._newest()
        return None if data is None else Publication.from_bytes(data, where=f"{self.url}/{FILE}")

    def check(self) -> None:
        """Check that the store answers and lists the place."""
        self._sizes()

    def upload(self, folder: Path, runs: Sequence[str]) -> None:
        """Step 1. `runs` may publish here.

        Raises:
            PublicationError: the store does not answer or refuses, or another run published here.
        """
        if (newest := self.publication()) is not None and newest.run not in runs:
            raise PublicationError(
                f"{self.url}: its publication must be this daemon's, found one of run {newest.run[:6]}: set "
                f"publish.folder to another place; or, if that run has ended for good, delete {FILE} there"
            )
        sizes = self._sizes()
        with self._translated():
            for name, path in _files(folder).items():
                if sizes.get(name) != path.stat().st_size:
                    self._client.put_file(str(path), f"{self._root}/{name}")

    def mirror(self, folder: Path, runs: Sequence[str]) -> None:
        """Steps 1 to 3. Raises like `upload`."""
        self.upload(folder, runs)  # 1.
        old, new = self._newest(), (folder / FILE).read_bytes()
        with self._translated():
            if old != new:  # 2. the first is refused if that of another daemon came in between
                self._client.pipe_file(f"{self._root}/{FILE}", new, mode="create" if old is None else "overwrite")
        gone = [name for name in self._sizes().keys() - _files(folder).keys() if _OWN.match(name)]
        with self._translated():
            if gone:  # 3.
                self._client.rm([f"{self._root}/{name}" for name in gone])

    def pull(self, folder: Path) -> None:
        """Copy the newest publication with its routing state and tokenizer into a folder, without the adapters.

        Does nothing if it is there. The file `publication.json` comes last, by a rename.
        """
        data = self._newest()
        if data is None:
            raise PublicationError(f"{self.url}: nothing is published there yet")
        before = Publication.read(folder) if (folder / FILE).exists() else None
        if before is not None and (folder / FILE).read_bytes() == data:
            return
        publication = Publication.from_bytes(data, where=f"{self.url}/{FILE}")
        names = [publication.routing]
        if before is None or before.tokenizer != publication.tokenizer:
            names += [name for name in self._sizes() if name.startswith(f"{publication.tokenizer}/")]
        with self._translated():
            for name in names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                self._client.get_file(f"{self._root}/{name}", str(folder / name))
            SharedFiles().replace(folder / FILE, data)
            if before is not None and before.routing != publication.routing:
                (folder / before.routing).unlink(missing_ok=True)

    def _newest(self) -> bytes | None:
        with self._translated():
            try:
                data: bytes = self._client.cat_file(f"{self._root}/{FILE}", end=MAX_BYTES)
            except FileNotFoundError:
                return None
            return data

    def _sizes(self) -> dict[str, int]:
        """Size of every object, by its path under the prefix."""
        with self._translated():
            self._client.invalidate_cache()
            found: dict[str, dict[str, Any]] = self._client.find(self._root, detail=True)
            return {path[len(self._root) + 1 :]: row["size"] for path, row in found.items()}

    @cached_property
    def _client(self) -> Any:
        import fsspec  # noqa: PLC0415 - an extra

        options = _OPTIONS.get(self._scheme, {})
        client: Any = fsspec.filesystem(self._scheme, use_listings_cache=False, **options)
        client.retries = 1  # of s3fs: a server that hangs takes 15 s, not 75
        return client

    @property
    def _root(self) -> str:
        """The place as the client names it."""
        return str(self._client._strip_protocol(self.url))

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate what the clients of stores raise, each errors of its own."""
        try:
            yield
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            raise PublicationError(f"{self.url}: expected a store that answers and allows it, found {found}") from error


def _files(folder: Path) -> dict[str, Path]:
    """What a copy of a folder has besides `publication.json`, by path; files in progress have names with a dot."""
    paths = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        str(name): path
        for name, path in paths.items()
        if not any(part.startswith(".") for part in name.parts) and str(name) not in (FILE, LOCK)
    }
