"""Where runs are kept: a local folder, or a URL of object storage with the folder that caches it on this machine."""

import hashlib
import importlib.util
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from engine.errors import ConfigError, Problem

RECORD = "run.json"
CACHE = "HYBRIDFLOW_CACHE"  # environment: the folder that holds the caches of all URLs
MARK = "REMOTE"  # file of a cache: the URL whose runs it holds, so that nobody takes it for a local root
_ALIASES = {"s3a": "s3", "gcs": "gs", "az": "abfs", "local": "file"}
# Storage that can create an object only if there is none, in one request: what tells two machines who owns a run.
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs", "file": None}
_INSTALL = {"s3": "pip install 'hybridflow[s3]'"}
_URLS: dict[Path, str] = {}  # of the caches that this process named


def is_remote(root: str) -> bool:
    """Whether a root is a URL of object storage."""
    return "://" in root


def absolute_root(root: str) -> str:
    """A root as other processes and machines understand it: an absolute folder, or a URL in its plainest form.

    Raises ConfigError for a URL that cannot be used.
    """
    if not is_remote(root):
        return str(Path(root).absolute())
    if (problem := root_problem(root)) is not None:
        raise ConfigError("The root cannot be used.", problems=[problem])
    protocol, _, rest = root.partition("://")
    protocol = _ALIASES.get(protocol.lower(), protocol.lower())
    return f"{protocol}://{os.path.abspath(rest) if protocol == 'file' else rest.rstrip('/')}"


def local_root(root: str) -> Path:
    """The folder of runs itself, or the one that caches a URL: where everything of its runs lies on this machine."""
    if not is_remote(root):
        return Path(root).absolute()
    url = absolute_root(root)
    base = Path(os.environ.get(CACHE) or Path.home() / ".cache" / "hybridflow").expanduser().absolute()
    readable = re.sub(r"[^A-Za-z0-9]+", "-", url).strip("-")[:60]
    folder = base / f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    _URLS[folder] = url
    return folder


def url_of(folder: Path) -> str | None:
    """The URL that a folder of runs caches; None for a local root."""
    if folder in _URLS:
        return _URLS[folder]
    mark = folder / MARK
    return mark.read_text().strip() if mark.is_file() else None


def root_of(folder: Path) -> str:
    """The root of a run directory, as it is recorded and named in commands."""
    return url_of(folder.parent) or str(folder.parent)


def mark_cache(folder: Path) -> None:
    """Make the cache of a URL and say in it what it is."""
    if (url := url_of(folder)) is not None and not (folder / MARK).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).write_text(f"{url}\n")


def root_problem(root: str) -> Problem | None:
    """What is wrong with a root that is a URL, as far as it can be told without asking the storage."""
    protocol = root.partition("://")[0].lower()
    protocol = _ALIASES.get(protocol, protocol)
    if _holds_secret(root, protocol):
        remedy = (
            "holds credentials, which would be kept in run.json; give them by the environment of the storage's client"
        )
        return Problem("root", f"{protocol}://***", remedy)
    if protocol not in _PACKAGES:
        remedy = (
            "objects cannot be created exclusively there, so that two machines might both write, or nothing is known "
        )
        remedy += f"of such a protocol; use {', '.join(f'{name}://' for name in _PACKAGES)} or a local folder"
        return Problem("root", root, remedy)
    if not root.partition("://")[2].strip("/"):
        return Problem("root", root, "names no bucket or folder; write PROTOCOL://BUCKET/FOLDER")
    package = _PACKAGES[protocol]
    if package is not None and importlib.util.find_spec(package) is None:
        install = _INSTALL.get(protocol, f"pip install {package}")
        return Problem("root", root, f"needs the package {package}, which is not installed: {install}")
    return None


def _holds_secret(root: str, protocol: str) -> bool:
    """Whether a URL names a user, a password or options; a secret may hold slashes, so all of the URL is looked at."""
    place = root.partition("://")[2]
    if protocol == "file":
        return False
    if protocol == "abfs":  # abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/FOLDER
        return "?" in place or ":" in urlsplit(root).netloc
    return any(mark in place for mark in "@:?")
