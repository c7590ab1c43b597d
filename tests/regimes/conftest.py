"""Settings of runs over streams that shift."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from torch import Tensor

from streamlearn.settings import Settings
from tests.doubles import tiny_backbone
from tests.regimes.shifting_streams import run


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("backbone"))


def maker(parent: Path, backbone: Path) -> Callable[..., Settings]:
    """Settings of a run in a folder of its own inside `parent`; `sections` change the defaults below."""

    def build(lines: list[bytes], name: str = "run", **sections: Any) -> Settings:
        folder = parent / name
        folder.mkdir(exist_ok=True)
        (folder / "stream.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
        values: dict[str, Any] = {
            "stream": {"max_tokens": 64, "batch_tokens": 256, "batch_records": 4},
            "backbone": {"model": str(backbone), "dtype": "float32"},
            "adapter": {"num_heads": 4},
            "learner": {"lr": 1e-2},
            "probe": {"warmup_tokens": 300, "similarity_tokens": 300},
            "snapshot": {"every_records": 40},
        }
        for section, changes in sections.items():
            values[section] = {**values.get(section, {}), **changes}
        source = {"jsonl": {"path": folder / "stream.jsonl"}}
        return Settings.model_validate({"state": folder / "state", "source": source, **values})

    return build


@pytest.fixture
def make(tmp_path: Path, backbone: Path) -> Callable[..., Settings]:
    return maker(tmp_path, backbone)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, backbone: Path) -> Callable[..., dict[str, Tensor]]:
    """What a run ends with that nothing disturbs, by stream and `sections`; one run answers all tests of a module."""
    ends: dict[bytes, dict[str, Tensor]] = {}

    def end(lines: list[bytes], **sections: Any) -> dict[str, Tensor]:
        key = b"\n".join([orjson.dumps(sections), *lines])
        if key not in ends:
            ends[key], _ = run(maker(tmp_path_factory.mktemp("undisturbed"), backbone)(lines, **sections))
        return ends[key]

    return end
