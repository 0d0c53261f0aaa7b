"""Run directory: a step exists if and only if its MANIFEST.json, written last and never overwritten, verifies."""

import hashlib
import json
import logging
import math
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import DivergedError, StoreError
from engine.lease import lease_of

log = logging.getLogger(__name__)
MANIFEST = "MANIFEST.json"
PRUNED = "PRUNED"
_SEAL = "seal"  # key of a manifest: sha256 over all others, so that no flipped bit in a fact or metric is believed
_TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class StepRef:
    """Small JSON-able name of one committed step: its folder within the run and the sha256 of its manifest."""

    path: str  # data, sft, iterations/00012/rollout, iterations/00012/train, evaluation/00012, gate, registration
    manifest_sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a committed folder holds and where it came from."""

    path: str
    config_digest: str
    parent: str | None  # manifest sha256 of the step this one was computed from
    files: dict[str, dict[str, Any]]  # relative name -> {"size": bytes, "sha256": hex}
    metrics: dict[str, float | None] = field(default_factory=dict)  # None = nothing was measured
    facts: dict[str, Any] = field(default_factory=dict)  # small results later steps need without reading the files
    committed_at: float = 0.0  # seconds since the epoch
    sealed_s: float = 0.0  # seconds that hashing the files and bringing them to disk took before that


def step_path(kind: str, iteration: int) -> str:
    """Folder of an iteration's rollout or train step, or of an evaluation, within the run."""
    return f"evaluation/{iteration:05d}" if kind == "evaluation" else f"iterations/{iteration:05d}/{kind}"


class Store:
    """One run directory, read by anyone, written by the holder of its lease.

    folder: {root}/{run_key}; config_digest: every manifest must carry it.
    """

    def __init__(self, folder: Path, config_digest: str) -> None:
        self.folder = folder
        self.config_digest = config_digest
        self.lease = lease_of(folder)
        self._verified: set[str] = set()

    def committed(self, path: str, *, parent: StepRef | None = None) -> StepRef | None:
        """The step's reference if it is committed and usable, else None.

        A folder that is damaged, foreign or made from another parent is moved to quarantine with a warning
        (only by the lease holder; a reader just gets None), because it can be made again.
        """
        folder = self.folder / path
        if not folder.exists():
            return None
        fault = self._fault(folder, path, parent)
        if fault is None:
            return StepRef(path, sha256_of(folder / MANIFEST))
        log.warning("Step %s of %s cannot be used (%s).", path, self.folder.name, fault)
        if self.lease.held:
            self._quarantine(folder, fault)
        return None

    def manifest(self, ref: StepRef) -> Manifest:
        """The verified manifest of a committed step. Raises StoreError if it is gone or not the one referred to."""
        file = self.folder / ref.path / MANIFEST
        if not file.is_file():
            raise StoreError(
                f"Step {ref.path} is not there any more.", path=str(file), remedy="Resume to make it again."
            )
        if sha256_of(file) != ref.manifest_sha256:
            raise StoreError(
                f"Step {ref.path} was replaced since it was referred to.", path=str(file), remedy="Resume the run."
            )
        return _parse(file)

    def read(self, ref: StepRef) -> Path:
        """Folder of a committed step, every file checked against its sha256 once per process.

        Raises StoreError; a step of other content is moved to quarantine by the lease holder, so that it is made again.
        """
        manifest = self.manifest(ref)
        folder = self.folder / ref.path
        if (folder / PRUNED).exists():
            raise StoreError(
                f"The files of {ref.path} were removed by retention.", remedy="Use a later step.", path=str(folder)
            )
        if ref.manifest_sha256 not in self._verified:
            for name, entry in manifest.files.items():
                if sha256_of(folder / name) != entry["sha256"] and not self._restored(ref, manifest, name):
                    raise self._altered(ref, folder, name)
            self._verified.add(ref.manifest_sha256)
        return folder

    @contextmanager
    def commit(self, path: str, *, parent: StepRef | None = None) -> Iterator["Draft"]:
        """A draft folder to fill; leaving the block without an error makes it the committed step `path`.

        Raises StoreError if the step is committed already, the lease was lost, or the files cannot be written.
        """
        target = self.folder / path
        if target.exists():
            raise StoreError(f"Step {path} is committed already and is never overwritten.", path=str(target))
        self.lease.check()
        draft = Draft(self.folder / f"{_TEMPORARY}{path.replace('/', '-')}-{uuid.uuid4().hex[:8]}")
        try:
            draft.folder.mkdir(parents=True)
            yield draft
            self._seal(draft, path, parent)
        except OSError as error:
            raise StoreError(
                f"Step {path} could not be written: {error.strerror or error}.",
                path=str(error.filename or draft.folder),
                remedy="Make room or fix the folder's permissions, then resume; earlier steps are intact.",
            ) from error
        finally:
            shutil.rmtree(draft.folder, ignore_errors=True)

    def latest(self, kind: str) -> tuple[int, StepRef] | None:
        """Newest iteration with a usable step of this kind, pruned ones included."""
        folder = self.folder / "iterations"
        numbers = [int(child.name) for child in folder.iterdir() if child.name.isdigit()] if folder.exists() else []
        for number in sorted(numbers, reverse=True):
            if ref := self.committed(step_path(kind, number)):
                return number, ref
        return None

    def prune(self, ref: StepRef) -> None:
        """Remove a step's files but keep its manifest: the chain stays verifiable and the step counts as done."""
        self.lease.check()
        folder = self.folder / ref.path
        manifest = self.manifest(ref)
        (folder / PRUNED).touch()
        for name in manifest.files:
            (folder / name).unlink(missing_ok=True)

    def is_pruned(self, ref: StepRef) -> bool:
        """Whether retention removed the step's files."""
        return (self.folder / ref.path / PRUNED).exists()

    def drafts(self) -> list[Path]:
        """Folders of commits under way, or interrupted."""
        return sorted(self.folder.glob(f"{_TEMPORARY}*"))

    def remove_drafts(self) -> None:
        """Delete what interrupted commits left behind; only the lease holder may."""
        self.lease.check()
        for leftover in self.drafts():
            shutil.rmtree(leftover)

    def _seal(self, draft: "Draft", path: str, parent: StepRef | None) -> None:
        files, started = {}, time.perf_counter()
        for file in sorted(item for item in draft.folder.rglob("*") if item.is_file()):
            _fsync(file)
            files[file.relative_to(draft.folder).as_posix()] = {"size": file.stat().st_size, "sha256": sha256_of(file)}
        manifest = Manifest(
            path=path,
            config_digest=self.config_digest,
            parent=parent.manifest_sha256 if parent else None,
            files=files,
            metrics=_finite_or_none(path, draft.metrics),
            facts=dict(draft.facts),
            committed_at=time.time(),
            sealed_s=time.perf_counter() - started,
        )
        content = asdict(manifest)
        text = json.dumps(content | {_SEAL: _digest(content)}, indent=1, sort_keys=True, allow_nan=False)
        (draft.folder / MANIFEST).write_text(text)
        _fsync(draft.folder / MANIFEST)
        for folder in (*(item for item in draft.folder.rglob("*") if item.is_dir()), draft.folder):
            _fsync(folder)
        self.lease.check()
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.folder.rename(target)
        _fsync(target.parent)
        sha = hashlib.sha256(text.encode()).hexdigest()
        self._verified.add(sha)
        draft.ref = StepRef(path, sha)

    def _fault(self, folder: Path, path: str, parent: StepRef | None) -> str | None:
        """Why a folder is not the committed step that was asked for; None = it is."""
        try:
            manifest = _parse(folder / MANIFEST)
        except StoreError as error:
            return error.message
        if manifest.path != path:
            return f"its manifest belongs to {manifest.path}"
        if manifest.config_digest != self.config_digest:
            return "it was made with another configuration"
        if parent is not None and manifest.parent != parent.manifest_sha256:
            return f"it was made from another parent than the present {parent.path}"
        return None if (folder / PRUNED).exists() else self._incomplete(folder, manifest)

    def _incomplete(self, folder: Path, manifest: Manifest) -> str | None:
        """Which file of a step is missing or cut; None = all are there."""
        for name, entry in manifest.files.items():
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != entry["size"]:
                return f"{name} has {file.stat().st_size} bytes instead of {entry['size']}"
        return None

    def _restored(self, ref: StepRef, manifest: Manifest, name: str) -> bool:
        """Whether a file of other content could be replaced by the committed one; there is no second copy here."""
        return False

    def _altered(self, ref: StepRef, folder: Path, name: str) -> StoreError:
        """The error for a file of other content; the lease holder sets its step aside, so that it is made again."""
        fault = f"{name} of step {ref.path} does not have the content that was committed."
        if self.lease.held:
            self._quarantine(folder, fault)
        remedy = "Resume the run: the step is set aside and made again from the last good one."
        return StoreError(fault, path=str(folder / name), remedy=remedy)

    def _quarantine(self, folder: Path, fault: str) -> str:
        """Set a step aside with its reason; returns the new name within `quarantine`."""
        name = f"{folder.relative_to(self.folder).as_posix().replace('/', '-')}-{uuid.uuid4().hex[:8]}"
        target = self.folder / "quarantine" / name
        target.parent.mkdir(exist_ok=True)
        folder.rename(target)
        (target / "REASON").write_text(fault)
        return name


