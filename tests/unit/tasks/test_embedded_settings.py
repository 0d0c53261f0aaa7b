"""What the embedded Prefect server changes in the process that starts it."""

from pathlib import Path

from engine.environment import _DEFAULTS
from tasks.embedded import settings


def test_the_server_does_not_make_the_command_louder() -> None:
    """A command tells of failures itself, once; Prefect's copy with its traceback stays in the log."""
    changed = settings(Path("home"), "http://127.0.0.1:1/api")
    assert all(changed.get(name, value) == value for name, value in _DEFAULTS.items())
