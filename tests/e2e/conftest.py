"""Shared by the end-to-end tests: one complete smoke run with real vLLM, DeepSpeed, Ray, Prefect and MLflow."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import SMOKE, result_of


@pytest.fixture(scope="session")
def smoke_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the smoke run was started; its runs and registry lie in `runs/`."""
    return tmp_path_factory.mktemp("smoke")


@pytest.fixture(scope="session")
def smoke_result(smoke_folder: Path) -> dict[str, Any]:
    """What `hybridflow run deployments/presets/smoke.yaml --run-key smoke-1 --json` printed."""
    return result_of("run", str(SMOKE), "--run-key", "smoke-1", cwd=smoke_folder)
