"""The publisher of a configuration, and what it refuses before any weight is loaded."""

import re
import secrets
from pathlib import Path
from typing import Any

from streamlearn.adaptation.time_budget import TimeBudget
from streamlearn.adapters.config import HeadLoraConfig
from streamlearn.backbone.load import Outline
from streamlearn.errors import ConfigError, PublicationError
from streamlearn.export.exported_regime import BaseModel
from streamlearn.learner.learner import Learner
from streamlearn.publish import publication_files
from streamlearn.publish.adapter_publisher import AdapterPublisher, Targets
from streamlearn.publish.hub_repository import HubRepository
from streamlearn.publish.publication import FILE, Publication
from streamlearn.publish.publication_files import ADAPTERS, PublicationFiles
from streamlearn.publish.replica import Replica
from streamlearn.publish.replica_set import ReplicaSet
from streamlearn.publish.rollback_file import RollbackFile
from streamlearn.publish.scoring_queue import ScoringQueue
from streamlearn.settings import PublishSettings, Settings

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
    """Check that `open_publisher` can use the published folder, and what an earlier process noted. Changes nothing.

    Raises:
        PublicationError: the folder cannot be written, or a file is damaged.
    """
    if settings.publish is None:
        return
    publication_files.check(settings.publish.folder)
    if (settings.publish.folder / FILE).exists():
        Publication.read(settings.publish.folder)
    RollbackFile(settings.state).read()


def _check_backbone(settings: Settings, own: PublishSettings, shape: Outline) -> None:
    if shape.is_vision:
        raise ConfigError(
            f"publish: expected a backbone that reads text only, found {settings.backbone.model}, which reads images: "
            "use `streamlearn export`, or remove the section"
        )
    _check_base_model(own, BaseModel.of(settings.backbone, shape.folder, name=own.base_model))


def _check_base_model(own: PublishSettings, base: BaseModel) -> None:
    """The backbone must not have the name of what is published: a request for one would be answered by the other."""
    if re.fullmatch(rf"{re.escape(own.name)}(-regime-\d+(@.*)?)?", base.name):
        raise ConfigError(
            f"publish.base_model must differ from publish.name and from names of versions, found {base.name} beside "
            f"{own.name}: serve the backbone under another name (vllm serve --served-model-name), or set "
            "publish.name to another one"
        )


def open_publisher(
    settings: Settings, config: HeadLoraConfig, shape: Outline, learner: Learner, tokenizer: Any
) -> AdapterPublisher | None:
    """Open the folder, the replicas and the hub; None without a section `publish`. The thread is not started yet.

    Raises:
        PublicationError: the folder cannot be written, or another backbone was published in it.
    """
    own = settings.publish
    if own is None:
        return None
    base = BaseModel.of(settings.backbone, shape.folder, name=own.base_model)
    folder = PublicationFiles(own.folder, base)
    scoring = ScoringQueue(learner, TimeBudget(own.time_share), pack_tokens=settings.stream.batch_tokens)
    targets = Targets(folder, folder.write_tokenizer(tokenizer.save_pretrained), base, _replicas(own), _hub(own))
    return AdapterPublisher(settings, config, _run(settings.state), targets, scoring)


def forget_run(state: Path) -> None:
    """Begin a new run: its regimes are not those of the old one, although they have the same numbers."""
    (state / RUN).unlink(missing_ok=True)
    RollbackFile(state).remove()


def _run(state: Path) -> str:
    """The run's identity, made at its first start."""
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


def _hub(own: PublishSettings) -> HubRepository | None:
    return None if own.hub is None else HubRepository(own.hub, _read_secret(own.hub.token_file))


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
