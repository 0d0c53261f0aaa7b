"""From a configuration to a model that a consumer loads: the command, the real session, MLflow, a process without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRESET = ROOT / "deployments" / "presets" / "smoke.yaml"
SECONDS = 280
# What stays of the preset is every stage; the engines that take long to start have tests of their own.
QUICK = ["--set", "placement.mode=local", "--set", "rollout.backend=hf", "--set", "train.backend=torch"]
CONSUMER = """
import json, sys
import mlflow

mlflow.set_tracking_uri(sys.argv[1])
tokenizer = mlflow.transformers.load_model("models:/smoke@champion", return_type="components")["tokenizer"]
answers = mlflow.pyfunc.load_model("models:/smoke@champion").predict(["1+1=", "2+2="])
print(json.dumps({"template": tokenizer.chat_template, "answers": answers}))
"""

pytestmark = pytest.mark.timeout(900)


def python(*arguments: str, cwd: Path) -> dict[str, Any]:
    """The last line of a Python program's output, in an environment without Prefect, MLflow and network."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "MLFLOW"))}
    environment |= {"HF_HUB_OFFLINE": "1", "HTTPS_PROXY": "http://127.0.0.1:9", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    content: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return content


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("registry")


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    """Result of the smoke preset, trained and registered."""
    root = ["--set", f"root={folder / 'runs'}", "--run-key", "smoke-1"]
    return python("-m", "engine.cli", "run", str(PRESET), *QUICK, *root, "--json", cwd=folder)


def test_the_trained_policy_is_registered_as_champion(result: dict[str, Any]):
    assert result["status"] == "completed" and result["gate"]["verdict"] == "promote"
    assert result["model"] == {"name": "smoke", "version": 1, "aliases": ["challenger", "champion"]}


def test_a_consumer_elsewhere_loads_it_and_gets_answers(result: dict[str, Any], folder: Path, tmp_path: Path):
    seen = python("-c", CONSUMER, f"sqlite:///{folder}/runs/mlflow.db", cwd=tmp_path)
    assert seen["template"] == (PRESET.parent / "models" / "smoke" / "chat_template.jinja").read_text()
    assert len(seen["answers"]) == 2 and all(isinstance(answer, str) for answer in seen["answers"])


def test_the_registered_model_scores_what_the_run_measured(result: dict[str, Any], folder: Path):
    arguments = [
        "evaluate",
        str(PRESET),
        "--model",
        "models:/smoke@champion",
        *QUICK,
        "--set",
        f"root={folder / 'runs'}",
    ]
    again = python("-m", "engine.cli", *arguments, "--json", cwd=folder)
    before, after = result["evaluation"]["held_out"], again["evaluation"]["held_out"]
    assert after["rows"] == before["rows"]
    assert after["score_mean"] == before["score_mean"]
    assert after["response_tokens_mean"] == before["response_tokens_mean"]
