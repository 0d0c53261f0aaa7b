"""The Prefect server of a run that has none: a child process that ends with this one, its database under {root}/.prefect.

`start` returns at once and the server comes up in the background; requests sent meanwhile wait in its socket. Nothing here
imports Prefect, which takes seconds that can pass beside the server's start.
"""

import atexit
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

from engine.errors import StoreError, TransientError
from engine.roots import local_root

log = logging.getLogger(__name__)
READY_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 5.0
_LOOK_S = 0.5  # between two looks at a server that is up
_LOG_LINES = 15  # of the server's output, shown when it fails


class EmbeddedServer:
    """A running or starting server: `url` of its API, `log` with its output.

    again: starts another one on the same socket and database; it is called whenever a server that was ready has ended.
    """

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        url: str,
        log: Path,
        again: "Callable[[], subprocess.Popen[bytes]] | None" = None,
    ) -> None:
        self.url = url
        self.log = log
        self._process = process
        self._again = again
        self._stopping = threading.Event()
        self._keeper = threading.Thread(target=self._keep_up, name="prefect-server", daemon=True)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return once the API answers. Raises TransientError with the end of the server's output if it does not."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0 and self._process.poll() is None:
            if self._answers(left):
                if self._again is not None and not self._keeper.is_alive():
                    self._keeper.start()
                return
            time.sleep(0.1)  # only after a refused or broken connection; a starting server lets the request wait
        raise TransientError(
            f"The embedded Prefect server did not come up ({self._ending(timeout_s)}). Its last lines:\n{self._tail()}",
            remedy=f"See {self.log}, or set PREFECT_API_URL to use a server of your own.",
        )

    def stop(self) -> None:
        """End the server; harmless when repeated."""
        self._stopping.set()
        if self._keeper.is_alive():
            self._keeper.join()
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _keep_up(self) -> None:
        """Replace a server that was killed; requests wait in the socket, and Prefect repeats those that broke off."""
        assert self._again is not None
        while not self._stopping.wait(_LOOK_S):
            if self._process.poll() is not None and not self._stopping.is_set():
                log.warning("The Prefect server ended (exit code %s); another one takes over.", self._process.poll())
                self._process = self._again()

    def _answers(self, timeout_s: float) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=min(timeout_s, 5.0)) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

    def _ending(self, timeout_s: float) -> str:
        code = self._process.poll()
        return f"no answer in {timeout_s:.0f} s" if code is None else f"it ended with exit code {code}"

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def start(root: str) -> EmbeddedServer | None:
    """Start a server for the runs under `root` and point this process at it; None if a server is configured already.

    Raises StoreError if the folder cannot be written.
    """
    if configured_url() is not None:
        return None
    home = _home(root)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)  # kept open for a server that has to be replaced
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
    os.environ.update(settings(home, url))
    if context := sys.modules.get("prefect.context"):
        context.refresh_global_settings_context()
    again = partial(_spawn, listener, home / "server.log")
    server = EmbeddedServer(again(), url, home / "server.log", again)
    atexit.register(server.stop)
    return server


def configured_url() -> str | None:
    """Address of the Prefect server that the environment or the active Prefect profile names."""
    if url := os.environ.get("PREFECT_API_URL"):
        return url
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH", home / "profiles.toml")).expanduser()
    if not profiles.is_file():
        return None
    content = tomllib.loads(profiles.read_text())
    active = os.environ.get("PREFECT_PROFILE", content.get("active"))
    url = content.get("profiles", {}).get(active, {}).get("PREFECT_API_URL")
    return str(url) if url else None


def _home(root: str) -> Path:
    home = local_root(root) / ".prefect"
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"The folder of runs cannot be used: {error.strerror}."
        raise StoreError(problem, path=str(home), remedy="Set root to a folder that can be written.") from error
    return home


def settings(home: Path, url: str) -> dict[str, str]:
    """Environment of the server and of everything that talks to it; what a single run does not need is off."""
    return {
        "PREFECT_API_URL": url,
        "PREFECT_HOME": str(home),
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home / "results"),
        "PREFECT_SERVER_MEMO_STORE_PATH": str(home / "memo.toml"),
        "PREFECT_SERVER_DATABASE_MIGRATE_ON_START": "false",  # done by tasks.embedded_server under a lock
        "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_ENABLED": "false",
    }


def _spawn(listener: socket.socket, output_file: Path) -> "subprocess.Popen[bytes]":
    """The server in a session of its own (an interrupt must reach the run first), holding the listening socket."""
    command = [sys.executable, "-m", "tasks.embedded_server", str(listener.fileno()), str(os.getpid())]
    code = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [code, os.environ.get("PYTHONPATH")]))
    # A command is quieter than this log file.
    own = {"PYTHONPATH": path, "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING"}
    with output_file.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[listener.fileno()],
            start_new_session=True,
            env={**os.environ, **own},
        )
