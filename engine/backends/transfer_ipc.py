"""Weights as GPU memory that the rollout engine of the same GPU maps: nothing is copied on its way between the processes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from engine.backends.device import gpu_id, release_mapped_memory
from engine.backends.transfer import Manifest, describe
from engine.errors import TransientError

BACKEND = "ipc"  # name of vLLM's engine for it
INIT = {"packed": False}  # every tensor with a handle of its own


@dataclass(frozen=True)
class Exported:
    """How to map the weights on each GPU, by its id: of every tensor, in the order of the manifest."""

    manifest: Manifest
    handles: dict[str, list[Any]]

    def update_info(self) -> dict[str, Any]:
        """What vLLM's engine wants to be told; each looks for its own GPU."""
        by_tensor = [{gpu: handles[place] for gpu, handles in self.handles.items()} for place in range(self._count)]
        return {**self.manifest.update_info(), "ipc_handles": by_tensor}

    @property
    def _count(self) -> int:
        return len(self.manifest.shapes)


class Exporter:
    """A trainer rank's side: holds what engines may be reading until `release`."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._held = {name: tensor.detach().contiguous() for name, tensor in tensors}
        handles = [reduce_tensor(tensor)[1] for tensor in self._held.values()]
        self.exported = Exported(describe(self._held.items(), version), {gpu_id(): handles})

    def release(self) -> None:
        """Once every engine has loaded: tensors made for the hand-over are given back."""
        self._held.clear()
        release_mapped_memory()


def merged(exports: Sequence[Exported]) -> Exported:
    """What all ranks of the trainer exported, one of them on each GPU.

    Raises TransientError if they hold different weights: then a rank has left the group's step.
    """
    first = exports[0]
    for rank, other in enumerate(exports):
        if other.manifest != first.manifest:
            raise TransientError(
                f"ranks 0 and {rank} of the policy hold different weights of version {first.manifest.version}.",
                remedy="The workers are rebuilt from the last committed step.",
                rank=rank,
            )
    return replace(first, handles={gpu: handles for one in exports for gpu, handles in one.handles.items()})
