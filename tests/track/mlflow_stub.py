"""The part of MLflow's REST API that a run uses, in memory, as an httpx transport."""

from typing import Any

import httpx
import orjson


class MlflowStub(httpx.MockTransport):
    """Answers as MLflow 3 does; `down` makes it unreachable, `lost` loses that many answers after acting on them."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.down = False
        self.lost = 0
        self.authorization: str | None = None

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if self.down:
            raise httpx.ConnectError("refused")
        self.authorization = request.headers.get("authorization")
        path = request.url.path.removeprefix("/api/2.0/mlflow/")
        body = dict(request.url.params) if request.method == "GET" else orjson.loads(request.content)
        response: httpx.Response = getattr(self, "_" + path.replace("/", "_").replace("-", "_"))(body)
        if self.lost:
            self.lost -= 1
            raise httpx.ReadTimeout("no answer")
        return response

    def _experiments_get_by_name(self, body: dict[str, Any]) -> httpx.Response:
        name = body["experiment_name"]
        if name not in self.experiments:
            return httpx.Response(404, json={"error_code": "RESOURCE_DOES_NOT_EXIST", "message": name})
        return httpx.Response(200, json={"experiment": {"experiment_id": self.experiments[name]}})

    def _experiments_create(self, body: dict[str, Any]) -> httpx.Response:
        if body["name"] in self.experiments:
            return httpx.Response(400, json={"error_code": "RESOURCE_ALREADY_EXISTS", "message": "exists"})
        self.experiments[body["name"]] = str(len(self.experiments) + 1)
        return httpx.Response(200, json={"experiment_id": self.experiments[body["name"]]})

    def _runs_search(self, body: dict[str, Any]) -> httpx.Response:
        value = body["filter"].partition("'")[2].rstrip("'")
        found = [run for run in self.runs.values() if value in run["tags"].values()]
        return httpx.Response(200, json={"runs": [{"info": {"run_id": run["id"]}} for run in found]})

    def _runs_create(self, body: dict[str, Any]) -> httpx.Response:
        run: dict[str, Any] = {
            "id": f"run{len(self.runs)}",
            "name": body.get("run_name"),
            "status": "RUNNING",
            "metrics": [],
        }
        run |= {"tags": {tag["key"]: tag["value"] for tag in body["tags"]}, "params": {}}
        self.runs[run["id"]] = run
        return httpx.Response(200, json={"run": {"info": {"run_id": run["id"]}}})

    def _runs_update(self, body: dict[str, Any]) -> httpx.Response:
        self.runs[body["run_id"]]["status"] = body["status"]
        return httpx.Response(200, json={})

    def _runs_log_batch(self, body: dict[str, Any]) -> httpx.Response:
        if len(body["metrics"]) + len(body["tags"]) + len(body["params"]) > 1000:
            return httpx.Response(400, json={"error_code": "INVALID_PARAMETER_VALUE", "message": "too many"})
        run = self.runs[body["run_id"]]
        run["metrics"] += [each for each in body["metrics"] if each not in run["metrics"]]
        run["tags"] |= {tag["key"]: tag["value"] for tag in body["tags"]}
        run["params"] |= {each["key"]: each["value"] for each in body["params"]}
        return httpx.Response(200, json={})
