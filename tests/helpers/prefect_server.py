"""Real Prefect servers for tests: the embedded one of a run, and one as a team would start it."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from tasks import embedded

SECONDS_TO_START = 180


@contextmanager
def embedded_prefect(root: Path) -> Iterator[embedded.EmbeddedServer]:
    """A server that answers, with this process and its children pointed at it; the environment is put back afterwards."""
    before = dict(os.environ)
    os.environ.pop("PREFECT_API_URL", None)
    os.environ["PREFECT_PROFILES_PATH"] = str(root / "no-profiles.toml")
    server = embedded.start(str(root))
    assert server is not None
    try:
        server.wait_ready()
        yield server
    finally:
        _flush_logs()
        server.stop()
        os.environ.clear()
        os.environ.update(before)


def _flush_logs() -> None:
    """Send what Prefect still wants to send, which would be refused, and shown, once the server is gone."""
    if handlers := sys.modules.get("prefect.logging.handlers"):
        handlers.APILogWorker.drain_all(timeout=10)


@contextmanager
def team_server(home: Path) -> Iterator[dict[str, str]]:
    """A Prefect server as a team would start it; gives the environment in which commands and workers use it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")} | {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_ENABLED": "false",
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(port)]
    with background(command, environment, home / "server.log"):
        wait_until(lambda: _answers(environment["PREFECT_API_URL"]), SECONDS_TO_START, "the Prefect server answers")
        yield environment


@contextmanager
def background(
    command: list[str], environment: dict[str, str], log: Path, cwd: Path | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process with its output in a file, ended with all its children when the block ends."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=cwd, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        process.terminate()
        _, alive = psutil.wait_procs([psutil.Process(pid) for pid in family if psutil.pid_exists(pid)], timeout=20)
        for survivor in alive:
            survivor.kill()
        process.wait()


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Return once the condition holds; fails after this long, naming what did not happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        return bool(httpx.get(f"{url}/health", timeout=5).status_code == 200)
    except httpx.HTTPError:
        return False
