"""Hand-over of weights from trainer to rollout engines: by shared memory, or carried to other hosts; and proof of arrival."""

import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.backends.exchange import exchange_folder as exchange_folder
from engine.errors import ConfigError, DivergedError, Problem, ShapeError, TransientError

MB = 1e6

# Mean difference (nats) of probe log-probabilities between engine and trainer that rounding explains, with room: a
# pretrained model of 135M parameters shows 2e-5 in float32 and 0.1 in bfloat16, dummy weights show more than 4.
LOGPROB_BOUNDS = {"float32": 5e-4, "bfloat16": 0.3}


@dataclass(frozen=True)
class WeightHandle:
    """Where one version of the weights lies; plain values, so it travels anywhere."""

    path: str
    version: int
    checksums: dict[str, str]  # of every tensor, by name
    size: int  # bytes of all tensors


def publish(tensors: Mapping[str, Tensor], folder: Path, version: int) -> WeightHandle:
    """Write one version as a safetensors file that appears whole or not at all, then drop earlier ones.

    tensors: by Hugging Face name; of several names for one memory (tied weights) the first is written.
    Raises ConfigError if the folder has no room; two versions are there for a moment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = _without_aliases(tensors)
    size = sum(tensor.nbytes for tensor in weights.values())
    for left in folder.glob("*.partial"):  # of a publisher that was killed
        left.unlink()
    _require_room(folder, size)
    path = folder / f"{version}-{uuid.uuid4().hex[:12]}.safetensors"  # a version published twice is told apart
    partial = path.with_suffix(".partial")
    save_file(weights, partial)
    partial.rename(path)
    for earlier in folder.glob("*.safetensors"):
        if earlier != path:
            earlier.unlink()
    return WeightHandle(str(path), version, {name: _checksum(tensor) for name, tensor in weights.items()}, size)


def receive(handle: WeightHandle) -> Iterator[tuple[str, Tensor]]:
    """The published tensors, mapped from the file and not copied: do not write to them, and copy what you keep.

    Raises TransientError if the file is gone or cut off, or holds other tensors than were published: every checksum is
    compared as its tensor is read.
    """
    try:
        file = safe_open(handle.path, framework="pt")
    except (FileNotFoundError, SafetensorError) as error:
        raise TransientError(
            f"weights of version {handle.version} cannot be read from {handle.path}: {error}.",
            remedy="Publish them again; only the latest version is kept.",
        ) from error
    if set(file.keys()) != handle.checksums.keys():
        raise _altered(handle, "other names")
    return _verified(handle, file)


def _verified(handle: WeightHandle, file: safe_open) -> Iterator[tuple[str, Tensor]]:
    for name, expected in handle.checksums.items():
        tensor = file.get_tensor(name)
        if _checksum(tensor) != expected:
            raise _altered(handle, f"another {name}")
        yield name, tensor


def _altered(handle: WeightHandle, found: str) -> TransientError:
    message = f"weights of version {handle.version} changed after they were published: {handle.path} holds {found}."
    return TransientError(message, remedy="Publish the weights again.")


def _checksum(tensor: Tensor) -> str:
    """xxh3 of the bytes: as fast as memory, so that every sync can afford it on both sides."""
    return str(xxhash.xxh3_64_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy().data))


def is_here(handle: WeightHandle) -> bool:
    """Whether this host can read what was published."""
    return Path(handle.path).is_file()


def carry(handle: WeightHandle) -> "numpy.ndarray[Any, numpy.dtype[numpy.uint8]]":
    """The published file as bytes, for engines on other hosts; an array, because Ray moves those without pickling."""
    return numpy.fromfile(handle.path, dtype=numpy.uint8)


@contextmanager
def landed(
    handle: WeightHandle, content: "numpy.ndarray[Any, numpy.dtype[numpy.uint8]]", folder: Path
) -> Iterator[WeightHandle]:
    """The handle of a copy on this host, there while the block runs. Raises ConfigError if the folder has no room."""
    folder.mkdir(parents=True, exist_ok=True)
    _require_room(folder, content.nbytes)
    own = replace(handle, path=str(folder / f"{handle.version}-{uuid.uuid4().hex[:12]}.carried"))
    try:
        content.tofile(own.path)
        yield own
    finally:
        retract(own)


def retract(handle: WeightHandle) -> None:
    """Give the memory back; doing it twice is harmless. Engines that have loaded the weights are not affected."""
    path = Path(handle.path)
    path.unlink(missing_ok=True)
    if path.parent.is_dir() and not any(path.parent.iterdir()):
        path.parent.rmdir()


def probe_sequences(vocab_size: int, seed: int, count: int = 4, length: int = 12) -> list[list[int]]:
    """Fixed random token sequences, count x length ids below vocab_size, on which engine and trainer are compared."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count, length), generator=generator).tolist()


def verify_served(
    served: Sequence[Sequence[float]],
    trained: Sequence[Sequence[float]],
    *,
    bound: float,
    served_version: int,
    trained_version: int,
) -> float:
    """Mean absolute difference (nats) between the engine's and the trainer's log-probabilities of the probe sequences.

    Raises DivergedError above the bound (LOGPROB_BOUNDS) or where a value is not finite: the engine samples from other
    weights than those being trained. ShapeError if the two do not score the same tokens.
    """
    if [len(row) for row in served] != [len(row) for row in trained]:
        raise ShapeError("engine and trainer scored different probe sequences.")
    ours, theirs = (torch.tensor([value for row in rows for value in row]) for rows in (trained, served))
    gap = float((ours - theirs).abs().mean())
    if not gap <= bound:  # also true for NaN
        raise DivergedError(
            f"the engine serves version {served_version} and the trainer holds version {trained_version}, but their "
            f"log-probabilities differ by {gap:.3g} nats on average; {bound:.3g} is allowed.",
            remedy="Sync the weights again; if it stays, the engine reads this architecture differently.",
        )
    return gap


def _without_aliases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """CPU tensors without second names for the same memory, which a safetensors file cannot express."""
    seen: set[tuple[int, torch.Size]] = set()
    kept = {}
    for name, tensor in tensors.items():
        memory = (tensor.data_ptr(), tensor.shape)
        if memory not in seen:
            kept[name] = tensor.detach().cpu().contiguous()
        seen.add(memory)
    return kept


def _require_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        remedy = "give the container more shared memory (for example --shm-size) or a larger TMPDIR"
        raise ConfigError(
            f"Publishing the weights needs {size / MB:.1f} MB; {free / MB:.1f} MB are free.",
            problems=[Problem("shared memory", str(folder), remedy)],
        )
