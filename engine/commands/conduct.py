"""What every command that walks a flow has around it: Prefect server, display, logs, and an orderly end."""

import logging
import os
import shlex
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.commands.outcome import Outcome, failure
from engine.display import Display, make_display
from engine.errors import HybridFlowError
from engine.repair import RUNNING
from engine.roots import RECORD, absolute_root, local_root
from engine.runs import read_record

if TYPE_CHECKING:
    from tasks.embedded import EmbeddedServer

log = logging.getLogger(__name__)
LOG_FILE = "log.txt"  # in the run directory
_LOG_TIMEOUT_S = 10.0  # for messages that Prefect still has to send
_OURS = ("engine", "tasks", "flows")  # loggers; Prefect replaces the handlers of the root logger
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class Stage:
    """What the work of a command may use: the Prefect server that is coming up, and the display."""

    def __init__(self, server: "EmbeddedServer | None", display: Display) -> None:
        self._server = server
        self.display = display

    def wait_for_prefect(self) -> None:
        """Return once the server answers. Raises TransientError if it does not come up."""
        if self._server is not None:
            self._server.wait_ready()
        log.info("Prefect is there; the flow begins.")


def conduct(root: str, run_key: str, work: Callable[[Stage], Outcome], *, verbose: bool) -> Outcome:
    """Do the work of a command on one run with a Prefect server up; a run that breaks off is closed, others raise.

    The server is a process of its own and starts first, because it comes up beside the imports that `work` needs.
    """
    from tasks import embedded

    log_to(logging.StreamHandler(sys.stderr), logging.INFO if verbose else logging.WARNING)
    server = embedded.start(root)
    display = make_display()
    try:
        return work(Stage(server, display))
    except BaseException as error:
        display.finish()
        if not _began(local_root(root) / run_key):
            raise
        return _broken_off(absolute_root(root), run_key, error, verbose)
    finally:
        display.finish()
        if server is not None:
            _send_logs()
            server.stop()


def log_to(handler: logging.Handler, level: int) -> None:
    """Send the messages of our own code to one more place."""
    formatter = logging.Formatter(_FORMAT)
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    handler.setLevel(level)
    for name in _OURS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        logger.propagate = False


def log_to_run(folder: Path) -> None:
    """Keep the messages of our own code in the run directory."""
    log_to(logging.FileHandler(folder / LOG_FILE), logging.INFO)


def resume_command(root: str, run_key: str) -> str:
    """What continues a run."""
    return f"hybridflow resume {run_key} --root {shlex.quote(root)}"


def _began(folder: Path) -> bool:
    """Whether the run's last attempt is this process's."""
    attempts = read_record(folder)["attempts"] if (folder / RECORD).is_file() else []
    return bool(attempts) and (attempts[-1]["host"], attempts[-1]["pid"]) == (socket.gethostname(), os.getpid())


def _broken_off(root: str, run_key: str, error: BaseException, verbose: bool) -> Outcome:
    """Close the attempt, end the workers, give the lease back; the outcome tells how to continue."""
    from tasks import attempts, report, sessions
    from tasks.refs import RunRef, opened

    ref, status, folder = RunRef(root, run_key), attempts.status_of(error), local_root(root) / run_key
    result = {"status": status, "run_key": run_key, "run_dir": str(folder)}
    try:
        with (folder / LOG_FILE).open("a") as stream:
            traceback.print_exception(error, file=stream)
        if attempts.current(ref)["status"] == RUNNING:
            attempts.finish(ref, status, f"{type(error).__name__}: {error}")
        result = report.summarise(ref, status)
    except (OSError, HybridFlowError) as second:  # a full disk, say; the first error is the one to tell
        log.warning("The end of this attempt could not be noted: %s", second)
    sessions.close_session(ref)
    opened(ref).store.lease.release()
    command = resume_command(root, run_key)
    return failure(error, verbose=verbose, result=result, log=str(folder / LOG_FILE), resume=command)


def _send_logs() -> None:
    """Let Prefect send the messages it still holds; they would be refused, and shown, once the server is gone."""
    if handlers := sys.modules.get("prefect.logging.handlers"):
        handlers.APILogWorker.drain_all(timeout=_LOG_TIMEOUT_S)
