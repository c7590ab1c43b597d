"""Publications, what is held back, and replicas as Prometheus metrics. They are served if `publish` is configured."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from streamlearn.serve.metric_families import counter, counters, gauge, gauges
from streamlearn.status.publication_status import HELD_BACK, PublicationStatus


def publication_metrics(publication: PublicationStatus) -> Iterator[Metric]:
    """The newest publication, and what is under way."""
    yield gauge("publication_sequence", "Number of the newest publication.", publication.sequence)
    published = [regime for regime in publication.regimes if regime.version is not None]
    yield gauge("published_regimes", "Regimes of which a version is published.", len(published))
    waiting = [regime for regime in publication.regimes if regime.held_back is not None]
    yield gauge("held_back_regimes", "Regimes whose newest version is held back.", len(waiting))
    yield counter("versions_published", "Versions published by this process.", publication.num_published)
    counts = dict(publication.num_held_back)
    held_back = [([reason], counts.get(reason, 0)) for reason in HELD_BACK]
    yield counters("versions_held_back", "Versions held back by this process, by reason.", ["reason"], held_back)
    failing = "1 while the newest snapshot cannot be published; /v1/publication says why."
    yield gauge("publication_failing", failing, bool(publication.fault))
    up = [([replica.url], replica.is_up) for replica in publication.replicas]
    yield gauges("replica_up", "1 while the model server answers.", ["url"], up)
    missing = [([replica.url], replica.wanted - replica.loaded) for replica in publication.replicas]
    lacking = "Published versions that the model server has not loaded."
    yield gauges("replica_missing_versions", lacking, ["url"], missing)
