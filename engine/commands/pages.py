"""`hybridflow ui`: the pages of Prefect and MLflow over the databases of a run root, until interrupted."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from engine.commands.outcome import Outcome
from engine.roots import local_root

_PREFECT_PORT, _MLFLOW_PORT = 4200, 5000
_STOP_TIMEOUT_S = 10.0
_MLFLOW = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # pages need no job runner with eight more processes


def serve(root: str) -> Outcome:
    """Show the runs of a root; a Prefect server that is configured already is named instead of started."""
    from tasks import embedded
    from tasks.mlflow_store import address

    started = []
    pages = {"mlflow": f"http://127.0.0.1:{_free_port(_MLFLOW_PORT)}"}
    tracking = ["--backend-store-uri", address(root, None), "--port", pages["mlflow"].rsplit(":", 1)[1]]
    local_root(root).mkdir(parents=True, exist_ok=True)
    started.append(_start(["mlflow", "server", "--workers", "1", *tracking], _MLFLOW))
    if (configured := embedded.configured_url()) is not None:
        pages["prefect"] = configured.removesuffix("/api")
    else:
        port = _free_port(_PREFECT_PORT)
        pages["prefect"] = f"http://127.0.0.1:{port}"
        started.append(_prefect(local_root(root) / ".prefect", port))
    print(
        "\n".join(f"{name}: {url}" for name, url in pages.items()) + "\nCtrl-C ends both.", file=sys.stderr, flush=True
    )
    try:
        for process in started:
            process.wait()
    except KeyboardInterrupt:
        pass  # the way to end this command
    finally:
        for process in started:
            _stop(process)
    return Outcome({"status": "completed", "pages": pages}, "")


def _prefect(home: Path, port: int) -> "subprocess.Popen[bytes]":
    from tasks import embedded

    home.mkdir(parents=True, exist_ok=True)
    settings = embedded.settings(home, f"http://127.0.0.1:{port}/api")
    settings |= {"PREFECT_SERVER_UI_ENABLED": "true", "PREFECT_SERVER_DATABASE_MIGRATE_ON_START": "true"}
    return _start(["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)], settings)


def _start(command: list[str], settings: dict[str, str]) -> "subprocess.Popen[bytes]":
    """A server in a session of its own, so that it ends together with the processes that it starts."""
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **settings},
        start_new_session=True,
    )


def _free_port(wanted: int) -> int:
    """The usual port, or any other one if that is taken."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End a server and everything it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
