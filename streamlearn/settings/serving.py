"""Settings of snapshots, HTTP, publication, trackers and logging."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveInt,
    StringConstraints,
    field_validator,
    model_validator,
)

from streamlearn.settings.section import (
    FolderOrStore,
    RequestSeconds,
    Seconds,
    Section,
    check_token,
    host_name,
    is_loopback,
    server_urls,
    shown_server,
)

ServerUrls = Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(server_urls)]


class ListenSettings(Section):
    """An HTTP endpoint."""

    key_prefix: ClassVar[str]
    """What the operator writes before `host` and `port`, for messages."""
    token_place: ClassVar[str]
    """Where the token is, for messages."""

    host: str = "127.0.0.1"
    """Address to bind; any other than loopback requires token_file, tls_certfile and tls_keyfile."""
    port: int = Field(ge=0, le=65535)
    """Port to bind; 0 takes a free port and logs it."""
    names: Annotated[tuple[str, ...], AfterValidator(lambda names: tuple(map(host_name, names)))] = ()
    """Further names accepted in the Host header, with any port, for an address other than loopback."""
    token_file: Path | None = None
    """File with the bearer token, at least 32 characters, readable by its owner only."""
    require_token: bool = False
    """Require the token for every request but /livez and /readyz."""
    tls_certfile: Path | None = None
    """PEM certificate chain; set with tls_keyfile to serve HTTPS."""
    tls_keyfile: Path | None = None
    """PEM private key of the certificate."""
    max_body_bytes: PositiveInt = 1 << 20
    """Maximum size of a request body."""

    @model_validator(mode="after")
    def _protected_from_other_machines(self) -> Self:
        if (self.tls_certfile is None) != (self.tls_keyfile is None):
            raise ValueError("tls_certfile and tls_keyfile belong together: set both or neither")
        if not is_loopback(self.host) and (self.token_file is None or self.tls_certfile is None):
            raise ValueError(
                f"host {self.host} is not a loopback address: set token_file, tls_certfile and tls_keyfile, or bind "
                "127.0.0.1"
            )
        return self

    @property
    def open_to_others(self) -> bool:
        """Whether other machines can connect."""
        return not is_loopback(self.host)


Unknown = Literal["auto", "mean", "nearest", "backbone"]


TORCHRUN_GRACE_S = 30.0
"""Between SIGTERM and SIGKILL of the other processes, after one of them failed; fixed in torch 2.13."""


class SnapshotSettings(Section):
    """When snapshots are written and how many are kept."""

    every_records: PositiveInt = 1000
    """Records between snapshots."""
    every_s: Seconds = 300.0
    """Seconds between snapshots, if any record was trained on since the last one."""
    max_age_s: Seconds = 3600.0
    """Maximum time that writes to the disk or the dead-letter topic may fail. Learning continues until then; after it
    the daemon stops with exit code 74. No data is lost: a restart resumes from the last snapshot."""
    keep: int = Field(default=3, ge=2)
    """Snapshots kept; at least two, because the newest may be damaged."""


class ServeSettings(ListenSettings):
    """The HTTP endpoint."""

    key_prefix = "serve."
    token_place = "serve.token_file (default STATE/http.token)"  # noqa: S105 - a path

    enabled: bool = True
    """Whether the endpoint is served."""
    port: int = Field(default=8083, ge=0, le=65535)
    """Port to bind; 0 takes a free port and logs it."""
    token_file: Path | None = None
    """File with the bearer token, at least 32 characters, readable by its owner only. When unset, http.token in the
    state folder, created at the first start."""
    require_token: bool = False
    """Require the token for every request but /livez, /readyz and the page's files; otherwise only to write a snapshot
    and for controls."""
    health_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of a second listener for health probes, which serves only /livez and /readyz: plain HTTP, no token, any Host
    header. 0 takes a free port and logs it. Off when unset."""
    health_host: str = "0.0.0.0"  # noqa: S104 - probes come from other machines; the listener serves nothing but health
    """Address of the health listener."""
    queue_size: PositiveInt = 8
    """Maximum number of queued jobs; further requests get 503 with Retry-After."""
    eval_budget_s: Seconds = 0.5
    """Maximum pause of training for jobs between two steps."""
    max_examples: PositiveInt = 1024
    """Maximum number of examples per evaluation request."""
    max_new_tokens: PositiveInt = 256
    """Maximum number of tokens per generation."""
    max_known_rejected: float = Field(default=0.01, gt=0.0, lt=1.0)
    """Share of a known regime's requests that may be treated as unknown; calibrated on the regimes' own records."""
    unknown: Unknown = "auto"
    """How requests that match no regime are answered: with the average of all regime adapters (mean), by the nearest
    regime, or by the untouched backbone. auto compares their losses on the first records of new regimes, before they
    are learned."""

    @model_validator(mode="after")
    def _two_ports(self) -> Self:
        if self.enabled and self.health_port == self.port != 0:
            raise ValueError(f"health_port and port must differ, found {self.port} for both: set another health_port")
        return self