class Draft:
    """A step being made: files go to `folder`; `ref` is set once it is committed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics: Mapping[str, float] = {}
        self.facts: Mapping[str, Any] = {}
        self._ref: StepRef | None = None

    @property
    def ref(self) -> StepRef:
        """Reference of the committed step; StoreError before the commit block ended."""
        if self._ref is None:
            raise StoreError("This step is not committed yet.", path=str(self.folder))
        return self._ref

    @ref.setter
    def ref(self, value: StepRef) -> None:
        self._ref = value


def _finite_or_none(path: str, metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics as JSON holds them: NaN, which means not measured, becomes null. Raises DivergedError on an infinite one."""
    for name, value in metrics.items():
        if math.isinf(value):
            raise DivergedError(f"Metric {name} of step {path} is {value}.", remedy="The step was not committed.")
    return {name: None if math.isnan(value) else value for name, value in metrics.items()}


def _parse(file: Path) -> Manifest:
    try:
        return parse_manifest(file.read_bytes(), str(file))
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError("it has no manifest: it was never finished", path=str(file)) from None


def parse_manifest(text: bytes, path: str) -> Manifest:
    """The manifest of this content, found at `path`. Raises StoreError, whose message says what is wrong with it."""
    try:
        content = json.loads(text)
        if content.pop(_SEAL, None) != _digest(content):
            raise ValueError("it was altered since it was written")
        manifest = Manifest(**content)
        if not all(isinstance(part, dict) for part in (manifest.files, manifest.facts, manifest.metrics)):
            raise TypeError("files, facts and metrics must be mappings")
        return manifest
    except (ValueError, TypeError, AttributeError) as error:
        raise StoreError(f"its manifest does not parse: {error}", path=path) from error


def _digest(content: dict[str, Any]) -> str:
    """sha256 of a manifest's values, whatever its layout."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sha256_of(file: Path) -> str:
    """Hash of a file's content. Raises StoreError if it is missing."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise StoreError(f"{file.name} is missing.", path=str(file), remedy="Resume the run.") from error


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
