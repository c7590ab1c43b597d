"""Before the publisher starts: what cannot be published is refused, and the folder, replicas and hub are opened."""

import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from streamlearn.adapters.presets import HeadLoraConfig
from streamlearn.backbone.load import Backbone, Outline
from streamlearn.errors import ConfigError, PublicationError
from streamlearn.http.guards import read_token
from streamlearn.learner.learner import Learner
from streamlearn.publish import ROLLBACK, RUN
from streamlearn.settings import HubSettings, PublishSettings, Settings
from streamlearn.snapshot.files import LOCK, FileLock, Files

if TYPE_CHECKING:
    from streamlearn.publish.objects import ObjectStore
    from streamlearn.publish.publication import Publication
    from streamlearn.publish.publisher import AdapterPublisher
    from streamlearn.regimes.canaries import Canary

# The other modules of publishing are imported where they are used: most daemons publish nothing.
# ruff: noqa: PLC0415


def check(settings: Settings, config: HeadLoraConfig, shape: Outline | None) -> None:
    """Check that what the configuration learns can be published.

    `shape` is None where the backbone is not on this machine: what depends on it is then not checked.

    Raises:
        ConfigError: it cannot, a file with a token or key cannot be read, or the object store has no client here.
    """
    own = settings.publish
    if own is None:
        return
    if not config.per_regime or config.num_experts > 1:
        raise ConfigError(
            f"publish: expected a preset whose regimes are plain LoRAs, found {settings.adapter.preset} with "
            f"{config.num_experts} experts per head, {'one adapter per regime' if config.per_regime else 'shared'}: "
            "use preset streamlearn, or remove the section"
        )
    if shape is not None:
        _check_backbone(settings, own, shape)
    if settings.holdout.every_records == 0:
        raise ConfigError("publish: the gate needs hold-out records, found holdout.every_records 0: set it to 20")
    if settings.holdout.records_per_regime < own.min_holdout_records:
        raise ConfigError(
            f"publish.min_holdout_records must be at most holdout.records_per_regime "
            f"{settings.holdout.records_per_regime}, found {own.min_holdout_records}"
        )
    _store(settings)
    for section in (own.vllm, own.hub):
        if section is not None and section.token_file is not None:
            read_token(section.token_file, min_chars=1)


def check_canaries(settings: Settings, canaries: "Sequence[Canary]") -> None:
    """Check that the gate could find harm on each slice.

    Raises:
        ConfigError: a slice has too few records.
    """
    if settings.publish is not None:
        from streamlearn.publish.gate import Gate

        Gate(settings.publish.level, settings.publish.min_holdout_records).check_canaries(canaries)


def check_disk(settings: Settings) -> None:
    """Check that `open_publisher` can use the published folder and the files of an earlier process. Changes nothing.

    Raises:
        PublicationError: the folder cannot be written, or a file is damaged.
        ConfigError: another run published in the folder.
    """
    if (folder := settings.published_folder) is None:
        return
    from streamlearn.publish.folder import check_folder
    from streamlearn.publish.publisher import RollbackFile

    check_folder(folder)
    _check_run(settings, folder)
    RollbackFile(settings.state).read()


def fault_of_store(settings: Settings) -> str | None:
    """Why the object store of `publish.folder` cannot be used now; None if it can, or there is none."""
    try:
        if (store := _store(settings)) is not None:
            store.check()
    except PublicationError as error:
        return str(error)
    return None


def _store(settings: Settings) -> "ObjectStore | None":
    """The object store that `publish.folder` names; None if it is a folder."""
    if settings.publish is None or isinstance(settings.publish.folder, Path):
        return None
    from streamlearn.publish.objects import ObjectStore

    return ObjectStore(settings.publish.folder)


@contextmanager
def own_folder(settings: Settings) -> Iterator[None]:
    """Hold `publish.folder` inside the block, if there is one: only one daemon writes it.

    Raises:
        StateLockedError: another daemon holds it.
        SnapshotError: it cannot be locked.
        ConfigError: another run published in it.
        PublicationError: its newest publication is damaged.
    """
    if (folder := settings.published_folder) is None:
        yield
        return
    with folder_lock(folder):
        _check_run(settings, folder)
        yield


def folder_lock(folder: Path) -> FileLock:
    """Take the lock of `publish.folder`."""
    return FileLock(folder / LOCK, folder, "publish.folder")


def _check_run(settings: Settings, folder: Path) -> None:
    """Check that the newest publication is of this state folder's run, or of one that `--fresh` ended.

    Of a store that does not answer, the publisher checks it before it writes there.
    """
    from streamlearn.publish.publication import FILE, Publication

    newest = Publication.read(folder) if (folder / FILE).exists() else None
    if (store := _store(settings)) is not None:
        with suppress(PublicationError):
            newest = store.publication() or newest
    if newest is not None and newest.run not in _runs(settings.state):
        where = folder if store is None else store.url
        raise ConfigError(
            f"publish.folder {where}: its newest publication must be this daemon's, found one of run "
            f"{newest.run[:6]}, whose versions this daemon would remove: set publish.folder to another folder; or, if "
            f"that run has ended for good, move {FILE} out of the folder"
        )


