"""Weights broadcast by the first rank of the policy to the devices of all rollout engines, on other GPUs or hosts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BACKEND = "nccl"  # name of vLLM's engine for it


@dataclass(frozen=True)
class Endpoint:
    """Where the sender listens, and how many take part: itself and every device of every engine."""

    address: str
    port: int
    world_size: int

    def init_info(self, first_rank: int) -> dict[str, Any]:
        """What vLLM's engine wants to be told; first_rank: of the engine's devices in the group, in which the sender is 0."""
        return {
            "master_address": self.address,
            "master_port": self.port,
            "rank_offset": first_rank,
            "world_size": self.world_size,
            "packed": True,
        }


def first_rank(engine: int, tensor_parallel: int) -> int:
    """Rank of the first device of an engine in the group: engines follow the sender, each with all its devices."""
    return 1 + engine * tensor_parallel


def listen(engines: int, tensor_parallel: int) -> Endpoint:
    """An address of this host and a port that is free now."""
    from vllm.utils.network_utils import get_ip, get_open_port

    return Endpoint(get_ip(), get_open_port(), first_rank(engines, tensor_parallel))


class Sender:
    """The trainer's end of the group; built while every engine joins."""

    def __init__(self, endpoint: Endpoint) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self._group = trainer_init(
            {
                "master_address": endpoint.address,
                "master_port": endpoint.port,
                "world_size": endpoint.world_size,
            }
        )

    def send(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Broadcast them in this order, packed into a few buffers; engines must be receiving."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        torch.accelerator.synchronize()  # it packs on streams of its own, which would not wait for the last update
        packed_nccl_broadcast_producer(iter(tensors), self._group, 0, lambda entry: entry[1])
