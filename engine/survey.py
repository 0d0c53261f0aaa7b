"""What is committed at the storage of one run, what is damaged there, and what belongs to no step."""

import hashlib
import re
from dataclasses import dataclass

from engine.errors import StoreError
from engine.remote import Place
from engine.store import MANIFEST, PRUNED, parse_manifest

QUARANTINE = "quarantine/"
_STEP = re.compile(r"[a-z]+(/\d{5,}(/[a-z]+)?)?")  # data, iterations/00012/train, evaluation/00012 ...
_OF_STEP = re.compile(r"(?P<step>.+)/(?P<files>files-[0-9a-f]{16})/.+")


@dataclass(frozen=True)
class Survey:
    """steps: manifests by step, as they lie there; pruned: those of them whose files retention removed; damaged: steps with
    the reason; strays: names of uploaded files that no manifest speaks of, or that were to be removed."""

    steps: dict[str, bytes]
    pruned: frozenset[str]
    damaged: dict[str, str]
    strays: tuple[str, ...]


def survey(place: Place) -> Survey:
    """One listing and all manifests: sizes are checked, contents when they are read."""
    sizes = place.sizes()
    names = {name: name.removesuffix(f"/{MANIFEST}") for name in sizes if name.endswith(f"/{MANIFEST}")}
    found = place.read_all([name for name, step in names.items() if _STEP.fullmatch(step)])
    texts = {names[name]: text for name, text in found.items()}
    pruned = frozenset(step for step in texts if f"{step}/{PRUNED}" in sizes)
    faults = {step: _fault(step, text, sizes, pruned=step in pruned) for step, text in texts.items()}
    damaged = {step: fault for step, fault in faults.items() if fault is not None}
    steps = {step: text for step, text in texts.items() if step not in damaged}
    strays = tuple(name for name in sizes if _is_stray(name, steps, damaged, pruned))
    return Survey(steps, pruned, damaged, strays)


def files_folder(step: str, manifest: bytes) -> str:
    """Where the files of a step lie: a folder of this manifest alone, so that nobody else's upload can touch them."""
    return f"{step}/files-{hashlib.sha256(manifest).hexdigest()[:16]}"


def _fault(step: str, text: bytes, sizes: dict[str, int], *, pruned: bool) -> str | None:
    try:
        manifest = parse_manifest(text, step)
    except StoreError as error:
        return error.message
    if manifest.path != step:
        return f"its manifest belongs to {manifest.path}"
    if strangers := [name for name in manifest.files if name.startswith("/") or ".." in name.split("/")]:
        return f"{strangers[0]} would lie outside the step"
    for name, entry in manifest.files.items() if not pruned else ():
        found = sizes.get(f"{files_folder(step, text)}/{name}")
        if found is None:
            return f"{name} is missing"
        if found != entry["size"]:
            return f"{name} has {found} bytes instead of {entry['size']}"
    return None


def _is_stray(name: str, steps: dict[str, bytes], damaged: dict[str, str], pruned: frozenset[str]) -> bool:
    match = _OF_STEP.fullmatch(name)
    if match is None or name.startswith(QUARANTINE) or match["step"] in damaged:
        return False
    text = steps.get(match["step"])
    kept = text is not None and match["step"] not in pruned
    return not kept or f"{match['step']}/{match['files']}" != files_folder(match["step"], text or b"")