class DistributedSettings(Section):
    """A run in several processes, which torchrun starts. In one process they have no effect."""

    timeout_s: float = Field(default=150.0, ge=40, le=10**6)
    """Maximum seconds until all processes have ended after one of them died or hangs. 30 of them are torchrun's,
    between SIGTERM and SIGKILL. Half of the others must exceed the longest step, probe or snapshot."""

    @property
    def wait_s(self) -> float:
        """Longest wait for another process, and longest time without a sign of life from the loop, in seconds."""
        return (self.timeout_s - TORCHRUN_GRACE_S) / 2


LogStyle = Literal["auto", "json", "console"]


class LogSettings(Section):
    """Events on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level."""
    style: LogStyle = "auto"
    """Output format; auto is console on a terminal and JSON elsewhere."""


def _share(value: object) -> object:
    """A percentage as the share that it is."""
    if isinstance(value, str) and value.endswith("%"):
        return float(value[:-1]) / 100
    return value


class GatewaySettings(ListenSettings):
    """A gateway in front of model servers."""

    key_prefix = "--"
    token_place = "--token-file"  # noqa: S105 - an option

    published: FolderOrStore
    """The published folder, or its URL in an object store."""
    upstreams: Annotated[tuple[str, ...], AfterValidator(server_urls)] = ()
    """URLs of the model servers, without /v1."""
    upstream_dns: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+:[0-9]{1,5}$")] | None = None
    """HOST:PORT of further model servers, one at each address of the host, over plain HTTP."""
    on_demand: bool = False
    """Whether model servers load a published version when it is asked for, so that they need not list it."""
    canary: Annotated[float, BeforeValidator(_share), Field(gt=0.0, le=1.0)] = 1.0
    """Share of the requests that the newest publication gets, such as 10%; the one before it gets the others."""
    port: int = Field(default=8084, ge=0, le=65535)
    """Port to bind; 0 takes a free port and logs it."""
    max_body_bytes: PositiveInt = 4 << 20
    """Maximum size of a request body."""
    upstream_token_file: Path | None = None
    """File with the bearer token of the upstreams, readable by its owner only."""
    allow_plaintext: bool = False
    """Whether that token may be sent over plain HTTP to other machines."""
    timeout_s: RequestSeconds = 600.0
    """Maximum time between two parts of an upstream's answer."""
    stop_timeout_s: RequestSeconds = 600.0
    """Maximum time for which a stopping gateway finishes requests."""

    @model_validator(mode="after")
    def _has_upstreams(self) -> Self:
        if not self.upstreams and self.upstream_dns is None:
            raise ValueError("give --upstream URL, --upstream-dns HOST:PORT, or both")
        return self

    @model_validator(mode="after")
    def _upstream_token_is_protected(self) -> Self:
        if self.upstream_token_file is not None and not self.allow_plaintext:
            found_by_dns = () if self.upstream_dns is None else (f"http://{self.upstream_dns}",)
            check_token("upstream_token_file", (*self.upstreams, *found_by_dns), "give --allow-plaintext")
        return self

    @property
    def dns(self) -> tuple[str, int] | None:
        """Host and port of `upstream_dns`."""
        host, _, port = (self.upstream_dns or "").partition(":")
        return (host, int(port)) if port else None


class VllmSettings(Section):
    """vLLM or SGLang servers that load and unload adapters while they run."""

    replicas: ServerUrls
    """Their URLs, such as http://10.0.0.5:8000."""
    folder: str | None = None
    """Path of publish.folder as the replicas see it, if it differs; for an object store, where they have it mounted."""
    token_file: Path | None = None
    """File with the API key of the replicas (--api-key)."""
    allow_plaintext: bool = False
    """Whether the key may be sent over plain HTTP to other machines."""
    timeout_s: RequestSeconds = 60.0
    """Maximum time for a replica to load an adapter, seconds."""
    interval_s: Seconds = 5.0
    """Interval at which replicas are asked what they have loaded, seconds; each then gets what it lacks."""
    drain_s: Seconds = 30.0
    """Time after which a version that was replaced is unloaded, seconds: requests that began before may still use
    it."""

    @model_validator(mode="after")
    def _key_is_protected(self) -> Self:
        if self.token_file is not None and not self.allow_plaintext:
            check_token("token_file", self.replicas)
        return self


