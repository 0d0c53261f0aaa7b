"""`hybridflow reward-model` as a user runs it: killed and continued, registered, and learned from by an rlhf run."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import mlflow
import pytest

from engine.store import MANIFEST
from tests.helpers.command import ROOT, SECONDS, SMOKE, result_of, start

pytestmark = pytest.mark.timeout(900)
LIGHT = ("placement.mode=local", "train.backend=torch")
MODEL = ROOT / "deployments" / "presets" / "models" / "smoke"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands are started: pairs of which the larger digit is chosen, and two configurations."""
    place = tmp_path_factory.mktemp("offline")
    pairs = [
        {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "chosen": str(5 + a % 5), "rejected": str(b % 5)}
        for a in range(10)
        for b in range(10)
    ]
    (place / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    content = {
        "name": "digits",
        "model": {"source": str(MODEL), "init": "random"},
        "data": {"train": [{"path": "pairs.jsonl"}], "eval_fraction": 0.2, "max_prompt_tokens": 16, "max_tokens": 24},
        "objective": {"name": "reward_model"},
        "train": {"backend": "torch", "lr": 3e-3, "batch_size": 16},
        "placement": {"mode": "local"},
        "steps": 60,
        "checkpoint": {"every": 5},
        "registry": {"model": "digits"},
    }
    (place / "digits.yaml").write_text(json.dumps(content))
    return place


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Any]:
    """The result of a run that nothing disturbed."""
    return result_of("reward-model", "digits.yaml", "--run-key", "whole", cwd=folder)


def test_a_reward_model_is_trained_measured_and_registered(whole: dict[str, Any], folder: Path) -> None:
    assert (whole["status"], whole["iterations_planned"], whole["iterations_done"]) == ("completed", 60, 60)
    report = whole["evaluation"]["held_out"]
    assert report["rows"] == 20 and report["baseline_score_mean"] == 0.5 and report["score_mean"] >= 0.9
    assert sum(report["margins"]["counts"]) == sum(entry["pairs"] for entry in report["calibration"]) == 20
    assert whole["model"]["aliases"] == ["challenger", "champion"]
    mlflow.set_tracking_uri(registry := f"sqlite:///{folder / 'runs' / 'mlflow.db'}")
    mlflow.set_registry_uri(registry)  # else that of an earlier test, if one was given
    score = mlflow.transformers.load_model("models:/digits@champion")
    high, low = (score(f"<s>1+2=<|assistant|>{digit}</s>", add_special_tokens=False)[0] for digit in (9, 0))
    assert high["label"] == low["label"] == "score" and high["score"] > low["score"] + 1, "raw scores, no probabilities"


def test_a_killed_run_ends_like_one_that_was_not(whole: dict[str, Any], folder: Path) -> None:
    process = start("reward-model", "digits.yaml", "--run-key", "killed", cwd=folder)
    committed = folder / "runs" / "killed" / "iterations" / "00010" / "train" / MANIFEST
    deadline = time.monotonic() + SECONDS
    while not committed.exists():
        assert time.monotonic() < deadline and process.poll() is None, (folder / "command.err").read_text()[-3000:]
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(SECONDS)
    done = result_of("resume", "killed", cwd=folder)
    assert done["status"] == "completed" and 10 <= done["iterations_reused"] < 60
    assert done["weights_sha256"] == whole["weights_sha256"]


def test_an_rlhf_run_learns_from_the_registered_model(whole: dict[str, Any], folder: Path) -> None:
    rewards = 'reward=[{kind: model, source: "models:/digits@champion"}, {kind: exact_match, weight: 0}]'
    result = result_of(
        "run", str(SMOKE), "--run-key", "learned", "--set", *LIGHT, "rollout.backend=hf", rewards, cwd=folder
    )
    assert result["status"] == "completed" and result["iterations_done"] == 3
    report = result["evaluation"]["held_out"]
    assert report["components"].keys() == {"model", "exact_match"}
    assert report["score_mean"] == pytest.approx(report["components"]["model"])
    record = json.loads((folder / "runs" / "learned" / "run.json").read_text())
    assert Path(record["models"]["reward[0]"]).is_dir() and "reward[0]" in record["fingerprints"]


def test_a_reward_model_writes_no_text(whole: dict[str, Any], folder: Path) -> None:
    result = result_of("generate", "models:/digits@champion", "1+2=", cwd=folder, code=2)
    assert "LlamaForSequenceClassification, which writes no text" in result["error"]["message"]


def test_the_wrong_command_is_refused_at_once(folder: Path) -> None:
    for command in ("sft", "run"):
        result = result_of(command, "digits.yaml", cwd=folder, code=2)
        assert "reward-model" in result["error"]["message"] + result["error"]["remedy"]
    result = result_of("run", "digits.yaml", "--dry-run", cwd=folder, code=2)
    assert "hybridflow reward-model" in result["error"]["message"] + result["error"]["remedy"]
    result = result_of("sft", str(SMOKE), "--dry-run", cwd=folder, code=2)
    assert "use hybridflow run" in result["error"]["message"] + result["error"]["remedy"]
