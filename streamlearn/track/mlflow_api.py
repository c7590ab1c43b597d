"""The calls of MLflow's REST API (2.0) that a run needs.

A server's answer and its absence both become a TrackError, except where the caller asks what is not there.
"""

from typing import Any

import httpx

from streamlearn.settings.track import MlflowSettings
from streamlearn.track.track_error import TrackError

_EXISTS = "RESOURCE_ALREADY_EXISTS"
_ABSENT = "RESOURCE_DOES_NOT_EXIST"


class MlflowApi:
    """One connection. No proxy and no redirect: the token must not leave the server's address."""

    def __init__(
        self, settings: MlflowSettings, token: str | None, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._settings = settings
        self._client = httpx.Client(
            base_url=f"{settings.uri}/api/2.0/mlflow/",
            timeout=settings.timeout_s,
            trust_env=False,
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            transport=transport,
        )

    def experiment_id(self, name: str) -> str:
        """The id of an experiment, which is created if it does not exist."""
        found = self._find_experiment(name)
        if found is None:
            created = self._call("POST", "experiments/create", {"name": name}, unless=_EXISTS)
            found = self._find_experiment(name) if created is None else str(created["experiment_id"])
        if found is None:
            raise TrackError(f"experiment {name!r} must exist: it was deleted; restore it, or name another")
        return found

    def find_run(self, experiment_id: str, tag: str, value: str) -> str | None:
        """The id of the run with this tag."""
        wanted = {"experiment_ids": [experiment_id], "filter": f"tags.`{tag}` = '{value}'", "max_results": 1}
        runs = (self._call("POST", "runs/search", wanted) or {}).get("runs", [])
        return str(runs[0]["info"]["run_id"]) if runs else None

    def create_run(self, experiment_id: str, name: str | None, tags: dict[str, str], start_ms: int) -> str:
        """Create a run and return its id."""
        wanted: dict[str, Any] = {
            "experiment_id": experiment_id,
            "start_time": start_ms,
            "tags": [{"key": key, "value": value} for key, value in tags.items()],
        }
        if name is not None:
            wanted["run_name"] = name
        created = self._call("POST", "runs/create", wanted) or {}
        return str(created["run"]["info"]["run_id"])

    def set_status(self, run_id: str, status: str, end_ms: int | None = None) -> None:
        """Set a run's status: RUNNING, FINISHED or FAILED."""
        ended = {} if end_ms is None else {"end_time": end_ms}
        self._call("POST", "runs/update", {"run_id": run_id, "status": status, **ended})

    def log_batch(
        self,
        run_id: str,
        *,
        metrics: list[dict[str, Any]] | None = None,
        tags: dict[str, str] | None = None,
        params: dict[str, str] | None = None,
    ) -> None:
        """Log metrics, tags and parameters; at most 1000 in all, 100 of which are tags or parameters."""
        wanted = {
            "run_id": run_id,
            "metrics": metrics or [],
            "tags": [{"key": key, "value": value} for key, value in (tags or {}).items()],
            "params": [{"key": key, "value": value} for key, value in (params or {}).items()],
        }
        self._call("POST", "runs/log-batch", wanted)

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._client.close()

    def _find_experiment(self, name: str) -> str | None:
        found = self._call("GET", "experiments/get-by-name", {"experiment_name": name}, unless=_ABSENT)
        return None if found is None else str(found["experiment"]["experiment_id"])

    def _call(self, method: str, path: str, wanted: dict[str, Any], *, unless: str = "") -> dict[str, Any] | None:
        """The answer; None if it is the error `unless`."""
        where = f"{self._settings.uri} ({path})"
        try:
            given: dict[str, Any] = {"params": wanted} if method == "GET" else {"json": wanted}
            answer = self._client.request(method, path, **given)
            body = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise TrackError(f"{where}: an MLflow server must answer, found {error or type(error).__name__}") from error
        if answer.is_success and isinstance(body, dict):
            return body
        code = body.get("error_code", "") if isinstance(body, dict) else ""
        if unless and code == unless:
            return None
        message = body.get("message", "") if isinstance(body, dict) else ""
        raise TrackError(f"{where}: answered {answer.status_code} {code}: {message[:300]}")
