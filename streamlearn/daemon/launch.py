"""A run in several processes: the leader is the daemon, and every other process follows it.

torchrun --nproc-per-node 2 -m streamlearn run --config F
"""

import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog
import torch
from torch.distributed.device_mesh import DeviceMesh

from streamlearn.backbone.load import device_of, outline
from streamlearn.board import Board
from streamlearn.daemon.model import Model, adapter_of
from streamlearn.daemon.process import STOPPING
from streamlearn.distributed import ProcessRank
from streamlearn.distributed.channel import Channel
from streamlearn.distributed.processes import Leader, follow, wait_for_load
from streamlearn.errors import ConfigError
from streamlearn.events import Event, get_logger
from streamlearn.settings import Settings, with_defaults

BEATS = 4
"""Signs of life within the longest wait for one."""

_log = get_logger("distributed")


@contextmanager
def leading(settings: Settings, place: ProcessRank, board: Board) -> Iterator[Leader]:
    """Lead the other processes inside the block, and let them end after it.

    Raises:
        RankLostError: the others do not join.
        ConfigError: `backbone.device` names one GPU for all.
    """
    wait_s = settings.distributed.wait_s
    with closing(_join(settings, place)) as channel:
        leader = Leader(channel, beat_s=wait_s / BEATS, alive=lambda: board.alive)
        try:
            yield leader
        finally:
            leader.end()


def run_follower(settings: Settings, place: ProcessRank) -> None:
    """Follow the leader until it ends the run.

    It also decides about stop signals: those that torchrun sends to every process are ignored here.

    Raises:
        RankLostError: another process is gone or does not answer.
        ConfigError: the backbone cannot be loaded in this process.
    """
    structlog.contextvars.bind_contextvars(rank=place.rank)
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    with closing(_join(settings, place)) as channel:
        dtype = wait_for_load(channel)
        if dtype is None:
            return
        with TemporaryDirectory(prefix="streamlearn-") as folder:
            model = _load(settings, dtype, Path(folder) / "offloaded", channel.mesh)
            follow(channel, model.learner, model.decoder.with_images)


def _join(settings: Settings, place: ProcessRank) -> Channel:
    if settings.backbone.shard and settings.backbone.quantization != "none":
        raise ConfigError(
            f"backbone.shard: divides weights in {settings.backbone.dtype}, found quantization "
            f"{settings.backbone.quantization}: choose one of the two"
        )
    device = device_of(settings.backbone)
    if device.type == "cuda":
        if device.index is not None:
            raise ConfigError(
                f"backbone.device: each of {place.size} processes takes the GPU of its LOCAL_RANK, found "
                f"{settings.backbone.device}: leave out the number"
            )
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    channel = Channel(place, device, settings.distributed.wait_s, shard=settings.backbone.shard)
    _log.info(Event.PROCESSES_JOINED, rank=place.rank, processes=place.size, device=str(device))
    return channel


def _load(settings: Settings, dtype: str, offloaded: Path, mesh: DeviceMesh | None) -> Model:
    """The leader's model, which checked the settings before."""
    config, shape = adapter_of(settings), outline(settings.backbone, settings.adapter)
    settings = with_defaults(settings, is_vision=shape.is_vision, per_regime=config.per_regime)
    holdout = settings.holdout.model_copy(update={"canaries": ()})  # the leader's, maybe on another machine
    settings = settings.model_copy(update={"holdout": holdout})
    return Model(settings, shape, config, dtype, offloaded, mesh=mesh)
