"""A Postgres server of a test: a cluster of its own in a folder, on a free port, gone afterwards."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 60


def binaries() -> Path | None:
    """Folder of Postgres's programs: from PATH, or where Debian puts them; None if there are none."""
    found = shutil.which("initdb")
    places = [Path(found).resolve().parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return places[-1] if places else None


@contextmanager
def postgres(*databases: str) -> Iterator[str]:
    """`user@host:port` of a running server that holds these databases and trusts every local connection."""
    programs = binaries()
    assert programs is not None
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    owner = _owner()
    if owner is not None:
        os.chown(folder, owner.pw_uid, owner.pw_gid)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    try:
        _call(owner, programs / "initdb", "-D", folder / "data", "-U", "hybridflow", "-A", "trust", "--no-sync")
        options = ["-p", str(port), "-k", str(folder), "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"]
        command = [str(programs / "postgres"), "-D", str(folder / "data"), *options]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **_identity(owner))
        try:
            _wait(server, port, folder / "log")
            for name in databases:
                _call(owner, programs / "createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "hybridflow", name)
            yield f"hybridflow@127.0.0.1:{port}"
        finally:
            server.send_signal(signal.SIGINT)  # fast shutdown: connections are broken off
            server.wait(SECONDS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _owner() -> "pwd.struct_passwd | None":
    """Postgres refuses to run as root: whom it runs as then; None = as whoever runs the test."""
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


def _identity(owner: "pwd.struct_passwd | None") -> dict[str, int]:
    return {} if owner is None else {"user": owner.pw_uid, "group": owner.pw_gid}


def _call(owner: "pwd.struct_passwd | None", *command: object) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=SECONDS, check=False, cwd="/", **_identity(owner)
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _wait(server: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    sys.stderr.write(log.read_text())
    raise AssertionError("Postgres did not start")
