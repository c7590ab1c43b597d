"""A published folder, and servers that serve what it names."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.gateway.sample_publication import publish_sample
from tests.gateway.stub_upstream import StubUpstream

from .kit import ready_gateway


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Publication 1: version 184 of the sample's three regimes."""
    publish_sample(tmp_path / "published")
    return tmp_path / "published"


@pytest.fixture
def upstreams() -> Iterator[list[StubUpstream]]:
    """Two servers with the models of publication 1."""
    models = {"nano", *(f"streamlearn-regime-{number}@184-5d3c1f" for number in (1, 2, 3))}
    with StubUpstream(models) as first, StubUpstream(models) as second:
        yield [first, second]


@pytest.fixture
def client(published: Path, upstreams: list[StubUpstream]) -> Iterator[httpx2.Client]:
    """A client of a ready gateway in front of both servers."""
    with ready_gateway(published, *upstreams) as client:
        yield client
