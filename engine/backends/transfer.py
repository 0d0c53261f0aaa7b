"""What is known of weights that go from GPU to GPU: names, shapes and types in their order, and a checksum of each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.backends.weights import is_finite
from engine.errors import DivergedError, TransientError

_PIECE = 1 << 24  # elements whose 64-bit products are alive at once
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that every bit of a place counts


@dataclass(frozen=True)
class Manifest:
    """One version of the weights in the order in which they travel; plain values."""

    version: int
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]  # such as "bfloat16"
    checksums: dict[str, int]

    def update_info(self) -> dict[str, Any]:
        """The same as vLLM's transfer engines want to be told."""
        return {
            "names": list(self.shapes),
            "shapes": [list(shape) for shape in self.shapes.values()],
            "dtype_names": [self.dtypes[name] for name in self.shapes],
        }


def describe(tensors: Iterable[tuple[str, Tensor]], version: int) -> Manifest:
    """The manifest of a stream of tensors, which is gone through once."""
    shapes, dtypes, checksums = {}, {}, {}
    for name, tensor in tensors:
        shapes[name] = tuple(tensor.shape)
        dtypes[name] = str(tensor.dtype).removeprefix("torch.")
        checksums[name] = checksum(tensor)
    return Manifest(version, shapes, dtypes, checksums)


def checksum(tensor: Tensor) -> int:
    """64 bits of a tensor's bytes and their order, computed where it lies: the sum of every 8 or 16 bits, weighted by place."""
    words = tensor.detach().contiguous().reshape(-1)
    words = words.view(torch.uint8 if words.element_size() == 1 else torch.int16)
    total = words.new_zeros((), dtype=torch.int64)
    for start in range(0, len(words), _PIECE):
        piece = words[start : start + _PIECE].long()
        places = torch.arange(start + 1, start + 1 + len(piece), device=piece.device) * _FACTOR
        total += (piece * (places ^ (places >> 29))).sum()
    return int(total)


class Recorder:
    """Stands before a model that is being given weights, and keeps a checksum of all that passes."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.checksums: dict[str, int] = {}
        self.not_finite: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """Pass them on."""
        arrived = list(weights)
        for name, tensor in arrived:
            self.checksums[name] = checksum(tensor)
            if not is_finite(tensor):
                self.not_finite.append(name)
        return self._model.load_weights(arrived)


def require_arrived(manifest: Manifest, arrived: Sequence[Mapping[str, int]]) -> None:
    """TransientError unless every engine was given exactly the bytes that were sent."""
    for number, found in enumerate(arrived):
        if altered := [name for name, sent in manifest.checksums.items() if found.get(name) != sent]:
            raise TransientError(
                f"weights of version {manifest.version} did not arrive as they were sent: engine {number} was given "
                f"another {altered[0]} ({len(altered)} of {len(manifest.checksums)} tensors).",
                remedy="Send the weights again.",
            )


def require_finite(names: Sequence[str], version: int) -> None:
    """DivergedError naming a tensor that holds NaN or infinity: it would outlive these weights in blocks of the cache."""
    if names:
        raise DivergedError(f"{names[0]} of version {version} holds values that are not finite; it is not served.")
