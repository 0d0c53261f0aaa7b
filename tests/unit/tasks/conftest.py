"""Shared by the tests of tasks and flows: a small model, a run with few rows, a session without workers, a real Prefect."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub


from engine.config import RunConfig
from tasks import data, evaluate, gate, registry, rollout, sessions, train
from tasks.embedded import EmbeddedServer
from tasks.mlflow_store import connect
from tests.helpers.models import save_model
from tests.helpers.prefect_server import embedded_prefect
from tests.unit.tasks.fake_session import FakeSession

DURABLE = (
    data.prepare_data,
    train.start_checkpoint,
    rollout.rollout_iteration,
    train.train_iteration,
    evaluate.evaluate_policy,
    gate.gate_policy,
    registry.register_policy,
)


@pytest.fixture(scope="session")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """One embedded Prefect server for all tests."""
    with embedded_prefect(tmp_path_factory.mktemp("prefect")) as server:
        yield server


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a chat template."""
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def options(tmp_path: Path, model_folder: Path) -> Callable[..., dict[str, Any]]:
    """Options of a small run under tmp_path, any of them replaced by keyword."""

    def build(**changed: Any) -> dict[str, Any]:
        file = tmp_path / "sums.jsonl"
        file.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(40)))
        return {
            "name": "sums",
            "seed": 5,
            "root": str(tmp_path / "runs"),
            "model": {"source": str(model_folder)},
            "data": {"train": [{"path": str(file)}], "eval_fraction": 0.2, "max_prompt_tokens": 16},
            "rollout": {"samples_per_prompt": 2, "max_response_tokens": 4},
            "train": {"prompts_per_iteration": 4},
            "reward": [{"kind": "exact_match"}],
            "iterations": 2,
            "gate": {"min_score": 0.6},
        } | changed

    return build


@pytest.fixture
def config(options: Callable[..., dict[str, Any]]) -> Callable[..., RunConfig]:
    """The validated configuration of a small run."""
    return lambda **changed: RunConfig.model_validate(options(**changed))


@pytest.fixture
def registered(config: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    """The configuration of a small run that registers its model."""
    return lambda **changed: config(**{"registry": {"model": "sums"}} | changed)


@pytest.fixture(scope="session")
def empty_mlflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The SQLite file of an MLflow without runs; making its tables takes seconds."""
    root = tmp_path_factory.mktemp("mlflow")
    connect(str(root), None)
    return root / "mlflow.db"


@pytest.fixture
def mlflow_tables(tmp_path: Path, empty_mlflow: Path) -> None:
    """MLflow's tables in the root of the small run."""
    (tmp_path / "runs").mkdir()
    shutil.copy(empty_mlflow, tmp_path / "runs" / "mlflow.db")


@pytest.fixture
def fake_session(monkeypatch: pytest.MonkeyPatch) -> type[FakeSession]:
    """No workers, and no waiting between the attempts of a task."""
    FakeSession.reset()
    monkeypatch.setattr(sessions, "Session", FakeSession)
    for durable in DURABLE:
        monkeypatch.setattr(durable, "retry_delay_seconds", [0, 0, 0])
    return FakeSession