class HubSettings(Section):
    """A repository on the Hugging Face hub, which gets each publication as one commit."""

    repository: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    """Its id, owner/name; created if it does not exist."""
    token_file: Path
    """File with a token that may write to it, readable by its owner only."""
    private: bool = True
    """Whether it is created as a private repository."""


class PublishSettings(Section):
    """Publication of regimes as plain LoRAs, after each snapshot.

    Needs a preset with one expert per head and one adapter per regime, such as streamlearn.
    """

    folder: FolderOrStore
    """Folder of the publication, relative to the configuration file, written by one daemon; the gateway and the
    replicas read it. Or its URL in an object store, s3://BUCKET/PREFIX, with extra objects; credentials come from the
    store's own places, such as AWS_PROFILE."""
    name: str = Field(default="streamlearn", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """First part of every version's name: NAME-regime-3@184-5d3c1f is regime 3 after 184 updates of
    run 5d3c1f."""
    base_model: str | None = None
    """Name under which the replicas serve the untouched backbone, different from name; by default its hub id or
    folder."""
    level: float = Field(default=0.05, gt=0.0, lt=0.5)
    """Level of the paired test on the hold-out records: the probability that a version that is no worse is held back. A
    higher level detects smaller damage."""
    max_canary_harm: NonNegativeFloat = 0.1
    """Rise of the mean loss on a slice of holdout.canaries, over that of the untouched backbone, that is accepted, nats
    per token. A version is held back as worse_on_canary if the paired test finds a larger one on any slice. The test of
    each is at level / number of slices, so a version without more harm is held back with at most probability level. At
    0 most adapters for a narrow task are held back: they change other text a little."""
    min_holdout_records: PositiveInt = 5
    """Hold-out records that a regime must have before its first version is published."""
    time_share: float = Field(default=0.05, gt=0.0, le=0.5)
    """Maximum fraction of training time spent on scoring new versions; idle time does not count."""
    keep: PositiveInt = 2
    """Versions of each regime kept in the folder, the published one among them."""
    vllm: VllmSettings | None = None
    """Servers that load new versions."""
    hub: HubSettings | None = None
    """Repository that gets a copy."""

    @model_validator(mode="after")
    def _test_can_fail(self) -> Self:
        smallest = 0.5**self.min_holdout_records
        if smallest > self.level:
            raise ValueError(
                f"min_holdout_records {self.min_holdout_records} cannot show at level {self.level} that a version is "
                f"worse: the smallest p-value is {smallest:g}; set more records or a higher level"
            )
        return self


class MlflowSettings(Section):
    """An MLflow tracking server, written to by its REST API."""

    uri: str
    """URL of the server, such as http://127.0.0.1:5000."""
    experiment: str = Field(default="streamlearn", min_length=1)
    """Name of the experiment; created if it does not exist."""
    run_name: str | None = None
    """Name of the run; MLflow chooses one if unset. A restart continues the same run, --fresh begins another."""
    token_file: Path | None = None
    """File with a bearer token."""
    allow_plaintext: bool = False
    """Whether the token may be sent over plain HTTP to another machine."""
    timeout_s: RequestSeconds = 10.0
    """Maximum time of a request, seconds. Training never waits for one."""

    @field_validator("uri")
    @classmethod
    def _is_url(cls, uri: str) -> str:
        parts = urlsplit(uri)
        holds_more = parts.username is not None or {"?", "#"} & set(uri)
        if parts.scheme not in ("http", "https") or not parts.hostname or holds_more:
            raise ValueError(
                "expected a server's URL such as http://127.0.0.1:5000, without a password or a query, found "
                + shown_server(uri)
            )
        return uri.rstrip("/")

    @model_validator(mode="after")
    def _token_is_protected(self) -> Self:
        if self.token_file is not None and not self.allow_plaintext:
            check_token("token_file", [self.uri])
        return self


class TrackSettings(Section):
    """Where the run's series are written besides /metrics: loss, forgetting, throughput, lag, regimes and shifts."""

    tensorboard: Path | None = None
    """Folder of TensorBoard event files, relative to the configuration file; needs the extra tensorboard."""
    mlflow: MlflowSettings | None = None
    """MLflow server."""
    interval_s: Seconds = 5.0
    """Interval at which the published status is read, seconds. Hold-out scorings and shifts in between are written
    too."""
