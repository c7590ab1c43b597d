"""The Hugging Face repository that gets each publication as one commit."""

from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

from streamlearn.errors import PublicationError
from streamlearn.publish import publication as publication_file
from streamlearn.publish.publication import Publication
from streamlearn.publish.publication_files import ADAPTERS
from streamlearn.settings import HubSettings
from streamlearn.snapshot.contents import list_tree


class HubRepository:
    """A client of one repository. Its files are those of the published folder, less what is not published any more."""

    def __init__(self, settings: HubSettings, token: str, *, endpoint: str | None = None) -> None:
        """`endpoint` is the hub's address, by default the public one or `HF_ENDPOINT`."""
        self._settings = settings
        self._api = HfApi(endpoint=endpoint, token=token)
        self._is_created = False

    def upload(self, folder: Path, publication: Publication) -> None:
        """Commit a publication: new versions, its routing state and tokenizer; versions it does not name are removed.

        Raises:
            PublicationError: the hub does not answer or refuses.
        """
        repository = self._settings.repository
        try:
            if not self._is_created:
                self._api.create_repo(repository, private=self._settings.private, exist_ok=True)
                self._is_created = True
            there = set(self._api.list_repo_files(repository))
            here = _files(folder, publication)
            self._api.create_commit(
                repository,
                [
                    *(CommitOperationAdd(name, path) for name, path in here.items() if _is_new(name, there)),
                    *(CommitOperationDelete(name) for name in sorted(there - here.keys()) if _is_ours(name)),
                ],
                commit_message=f"Publication {publication.sequence}, snapshot {publication.snapshot}",
            )
        except Exception as error:  # what the client raises without an answer depends on its release
            found = f"{type(error).__name__}: {error}"
            raise PublicationError(f"{repository}: expected to commit to the hub, found: {found}") from error


def _files(folder: Path, publication: Publication) -> dict[str, Path]:
    """What a publication consists of, by name in the folder."""
    names = [publication.tokenizer, *(f"{ADAPTERS}/{version}" for version in publication.adapters)]
    files = {f"{name}/{part}": path for name in names for part, path in list_tree(folder / name)[0].items()}
    for name in (publication.routing, publication_file.FILE):
        files[name] = folder / name
    return files


def _is_new(name: str, there: set[str]) -> bool:
    """Whether a file must be sent: all but `publication.json` never change."""
    return name == publication_file.FILE or name not in there


def _is_ours(name: str) -> bool:
    return name.partition("/")[0] in (ADAPTERS, "routing") or name.startswith("tokenizer-")
