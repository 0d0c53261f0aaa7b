"""Leftovers that no run directory knows of: half-filled model folders, and weights left in shared memory."""

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from engine.backends.exchange import PREFIX, exchange_parent
from engine.errors import StoreError
from engine.lease import lease_of
from engine.roots import RECORD, local_root

QUIET_S = 6 * 3600.0  # a folder that nothing was written to for so long is nobody's work in progress
_HALF_MADE = re.compile(r"\..+-[0-9a-f]{8}")  # as tasks name a folder until it is complete


def sweep(root: str, quiet_s: float = QUIET_S) -> list[Path]:
    """Remove what processes that died left behind; returns what was removed.

    Model folders go when nothing was written for `quiet_s` seconds; weights in shared memory besides only if their run
    lies under this root and no living process works on it.
    """
    here = local_root(root)
    removed = [folder for folder in (*_half_made(here), *_handed_over(here)) if _quiet(folder, quiet_s)]
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)
    return removed


def _half_made(root: Path) -> Iterator[Path]:
    for folder in sorted((root / ".models").glob(".*")):
        if folder.is_dir() and _HALF_MADE.fullmatch(folder.name):
            yield folder


def _handed_over(root: Path) -> Iterator[Path]:
    for folder in sorted(exchange_parent().glob(f"{PREFIX}*")):
        run = root / folder.name.removeprefix(PREFIX)
        if folder.is_dir() and (run / RECORD).is_file() and not _in_use(run):
            yield folder


def _in_use(run: Path) -> bool:
    """Whether somebody works on the run; a lease that cannot be read may be anybody's."""
    try:
        owner = lease_of(run).owner()
    except StoreError:
        return True
    return owner is not None and bool(owner["alive"])


def _quiet(folder: Path, seconds: float) -> bool:
    newest = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    return time.time() - newest >= seconds
