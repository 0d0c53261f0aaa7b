"""Program of the embedded Prefect server, started by tasks.embedded: `python -m tasks.embedded_server SOCKET PARENT`.

A new database takes seconds of migrations, so the first one that a Prefect version makes is kept, empty, as the template of
the others; `python -m tasks.embedded_server template` makes it ahead of time.
"""

import asyncio
import fcntl
import gc
import logging
import os
import shutil
import socket
import sqlite3
import sys
import tempfile
import threading
import time
from pathlib import Path

log = logging.getLogger("tasks.embedded_server")
_WATCH_S = 0.5


def main(descriptor: int, parent: int) -> None:
    """Serve Prefect's API on an inherited listening socket until the parent process is gone."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    gc.disable()  # importing Prefect makes many objects and no garbage
    import uvicorn
    from prefect.server.api.server import create_app

    prepare_database(Path(os.environ["PREFECT_HOME"]) / "prefect.db")
    gc.enable()
    app = create_app(ephemeral=True, final=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
    server.run(sockets=[socket.socket(fileno=descriptor)])


def prepare_database(file: Path) -> None:
    """Bring the database to the tables of this Prefect version; two servers starting at once take turns."""
    template = template_file()
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists() and template.exists():
            Path(shutil.copy(template, file.with_suffix(".new"))).rename(file)  # complete or not there
        _migrate()
        if not template.exists():
            _keep(file, template)


def _migrate() -> None:
    from prefect.server.database import provide_database_interface

    asyncio.run(provide_database_interface().create_db())


def template_file() -> Path:
    """Where the template of this Prefect version is, or will be."""
    import prefect

    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return cache / "hybridflow" / f"prefect-{prefect.__version__}.db"


def _keep(file: Path, template: Path) -> None:
    """Save a copy of a database that is empty still; a cache that cannot be written only costs the next run its seconds."""
    with sqlite3.connect(file) as source:
        if source.execute("SELECT count(*) FROM flow").fetchone()[0]:
            return
        try:
            template.parent.mkdir(parents=True, exist_ok=True)
            new = template.with_suffix(f".{os.getpid()}")
            with sqlite3.connect(new) as copy:
                source.backup(copy)
            new.rename(template)
        except (OSError, sqlite3.Error) as error:
            log.warning("The template %s was not written: %s.", template, error)


def _end_with(parent: int) -> None:
    """End this process once its parent has gone, however it went: a killed run leaves no server behind."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(0)


def make_template() -> None:
    """Make the template now, so that the first run need not."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["PREFECT_HOME"] = home
        prepare_database(Path(home) / "prefect.db")


if __name__ == "__main__":
    if sys.argv[1:] == ["template"]:
        make_template()
    else:
        main(int(sys.argv[1]), int(sys.argv[2]))
