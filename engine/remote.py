"""A folder of object storage behind an fsspec URL: whole objects in and out, its faults told as ours."""

import importlib
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, HybridFlowError, Problem, StoreError, TransientError
from engine.roots import absolute_root, is_remote, url_of

log = logging.getLogger(__name__)
# What clients raise besides OSError, by protocol.
_FAULTS = {
    "s3": ("botocore.exceptions:BotoCoreError", "botocore.exceptions:ClientError", "aiohttp:ClientError"),
    "gs": ("aiohttp:ClientError", "gcsfs.retry:HttpError", "google.auth.exceptions:GoogleAuthError"),
    "abfs": ("azure.core.exceptions:AzureError",),
    "file": (),
}
_USABLE: set[str] = set()  # URLs that `require_place` found in order


class Place:
    """Objects below one URL, named relative to it.

    own_connections: not shared with other places, so that a small write never waits behind large ones.
    Raises TransientError where the storage does not answer, StoreError where it refuses.
    """

    def __init__(self, url: str, *, own_connections: bool = False) -> None:
        import fsspec

        self.url = url
        self._protocol = url.partition("://")[0]
        options = {"auto_mkdir": True} if self._protocol == "file" else {"use_listings_cache": False}
        self._faults = tuple(_named(fault) for fault in _FAULTS[self._protocol])
        with self._telling("The client of the storage could not be made"):
            self._files = fsspec.filesystem(self._protocol, skip_instance_cache=own_connections, **options)
        self._base = str(self._files._strip_protocol(url))

    def sizes(self, under: str = "") -> dict[str, int]:
        """Bytes of every object, or of those in a folder, by name."""
        with self._telling(f"The objects of {under or 'the run'} could not be listed"):
            found = self._files.find(self._path(under), detail=True)
        start = len(self._base) + 1
        return {name[start:]: int(info["size"]) for name, info in found.items() if info["type"] == "file"}

    def folders(self) -> list[str]:
        """Names of the folders directly below the URL."""
        with self._telling("The folders could not be listed"):
            try:
                found = self._files.ls(self._base, detail=True)
            except FileNotFoundError:
                return []
        return sorted(item["name"].rstrip("/").rsplit("/", 1)[1] for item in found if item["type"] == "directory")

    def read(self, name: str) -> bytes | None:
        """Content of an object; None = there is none."""
        return self.read_all([name]).get(name)

    def read_all(self, names: Sequence[str]) -> dict[str, bytes]:
        """Content of the objects that are there, by name."""
        if not names:
            return {}
        with self._telling(f"{_several(names)} could not be read"):
            paths = {self._path(name): name for name in names}
            found = self._files.cat(list(paths), on_error="return")
            for content in found.values():
                if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
                    raise content
        return {paths[path]: content for path, content in found.items() if isinstance(content, bytes)}

    def write(self, name: str, content: bytes) -> None:
        """Put an object in place of what is there, at once."""
        with self._telling(f"{name} could not be written"):
            if self._protocol == "file":
                self._files.pipe_file(new := self._new(name), content)
                self._files.mv(new, self._path(name))
            else:
                self._files.pipe_file(self._path(name), content)

    def create(self, name: str, content: bytes) -> bool:
        """Put an object where there is none; False = there is one, which is left as it is."""
        with self._telling(f"{name} could not be created"):
            try:
                if self._protocol == "file":
                    self._link(name, content)
                else:
                    self._files.pipe_file(self._path(name), content, mode="create")
            except FileExistsError:
                return False
        return True

    def upload(self, files: Mapping[Path, str]) -> None:
        """Put local files under their names."""
        with self._telling(f"{_several(list(files.values()))} could not be uploaded"):
            self._files.put([str(file) for file in files], [self._path(name) for name in files.values()])

    def download(self, files: Mapping[str, Path]) -> None:
        """Fetch objects to local files, whose folders are made."""
        for file in files.values():
            file.parent.mkdir(parents=True, exist_ok=True)
        with self._telling(f"{_several(list(files))} could not be fetched"):
            self._files.get([self._path(name) for name in files], [str(file) for file in files.values()])

    def remove(self, names: Sequence[str]) -> None:
        """Delete objects that are there."""
        if names:
            with self._telling(f"{_several(names)} could not be removed"):
                self._files.rm([self._path(name) for name in names])

    def move(self, names: Mapping[str, str]) -> None:
        """Give objects other names, in their order."""
        for name, new in names.items():
            with self._telling(f"{name} could not be moved"):
                self._files.copy(self._path(name), self._path(new))
                self._files.rm_file(self._path(name))

    def modified(self, name: str) -> float:
        """When an object was last written, by the clock of the storage, in seconds since the epoch."""
        with self._telling(f"The time of {name} could not be asked for"):
            return float(self._files.modified(self._path(name)).timestamp())

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}".rstrip("/")

    def _new(self, name: str) -> str:
        return f"{self._path(name)}.new-{uuid.uuid4().hex[:8]}"

    def _link(self, name: str, content: bytes) -> None:
        """Whole or not at all, where a file that is being written can be seen."""
        self._files.pipe_file(new := self._new(name), content)
        try:
            self._files.link(new, self._path(name))
        finally:
            self._files.rm_file(new)

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        try:
            yield
        except PermissionError as error:
            remedy = "Check the credentials in the environment and what they permit, then resume."
            raise StoreError(f"{what}: the storage refused ({error}).", path=self.url, remedy=remedy) from error
        except (OSError, *self._faults) as error:
            cause = f"{type(error).__name__}: {error}"
            remedy = "Check the storage and the network, then resume: nothing is made twice."
            raise TransientError(f"{what} ({cause}).", path=self.url, remedy=remedy) from error


def place_of(folder: Path, *, own_connections: bool = False) -> Place | None:
    """Where a run directory is kept besides this machine; None for a run of a local root."""
    url = url_of(folder.parent)
    return None if url is None else Place(f"{url}/{folder.name}", own_connections=own_connections)


def require_place(root: str) -> None:
    """Raise ConfigError unless a URL can be written and creates objects exclusively; a local folder is not looked at."""
    if not is_remote(root) or (url := absolute_root(root)) in _USABLE:
        return
    name = f".probe-{uuid.uuid4().hex}"
    try:
        place = Place(url)
        made, again = place.create(name, b"first"), place.create(name, b"second")
        kept = place.read(name)
        place.remove([name])
    except HybridFlowError as error:
        raise _unusable(url, f"{error.message} {error.remedy}") from error
    if not made or again or kept != b"first":
        raise _unusable(
            url, "this storage overwrites objects where it is asked not to, so that two machines might both write"
        )
    _USABLE.add(url)


def _unusable(url: str, remedy: str) -> ConfigError:
    return ConfigError("The root cannot be used.", problems=[Problem("root", url, remedy)])


def _several(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more objects"


def _named(fault: str) -> Any:
    module, name = fault.split(":")
    return vars(importlib.import_module(module))[name]
