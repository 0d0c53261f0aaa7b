"""Reads and writes single tensors of a DeepSpeed engine's optimiser state, however the ZeRO stage spreads them."""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.backends.optimizer import MASTER


class OptimizerState(Protocol):
    """Whole float32 tensors by parameter and kind (`exp_avg`, `exp_avg_sq`, `master`); all ranks call together."""

    def read(self, parameter: nn.Parameter, kind: str) -> Tensor:
        """The tensor in the parameter's full shape."""

    def write(self, parameter: nn.Parameter, kind: str, value: Tensor) -> None:
        """Keep this rank's part of a tensor of the parameter's full shape."""


def open_state(engine: Any, stage: int) -> OptimizerState:
    """Access to the state of an engine that has taken one step; before that some stages have none."""
    if stage == 0:
        return _Replicated(engine)
    return _Partitioned() if stage == 3 else _Fragments()


class _Replicated:
    """ZeRO 0: every rank holds everything; the master of a float32 parameter is the parameter."""

    def __init__(self, engine: Any) -> None:
        self._moments = engine.basic_optimizer.state
        if engine.optimizer is engine.basic_optimizer:
            self._masters = {parameter: parameter for parameter in engine.module.parameters()}
        else:
            self._masters = dict(zip(engine.optimizer.fp16_groups[0], engine.optimizer.fp32_groups[0], strict=True))

    def read(self, parameter: nn.Parameter, kind: str) -> Tensor:
        return self._tensor(parameter, kind).detach()

    def write(self, parameter: nn.Parameter, kind: str, value: Tensor) -> None:
        with torch.no_grad():
            self._tensor(parameter, kind).copy_(value)

    def _tensor(self, parameter: nn.Parameter, kind: str) -> Tensor:
        master = self._masters[parameter]
        return master if kind == MASTER else self._moments[master][kind]


class _Fragments:
    """ZeRO 1 and 2: flat partitions, a parameter may lie across two ranks."""

    def read(self, parameter: nn.Parameter, kind: str) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if kind == MASTER:
            return safe_get_full_fp32_param(parameter).detach()
        return safe_get_full_optimizer_state(parameter, kind).detach()

    def write(self, parameter: nn.Parameter, kind: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if kind == MASTER:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, kind)


class _Partitioned(_Fragments):
    """ZeRO 3: every parameter is cut into equal parts, the last one padded.

    The library's own writer of full tensors fails where the size does not divide; this one cuts and pads itself.
    """

    def write(self, parameter: nn.Parameter, kind: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        part = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        flat = nn.functional.pad(value.flatten(), (0, part * dist.get_world_size() - value.numel()))
        local = flat.narrow(0, part * dist.get_rank(), part)
        if kind == MASTER:
            safe_set_local_fp32_param(parameter, local)
        else:
            safe_set_local_optimizer_state(parameter, local, kind)
