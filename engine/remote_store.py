"""Run directory whose truth is on object storage: a step is committed once its manifest is there; this folder is a cache.

Work is done here. A step is sealed here, its files are uploaded, their sizes checked, and its manifest is created last, where
there is none. What could not be uploaded is uploaded before anything else is done; what another machine made is fetched
when it is read.
"""

import fcntl
import logging
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import HybridFlowError, StoreError, TransientError
from engine.remote import Place, place_of
from engine.remote_lease import RemoteLease, bring_record, lease_in, write_whole
from engine.roots import RECORD, absolute_root, is_remote, local_root
from engine.store import MANIFEST, PRUNED, Draft, Manifest, StepRef, Store, parse_manifest, sha256_of
from engine.survey import QUARANTINE, Survey, files_folder, survey

log = logging.getLogger(__name__)
_STEPS = (f"*/{MANIFEST}", f"*/*/{MANIFEST}", f"*/*/*/{MANIFEST}")
_FETCH = ".fetch-"


def store_in(folder: Path, config_digest: str) -> Store:
    """The store of a run directory, of a local root or of a URL."""
    place = place_of(folder)
    return Store(folder, config_digest) if place is None else RemoteStore(folder, config_digest, place)


class RemoteStore(Store):
    """As Store, for a run of a URL; every answer holds for the storage as it was when this process became owner or,
    without the lease, when it first asked."""

    lease: RemoteLease

    def __init__(self, folder: Path, config_digest: str, place: Place) -> None:
        super().__init__(folder, config_digest)
        lease = lease_in(folder)
        assert isinstance(lease, RemoteLease)
        self.lease = lease
        self.place = place
        self._there: dict[str, bytes] = {}  # manifests of the steps that are committed at the storage
        self._pruned: set[str] = set()  # those of them whose files retention removed
        self._followed: int | None = None  # tenure in which the storage was looked at; 0 = as a reader

    def committed(self, path: str, *, parent: StepRef | None = None) -> StepRef | None:
        """As Store.committed. A step that is finished here but not yet at the storage is uploaded first."""
        self._follow()
        if path in self._there and self._may_repair():
            self._adopt(path)
        ref = super().committed(path, parent=parent)
        if ref is None or path in self._there:
            return ref
        if not self.lease.held:
            return None
        self._send(path)
        return ref

    def read(self, ref: StepRef) -> Path:
        """As Store.read; files that are not here are fetched."""
        self._follow()
        if ref.path in self._there and not self.is_pruned(ref):
            self._fetch(ref.path, self.manifest(ref))
        return super().read(ref)

    @contextmanager
    def commit(self, path: str, *, parent: StepRef | None = None) -> Iterator[Draft]:
        """As Store.commit. Raises TransientError where the upload fails: the step stays here, and is uploaded next time."""
        self._follow()
        with super().commit(path, parent=parent) as draft:
            yield draft

    def latest(self, kind: str) -> tuple[int, StepRef] | None:
        """As Store.latest, of all that is at the storage."""
        self._follow()
        return super().latest(kind)

    def prune(self, ref: StepRef) -> None:
        """As Store.prune, at the storage first."""
        self._follow()
        self.lease.check()
        text = (self.folder / ref.path / MANIFEST).read_bytes()
        self.place.write(f"{ref.path}/{PRUNED}", b"")
        self._pruned.add(ref.path)
        self.place.remove(list(self.place.sizes(files_folder(ref.path, text))))
        super().prune(ref)

    def _seal(self, draft: Draft, path: str, parent: StepRef | None) -> None:
        super()._seal(draft, path, parent)
        self._send(path)

    def _follow(self) -> None:
        """Bring the cache in line with the storage, once as a reader and once whenever this process became the owner."""
        tenure = self.lease.tenure if self.lease.held else 0
        if self._followed == tenure:
            return
        with self._alone():
            found = survey(self.place)
            self._there, self._pruned = dict(found.steps), set(found.pruned)
            if tenure:
                self._take_over(found)
            elif self._may_repair():
                self._adopt_all()
        self._followed = tenure

    def _take_over(self, found: Survey) -> None:
        """The owner's part: damaged steps are moved away, finished ones uploaded, files of none removed."""
        self.lease.check()
        for path, fault in found.damaged.items():
            log.warning("Step %s of %s cannot be used at the storage (%s).", path, self.folder.name, fault)
            self._move(path, f"{path.replace('/', '-')}-{uuid.uuid4().hex[:8]}", fault)
        self._adopt_all()
        for path in self._steps_here():
            if path not in self._there:
                self._send_or_set_aside(path)
        if self.lease.swept == self.lease.tenure:  # later, such files may be an upload of this very process
            return
        kept = tuple(f"{files_folder(*step)}/" for step in self._there.items() if step[0] not in self._pruned)
        self.place.remove([name for name in found.strays if not name.startswith(kept)])
        self.lease.swept = self.lease.tenure

    def _may_repair(self) -> bool:
        """Whether the cache is this process's to put in order: its owner's, or a reader's where nobody here works on the run."""
        return self.lease.held or not self.lease.works_here()

    def _adopt_all(self) -> None:
        for path in self._there:
            self._adopt(path)

    def _adopt(self, path: str) -> None:
        """Make the manifest here that at the storage; what differs is set aside."""
        folder, text = self.folder / path, self._there[path]
        if folder.exists() and (not (folder / MANIFEST).is_file() or self._text(path) != text):
            fault = "the storage holds another one: it is what counts"
            log.warning("Step %s of %s cannot be used here (%s).", path, self.folder.name, fault)
            super()._quarantine(folder, fault)
        write_whole(folder / MANIFEST, text)
        if path not in self._pruned:
            (folder / PRUNED).unlink(missing_ok=True)
        elif not (folder / PRUNED).exists():
            (folder / PRUNED).touch()
            for name in parse_manifest(text, path).files:
                (folder / name).unlink(missing_ok=True)

    def _steps_here(self) -> list[str]:
        found = (file.parent.relative_to(self.folder).as_posix() for way in _STEPS for file in self.folder.glob(way))
        return sorted(path for path in found if not path.startswith((QUARANTINE, ".")))

    def _send_or_set_aside(self, path: str) -> None:
        """Upload a step that the storage lacks; one whose files are gone is set aside, a faulty one left to `committed`."""
        folder = self.folder / path
        try:
            manifest = parse_manifest(self._text(path), str(folder))
        except StoreError:
            return
        if manifest.path != path or manifest.config_digest != self.config_digest:
            return
        if fault := self._unavailable(path, manifest):
            log.warning("Step %s of %s cannot be used (%s).", path, self.folder.name, fault)
            super()._quarantine(folder, fault)
            return
        log.warning("Step %s of %s is uploaded: it was finished, but is not at the storage.", path, self.folder.name)
        self._send(path)

    def _unavailable(self, path: str, manifest: Manifest) -> str | None:
        if (self.folder / path / PRUNED).exists():
            return None
        lacking = self._lacking_there(path, manifest)
        gone = [name for name in lacking if not _has(self.folder / path, name, manifest)]
        return f"{gone[0]} is neither here nor at the storage" if gone else None

    def _lacking_there(self, path: str, manifest: Manifest) -> list[str]:
        """Files of a step that are not at the storage in their size."""
        where = files_folder(path, self._text(path))
        sizes = self.place.sizes(where)
        return [name for name, entry in manifest.files.items() if sizes.get(f"{where}/{name}") != entry["size"]]

    def _send(self, path: str) -> None:
        """Upload a finished step: files, then the manifest, which makes it committed."""
        text = self._text(path)
        manifest, where = parse_manifest(text, path), files_folder(path, text)
        if (self.folder / path / PRUNED).exists():
            self.place.write(f"{path}/{PRUNED}", b"")
            self._pruned.add(path)
        elif lacking := self._lacking_there(path, manifest):
            self.place.upload({self.folder / path / name: f"{where}/{name}" for name in lacking})
            if cut := self._lacking_there(path, manifest):
                remedy = "Resume the run: the step is uploaded again, not made again."
                raise TransientError(f"{cut[0]} of {path} did not arrive whole.", path=self.place.url, remedy=remedy)
        self.lease.check()
        name = f"{path}/{MANIFEST}"
        if not self.place.create(name, text) and self.place.read(name) != text:  # the answer to a creation may be lost
            self._followed = None
            raise StoreError(
                f"Step {path} was committed by another process meanwhile.",
                path=f"{self.place.url}/{name}",
                remedy="Resume the run: it goes on from that one, and the one made here is set aside.",
            )
        self._there[path] = text

    def _incomplete(self, folder: Path, manifest: Manifest) -> str | None:
        """Files of a step that is at the storage need not be here."""
        return None if manifest.path in self._there else super()._incomplete(folder, manifest)

    def _fetch(self, path: str, manifest: Manifest) -> None:
        """Bring the files of a step here that are not, each at once; another process may do the same."""
        folder, where = self.folder / path, files_folder(path, self._text(path))
        lacking = [name for name in manifest.files if not _has(folder, name, manifest)]
        if not lacking:
            return
        new = self.folder / f"{_FETCH}{uuid.uuid4().hex[:8]}"
        try:
            self.place.download({f"{where}/{name}": new / name for name in lacking})
            for name in lacking:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (new / name).replace(folder / name)
        except HybridFlowError:
            self._followed = None  # what is missing there shows when it is looked at again
            raise
        except OSError as error:
            raise StoreError(
                f"The files of {path} could not be brought here: {error.strerror or error}.",
                path=str(folder),
                remedy="Make room or fix the folder's permissions, then resume.",
            ) from error
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def _restored(self, ref: StepRef, manifest: Manifest, name: str) -> bool:
        """Fetch a file of other content anew: the copy here may be the damaged one."""
        if ref.path not in self._there:
            return False
        file = self.folder / ref.path / name
        file.unlink()
        self._fetch(ref.path, manifest)
        return bool(sha256_of(file) == manifest.files[name]["sha256"])

    def _quarantine(self, folder: Path, fault: str) -> str:
        """Set a step aside here and at the storage."""
        self.lease.check()
        name = super()._quarantine(folder, fault)
        self._move(folder.relative_to(self.folder).as_posix(), name, fault)
        return name

    def _move(self, path: str, name: str, fault: str) -> None:
        """Set a step aside at the storage; its manifest goes first, so that it is no step any more."""
        target = f"{QUARANTINE}{name}"
        found = sorted(self.place.sizes(path), key=lambda item: item != f"{path}/{MANIFEST}")
        self._there.pop(path, None)
        if found:
            self.place.move({item: f"{target}/{item.removeprefix(f'{path}/')}" for item in found})
            self.place.write(f"{target}/REASON", fault.encode())

    def _text(self, path: str) -> bytes:
        return (self.folder / path / MANIFEST).read_bytes()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One process of this machine at a time brings the cache in line."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".REMOTE.lock").open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield


