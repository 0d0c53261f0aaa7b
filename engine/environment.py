"""Environment variables that libraries read when they are imported; what the user has set is left alone."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.offlineconfig import AnyConfig

_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # an actor without a GPU share keeps its view of the machine
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # the command tells of failures and retries itself
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "90",
    "TOKENIZERS_PARALLELISM": "false",  # its threads do not survive a fork
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "GIT_PYTHON_REFRESH": "quiet",  # MLflow looks for git
}


def set_defaults() -> None:
    """Quiet libraries without telemetry, here and in every process started from here. Call before importing them."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def stay_offline(config: "AnyConfig") -> None:
    """Keep Hugging Face libraries from asking the Hub about a run whose model and data are local."""
    from engine.config import RunConfig

    sources = [*config.data.train, *config.data.eval]
    if isinstance(config, RunConfig):
        sources += [source for suite in config.evaluation.suites for source in suite.data]
        sources += config.sft.data if config.sft else ()
    local = all(Path(source.path).exists() for source in sources)
    model = config.model.source
    if local and (Path(model).exists() or model.startswith(("models:/", "runs:"))):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
