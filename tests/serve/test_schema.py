"""The OpenAPI document matches the server, and describes every field."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from streamlearn.jobs import queue
from streamlearn.serve import models as schemas
from streamlearn.serve import models as views
from streamlearn.serve.models import EvalRequest, RouteRequest

from .doubles import AUTHORIZED, Daemon, row

EXAMPLES = 10  # per operation; 300 take a minute and find nothing more


def test_every_described_request_is_answered_as_described(daemon: Daemon, tmp_path: Path) -> None:
    daemon.rows = (row(40), row(41))
    program = Path(sys.executable).with_name("st")
    [(name, value)] = AUTHORIZED.items()
    command = [str(program), "run", f"http://127.0.0.1:{daemon.server.port}/openapi.json", "-H", f"{name}: {value}"]
    options = ["--max-examples", str(EXAMPLES), "--seed", "1", "--no-color"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert "Tested: 25" in done.stdout


@pytest.mark.parametrize("number", [True, "3", 0, -1, 1.5, None])
def test_a_number_of_tokens_is_a_positive_integer(number: Any) -> None:
    """A string or a boolean is not converted; null means the configured maximum."""
    body = {"examples": [{"text": "a"}], "max_new_tokens": number}
    if number is None:
        assert EvalRequest.model_validate(body).max_new_tokens is None
    else:
        with pytest.raises(ValidationError, match="max_new_tokens"):
            EvalRequest.model_validate(body)


@pytest.mark.parametrize("model", [EvalRequest, RouteRequest])
def test_the_documented_examples_are_valid(model: type[BaseModel]) -> None:
    for example in model.model_json_schema()["examples"]:
        model.model_validate(example)


def test_every_field_is_described() -> None:
    """The OpenAPI document takes the descriptions from the docstrings."""
    models = [
        value
        for module in (queue, schemas, views)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, queue.ApiModel)
    ]
    fields = {f"{model.__name__}.{name}": field for model in models for name, field in model.model_fields.items()}
    assert [name for name, field in fields.items() if not field.description] == []
    assert len(fields) > 80