def bring_run(folder: Path) -> bool:
    """Make the record of a run of a URL here that at the storage; whether there is such a run. Nothing for a local root."""
    place = place_of(folder)
    if place is None:
        return (folder / RECORD).is_file()
    lease = lease_in(folder)
    assert isinstance(lease, RemoteLease)
    if folder.is_dir() and lease.works_here():
        return (folder / RECORD).is_file()
    return bring_record(folder, place)


def run_folders(root: str) -> list[Path]:
    """Folders of all runs under a root, by name; the records of those of a URL are brought here."""
    if not is_remote(root):
        return sorted(file.parent.absolute() for file in Path(root).glob(f"*/{RECORD}"))
    folder = local_root(root)
    names = Place(absolute_root(root)).folders()
    return [folder / name for name in names if not name.startswith(".") and bring_run(folder / name)]


def save_file(folder: Path, name: str) -> None:
    """Put a file beside the steps of a run of a URL to the storage. Raises StoreError where another process owns the run."""
    if (place := place_of(folder)) is not None:
        lease_in(folder).check()
        place.write(name, (folder / name).read_bytes())


def _has(folder: Path, name: str, manifest: Manifest) -> bool:
    file = folder / name
    return file.is_file() and file.stat().st_size == manifest.files[name]["size"]
