"""The embedded Prefect server comes up in the background and ends with its parent, however that ended."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from engine.errors import StoreError, TransientError
from tasks import embedded, embedded_server

PROGRAM = """
import sys, time
from tasks import embedded
server = embedded.start(sys.argv[1])
print(server.pid, flush=True)
time.sleep(600)
"""
SECONDS_TO_END = 30


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(tmp_path / "profiles.toml"))


def ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.usefixtures("unconfigured")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_leaves_no_server(tmp_path: Path, how: signal.Signals):
    run = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    pid = int(run.stdout.readline())
    assert os.getsid(pid) == pid, "an interrupt of the run's terminal must not reach the server"
    run.send_signal(how)
    run.wait(SECONDS_TO_END)
    deadline = time.monotonic() + SECONDS_TO_END
    while not ended(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ended(pid)


def test_the_server_answers_and_keeps_its_files_in_the_run_root(prefect: embedded.EmbeddedServer):
    prefect.wait_ready()
    assert os.environ["PREFECT_API_URL"] == prefect.url
    assert (prefect.log.parent / "prefect.db").is_file()


def test_a_server_that_is_killed_is_replaced_and_keeps_address_and_database(prefect: embedded.EmbeddedServer):
    prefect.wait_ready()
    before = prefect.pid
    os.kill(before, signal.SIGKILL)
    deadline = time.monotonic() + SECONDS_TO_END
    while prefect.pid == before:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with urllib.request.urlopen(f"{prefect.url}/health", timeout=SECONDS_TO_END) as reply:
        assert reply.status == 200


def test_a_configured_server_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.example/api")
    assert embedded.start(str(tmp_path)) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("unconfigured")
def test_the_server_of_the_active_profile_is_used(tmp_path: Path):
    assert embedded.configured_url() is None
    profiles = tmp_path / "profiles.toml"
    profiles.write_text(
        'active = "team"\n[profiles.local]\n[profiles.team]\nPREFECT_API_URL = "http://team.example/api"\n'
    )
    assert embedded.configured_url() == "http://team.example/api"


def test_a_server_that_does_not_come_up_shows_its_last_lines(tmp_path: Path):
    log = tmp_path / "server.log"
    log.write_text("the database is from the future\n")
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    server = embedded.EmbeddedServer(process, "http://127.0.0.1:9/api", log)
    with pytest.raises(TransientError, match="exit code 3") as raised:
        server.wait_ready(SECONDS_TO_END)
    assert "from the future" in str(raised.value)


@pytest.mark.usefixtures("unconfigured")
def test_a_folder_that_cannot_be_used_is_an_error_of_the_store(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="Set root"):
        embedded.start(str(tmp_path / "file"))


@pytest.mark.usefixtures("prefect")
def test_the_template_of_new_databases_is_empty():
    """It was made by the first server that this machine ever started."""
    with sqlite3.connect(f"file:{embedded_server.template_file()}?mode=ro", uri=True) as database:
        assert database.execute("SELECT count(*) FROM flow").fetchone() == (0,)
        assert database.execute("SELECT count(*) FROM alembic_version").fetchone() == (1,)
