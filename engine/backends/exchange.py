"""Where a run's weights lie while they are handed over: one folder per run in shared memory. Importable without torch."""

import os
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "hybridflow-"


def exchange_folder(run_key: str) -> Path:
    """Folder through which a run hands over weights: shared memory, or the temporary folder where there is none."""
    return exchange_parent() / f"{PREFIX}{run_key}"


def exchange_parent() -> Path:
    """What holds the exchange folders of all runs on this machine."""
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