def _check_backbone(settings: Settings, own: PublishSettings, shape: Outline) -> None:
    """Refuse one that reads images, or with the name of a published model, for which the other would answer."""
    from streamlearn.export.formats import BaseModel

    if shape.is_vision:
        raise ConfigError(
            f"publish: expected a backbone that reads text only, found {settings.backbone.model}, which reads images: "
            "use `streamlearn export`, or remove the section"
        )
    base = BaseModel.from_settings(settings.backbone, shape, name=own.base_model)
    if re.fullmatch(rf"{re.escape(own.name)}(-regime-\d+(@.*)?)?", base.name):
        raise ConfigError(
            f"publish.base_model must differ from publish.name and from names of versions, found {base.name} beside "
            f"{own.name}: serve the backbone under another name (vllm serve --served-model-name), or set "
            "publish.name to another one"
        )


def open_publisher(
    settings: Settings,
    config: HeadLoraConfig,
    shape: Outline,
    learner: Learner,
    backbone: Backbone,
    canaries: "Sequence[Canary]",
) -> "AdapterPublisher | None":
    """Open the folder, the replicas and the hub; None without a section `publish`. The thread is not started yet.

    Raises:
        ConfigError: a slice of the canaries has too few records.
        PublicationError: the folder cannot be written, or another backbone was published in it.
    """
    own = settings.publish
    if own is None:
        return None
    check_canaries(settings, canaries)
    from streamlearn.export.formats import BaseModel
    from streamlearn.publish.folder import PublicationFiles
    from streamlearn.publish.gate import ScoringQueue
    from streamlearn.publish.publication import ADAPTERS, version_pattern, write_vectors
    from streamlearn.publish.publisher import AdapterPublisher, Targets
    from streamlearn.publish.replicas import Replica, ReplicaSet
    from streamlearn.regimes.holdout import TimeBudget

    base = BaseModel.from_settings(settings.backbone, shape, name=own.base_model)
    assert settings.published_folder is not None
    folder = PublicationFiles(settings.published_folder, base)
    scoring = ScoringQueue(learner, TimeBudget(own.time_share), pack_tokens=settings.stream.batch_tokens)
    run, runs = _run(settings.state), _runs(settings.state)
    upload = None if own.hub is None else partial(upload_folder, own.hub, folder.folder, runs)
    replicas, seen_at = [], f"{folder.folder}"
    if (vllm := own.vllm) is not None:
        key = None if vllm.token_file is None else read_token(vllm.token_file, min_chars=1)
        replicas = [Replica(url, key=key, timeout_s=vllm.timeout_s) for url in vllm.replicas]
        seen_at = vllm.folder or seen_at
    own_name = version_pattern(own.name, runs).fullmatch
    fleet = ReplicaSet(replicas, f"{seen_at}/{ADAPTERS}", own_name)

    def save(target: Path) -> None:
        backbone.tokenizer.save_pretrained(target)
        write_vectors(target, backbone.token_vectors)

    targets = Targets(folder, folder.write_tokenizer(save), base, fleet, upload, _store(settings), runs)
    return AdapterPublisher(settings, config, run, targets, scoring, canaries=canaries)


def forget_run(state: Path) -> None:
    """Begin a new run, which takes over `publish.folder`: its regimes have numbers of the old run's, and are others."""
    (state / ROLLBACK).unlink(missing_ok=True)
    if runs := _runs(state):
        _write_runs(state, [*runs, secrets.token_hex(16)])


def _run(state: Path) -> str:
    """The run's identity, created at its first start."""
    if not _runs(state):
        _write_runs(state, [secrets.token_hex(16)])
    return _runs(state)[-1]


def _runs(state: Path) -> list[str]:
    """Identities of the runs of a state folder, the newest last."""
    path = state / RUN
    try:
        return path.read_text(encoding="ascii").split() if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise PublicationError(f"{path}: must be readable, found: {error}") from error


def _write_runs(state: Path, runs: Sequence[str]) -> None:
    path = state / RUN
    try:
        Files().replace(path, "\n".join([*runs, ""]).encode())
    except OSError as error:
        raise PublicationError(f"{path}: must be writable, found: {error.strerror}") from error


def upload_folder(
    hub: HubSettings, folder: Path, runs: Sequence[str], publication: "Publication", *, endpoint: str | None = None
) -> None:
    """Make the repository equal to the published folder, in one commit. `runs` may publish there.

    Raises:
        PublicationError: another run published there.
    """
    from huggingface_hub import HfApi

    from streamlearn.publish.publication import ADAPTERS, FILE, ROUTING, RUN_LETTERS, TOKENIZER

    api = HfApi(endpoint=endpoint, token=read_token(hub.token_file, min_chars=1))
    api.create_repo(hub.repository, private=hub.private, exist_ok=True)
    known = {run[:RUN_LETTERS] for run in runs}
    for version in api.list_repo_files(hub.repository):
        name = re.match(rf"{ADAPTERS}/[^/]+-regime-[0-9]+@[0-9]+-([0-9a-f]{{{RUN_LETTERS}}})", version)
        if name is not None and name[1] not in known:
            raise PublicationError(
                f"{hub.repository}: its versions must be this daemon's, found {version} of run {name[1]}: set "
                f"publish.hub.repository to another one; or, if that run has ended for good, delete {ADAPTERS}/ there"
            )
    api.upload_folder(
        repo_id=hub.repository,
        folder_path=folder,
        allow_patterns=[
            FILE,
            publication.routing,
            f"{publication.tokenizer}/*",
            *(f"{ADAPTERS}/{version}/*" for version in publication.adapters),
        ],
        delete_patterns=[f"{ADAPTERS}/*", f"{ROUTING}/*", f"{TOKENIZER}*"],
        commit_message=f"Publication {publication.sequence}, snapshot {publication.snapshot}",
    )
