"""Before the publisher starts: what cannot be published is refused, and the folder, replicas and hub are opened."""

import re
import secrets
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from streamlearn.adapters.presets import HeadLoraConfig
from streamlearn.backbone.load import Outline
from streamlearn.errors import ConfigError, PublicationError
from streamlearn.export.formats import BaseModel
from streamlearn.learner.learner import Learner
from streamlearn.publish.folder import ADAPTERS, ROUTING, TOKENIZER, PublicationFiles, check_folder
from streamlearn.publish.gate import ScoringQueue
from streamlearn.publish.publication import FILE, Publication
from streamlearn.publish.publisher import AdapterPublisher, RollbackFile, Targets
from streamlearn.publish.replicas import Replica, ReplicaSet
from streamlearn.regimes.holdout import TimeBudget
from streamlearn.settings import HubSettings, PublishSettings, Settings

RUN = "publish.run"
"""File of the state folder that names the run."""


def check(settings: Settings, config: HeadLoraConfig, shape: Outline | None) -> None:
    """Check that what the configuration learns can be published.

    `shape` is None where the backbone is not on this machine: what depends on it is then not checked.

    Raises:
        ConfigError: it cannot, or a file with a token or key cannot be read.
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
    for file in _secrets(own):
        _read_secret(file)


def check_disk(settings: Settings) -> None:
    """Check that `open_publisher` can use the published folder and the files of an earlier process. Changes nothing.

    Raises:
        PublicationError: the folder cannot be written, or a file is damaged.
    """
    if settings.publish is None:
        return
    check_folder(settings.publish.folder)
    if (settings.publish.folder / FILE).exists():
        Publication.read(settings.publish.folder)
    RollbackFile(settings.state).read()


def _check_backbone(settings: Settings, own: PublishSettings, shape: Outline) -> None:
    if shape.is_vision:
        raise ConfigError(
            f"publish: expected a backbone that reads text only, found {settings.backbone.model}, which reads images: "
            "use `streamlearn export`, or remove the section"
        )
    _check_base_model(own, BaseModel.from_settings(settings.backbone, shape.folder, name=own.base_model))


def _check_base_model(own: PublishSettings, base: BaseModel) -> None:
    """Refuse a backbone with the name of a published model: a request for one would be answered by the other."""
    if re.fullmatch(rf"{re.escape(own.name)}(-regime-\d+(@.*)?)?", base.name):
        raise ConfigError(
            f"publish.base_model must differ from publish.name and from names of versions, found {base.name} beside "
            f"{own.name}: serve the backbone under another name (vllm serve --served-model-name), or set "
            "publish.name to another one"
        )


def open_publisher(
    settings: Settings, config: HeadLoraConfig, shape: Outline, learner: Learner, tokenizer: Any
) -> AdapterPublisher:
    """Open the folder, the replicas and the hub. The thread is not started yet.

    Raises:
        PublicationError: the folder cannot be written, or another backbone was published in it.
    """
    own = settings.publish
    assert own is not None, "called for a configuration with this section"
    base = BaseModel.from_settings(settings.backbone, shape.folder, name=own.base_model)
    folder = PublicationFiles(own.folder, base)
    scoring = ScoringQueue(learner, TimeBudget(own.time_share), pack_tokens=settings.stream.batch_tokens)
    upload = None if own.hub is None else partial(upload_folder, own.hub, folder.folder)
    targets = Targets(folder, folder.write_tokenizer(tokenizer.save_pretrained), base, _replicas(own), upload)
    return AdapterPublisher(settings, config, _run(settings.state), targets, scoring)


def forget_run(state: Path) -> None:
    """Begin a new run: its regimes have the numbers of the old run's, and are others."""
    (state / RUN).unlink(missing_ok=True)
    RollbackFile(state).remove()


def _run(state: Path) -> str:
    """The run's identity, created at its first start."""
    path = state / RUN
    try:
        if not path.exists():
            new = path.with_suffix(".new")
            new.write_text(secrets.token_hex(16), encoding="ascii")
            new.rename(path)
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise PublicationError(f"{path}: must be writable, found: {error.strerror}") from error


def _replicas(own: PublishSettings) -> ReplicaSet:
    vllm = own.vllm
    if vllm is None:
        return ReplicaSet([], str, own.name)
    key = None if vllm.token_file is None else _read_secret(vllm.token_file)
    seen_at = vllm.folder or str(own.folder)
    return ReplicaSet(
        [Replica(url, key=key, timeout_s=vllm.timeout_s) for url in vllm.replicas],
        lambda name: f"{seen_at}/{ADAPTERS}/{name}",
        own.name,
    )


def upload_folder(hub: HubSettings, folder: Path, publication: Publication, *, endpoint: str | None = None) -> None:
    """Make the repository equal to the published folder, in one commit."""
    api = HfApi(endpoint=endpoint, token=_read_secret(hub.token_file))
    api.create_repo(hub.repository, private=hub.private, exist_ok=True)
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


def _secrets(own: PublishSettings) -> list[Path]:
    files = [section.token_file for section in (own.vllm, own.hub) if section is not None]
    return [file for file in files if file is not None]


def _read_secret(file: Path) -> str:
    """Read a token.

    Raises:
        ConfigError: the file cannot be read, is empty, or other users may read it.
    """
    try:
        mode, text = file.stat().st_mode, file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: the token cannot be read: {error}") from error
    if mode & 0o077:
        raise ConfigError(f"{file}: expected a file readable by its owner only, found mode {mode & 0o777:o}")
    if not text:
        raise ConfigError(f"{file}: expected a token, found an empty file")
    return text
