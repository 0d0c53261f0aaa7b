"""Hand-over of weights from trainer to rollout engines through shared memory, and proof that they arrived."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.backends.weights import weights_sha256
from engine.errors import ConfigError, DivergedError, Problem, ShapeError, TransientError

SHARED_MEMORY = Path("/dev/shm")
MB = 1e6

# Mean difference (nats) of probe log-probabilities between engine and trainer that rounding explains, with room: a
# pretrained model of 135M parameters shows 2e-5 in float32 and 0.1 in bfloat16, dummy weights show more than 4.
LOGPROB_BOUNDS = {"float32": 5e-4, "bfloat16": 0.3}


@dataclass(frozen=True)
class WeightHandle:
    """Where one version of the weights lies; plain values, so it travels anywhere."""

    path: str
    version: int
    digest: str  # weights_sha256: ties what is served to what a checkpoint holds
    size: int  # bytes of all tensors


def exchange_folder(run_key: str) -> Path:
    """Folder through which a run hands over weights: shared memory, or the temporary folder where there is none."""
    parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return parent / f"hybridflow-{run_key}"


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
    digest = weights_sha256(weights)
    path = folder / f"{version}-{digest[:12]}.safetensors"
    partial = path.with_suffix(".partial")
    save_file(weights, partial, metadata={"version": str(version), "digest": digest})
    partial.rename(path)
    for earlier in folder.glob("*.safetensors"):
        if earlier != path:
            earlier.unlink()
    return WeightHandle(str(path), version, digest, size)


def receive(handle: WeightHandle) -> Iterator[tuple[str, Tensor]]:
    """The published tensors, mapped from the file and not copied: do not write to them, and copy what you keep.

    Raises TransientError, before the first tensor, if the file is gone or holds something else than the handle says.
    """
    try:
        file = safe_open(handle.path, framework="pt")
    except (FileNotFoundError, SafetensorError) as error:
        raise TransientError(
            f"weights of version {handle.version} cannot be read from {handle.path}: {error}.",
            remedy="Publish them again; only the latest version is kept.",
        ) from error
    found = file.metadata() or {}
    if found != {"version": str(handle.version), "digest": handle.digest}:
        raise TransientError(
            f"{handle.path} should hold version {handle.version}, digest {handle.digest}; found {found}.",
            remedy="Publish the weights again.",
        )
    return ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - a file is no mapping


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
