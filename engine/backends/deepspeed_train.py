"""Training with DeepSpeed ZeRO 0 to 3: the sums, norms and updates of plain torch with state spread over ranks."""

import contextlib
import io
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from engine.backends.base import LossFunction, Reader, Trainer, TrainerSpec
from engine.backends.deepspeed_state import OptimizerState, open_state
from engine.backends.imports import without
from engine.backends.modelling import build_module, named_weights
from engine.backends.optimizer import (
    CLASSES,
    MASTER,
    clear_moments,
    diverged,
    moments,
    new_optimizer,
    same_kind,
    set_options,
    set_rate,
    set_steps,
    state_shapes,
)
from engine.backends.ranks import everyone, merge_over_ranks, most_parts, most_parts_to_learn, require_group
from engine.backends.schedule import Schedule
from engine.backends.weights import check_tensors
from engine.batch import Batch
from engine.config import OptimizerConfig
from engine.errors import HybridFlowError
from engine.metrics import Metrics, from_pairs

BUCKET = 50_000_000  # most elements that travel in one collective; never more than the model has


class DeepSpeedTrainer(Trainer):
    """One DeepSpeed engine per rank.

    DeepSpeed averages gradients over ranks; the loss is scaled by their number, so that what arrives is the sum. Ranks
    with fewer micro-batches than others run empty ones, because every backward pass (and with ZeRO 3 every forward
    pass) is a collective. A frozen model (no optimizer) is possible with ZeRO 3 only, which spreads its weights.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        require_group(spec)
        self.spec = spec
        self._ranks = everyone(spec)
        self._deepspeed = _load_deepspeed(spec)
        module = build_module(spec)
        self._sharded = spec.train.zero_stage == 3
        self._has_master = spec.model.dtype != "float32"
        self._shapes = {name: tensor.shape for name, tensor in named_weights(module).items()}  # sharding hides them
        self._engine = self._start(module)
        self._named = named_weights(module)
        self._parameters = {name: tensor for name, tensor in self._named.items() if isinstance(tensor, nn.Parameter)}
        if spec.optimizer is not None:
            self._prepare_training(spec.optimizer)

    def _start(self, module: nn.Module) -> Any:
        optimizer, options = None, self.spec.optimizer
        if options is None:
            module.requires_grad_(False)
        else:
            wrapped = self._has_master or self.spec.train.zero_stage > 0
            kind = None if wrapped else _checked(CLASSES[options.optimizer])
            optimizer = new_optimizer(module.parameters(), options, kind)
        config = _engine_config(self.spec, list(module.parameters()))
        with contextlib.redirect_stdout(io.StringIO()):  # memory reports that cannot be turned off
            engine, *_ = self._deepspeed.initialize(
                model=module, optimizer=optimizer, config=config, dist_init_required=False
            )
        engine.module.train(self.spec.optimizer is not None and self.spec.train.gradient_checkpointing)
        return engine

    def _prepare_training(self, optimizer: OptimizerConfig) -> None:
        if self._has_master and self.spec.train.zero_stage == 0:
            for parameter in self._parameters.values():
                parameter.grad_dtype = torch.float32  # the other stages add up in float32 by configuration
        # One step with gradient 0 and rate 0 changes nothing and makes every stage allocate its optimiser state.
        self._run_empty(boundary=True)
        self._engine.step()
        self._state: OptimizerState = open_state(self._engine, self.spec.train.zero_stage)
        self.reset_optimizer(optimizer, self.spec.total_steps)

    @property
    def steps(self) -> int:
        """Optimiser steps applied so far since the last reset."""
        return self._schedule.steps

    def score(self, parts: Sequence[Batch], read: Reader) -> list[Tensor]:
        """With ZeRO 3 all ranks run as many passes as the one with most parts."""
        most = most_parts(len(parts), self._ranks) if self._sharded else len(parts)
        with torch.no_grad():
            results = [read(self._output(part), part).cpu() for part in self._placed(parts)]
            for _ in range(most - len(parts)):
                self._empty_output()
        return results

    def step(self, parts: Sequence[Batch], loss: LossFunction) -> Metrics:
        """Backward passes of all ranks stay in lockstep; the last one is the accumulation boundary."""
        most = most_parts_to_learn(len(parts), self._ranks)
        metrics = Metrics()
        for number, part in enumerate(self._placed(parts)):
            self._engine.set_gradient_accumulation_boundary(number == most - 1)
            result = loss(self._output(part), part)
            self._engine.backward(result.loss * self.spec.world_size, scale_wrt_gas=False)
            metrics = metrics | from_pairs(result.metrics)
        for number in range(len(parts), most):
            self._run_empty(boundary=number == most - 1)
        rate = self._schedule.rate()
        set_rate(self._engine.optimizer, rate)
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        if not self._engine.was_step_applied():
            raise diverged(self.spec, self.steps, norm)
        self._schedule.steps += 1
        merged = merge_over_ranks(metrics, len(parts), self._ranks)
        return merged.with_value("train/grad_norm", norm).with_value("train/lr", rate)

    def adapt_rate(self, kl: float) -> None:
        """Schedule adaptive_kl: choose the rate of the next steps."""
        self._schedule.adapt(kl)

    def scale_rate(self, scale: float) -> None:
        """Of the schedule's rates, until the next reset."""
        self._schedule.scale = scale

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """With ZeRO 3 one tensor at a time is put together on all ranks, and copied because it is spread again."""
        for name, tensor in self._named.items():
            with self._whole(tensor):
                found = tensor.detach().clone() if self._sharded else tensor.detach()
            yield name, found

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Also the float32 masters start from these weights, until an optimiser state with better ones is loaded."""
        check_tensors(tensors, self._shapes, "weights to be loaded")
        with torch.no_grad():
            for name, tensor in self._named.items():
                with self._whole(tensor, writer=0):
                    tensor.copy_(tensors[name])
        if self.spec.optimizer is not None and not isinstance(self._engine.optimizer, _Checked):
            self._engine.optimizer.refresh_fp32_params()

    def optimizer_state(self) -> dict[str, Tensor]:
        """A snapshot on rank 0, put together one tensor at a time from the parts that the ranks hold."""
        state = self._schedule.state()
        for name, parameter in self._parameters.items():
            for kind in self._kinds:
                whole = self._state.read(parameter, kind)
                if self.spec.rank == 0:
                    state[f"{name}/{kind}"] = whole.to("cpu", copy=True).contiguous()
        return state if self.spec.rank == 0 else {}

    def load_optimizer_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Moments, step count and masters, each rank taking its part; load the weights first."""
        shapes = {name: self._shapes[name] for name in self._parameters}
        wanted = state_shapes(shapes, self._kinds, self._schedule.state())
        check_tensors(tensors, wanted, "optimiser state to be loaded")
        for name, parameter in self._parameters.items():
            for kind in self._kinds:
                self._state.write(parameter, kind, tensors[f"{name}/{kind}"].to(self.spec.device))
        self._schedule.load(tensors)
        set_steps(self._engine.basic_optimizer, self.steps)

    def reset_optimizer(self, optimizer: OptimizerConfig, total_steps: int) -> None:
        """The weights stay as they are. HybridFlowError for an optimiser of another kind: the engine is bound to its own."""
        assert self.spec.optimizer is not None
        if not same_kind(self.spec.optimizer, optimizer):
            raise HybridFlowError(
                f"a DeepSpeed engine of {self.spec.optimizer.optimizer} was given {optimizer.optimizer} "
                "(or other moments).",
                remedy="Build another trainer from the weights.",
                rank=self.spec.rank,
            )
        self._schedule = Schedule(optimizer, total_steps)
        self._engine.optimizer.clip_grad = optimizer.max_grad_norm
        set_options(self._engine.basic_optimizer, optimizer)
        clear_moments(self._engine.basic_optimizer)

    @property
    def _kinds(self) -> tuple[str, ...]:
        kinds = moments(self._schedule.options)
        return (*kinds, MASTER) if self._has_master else kinds

    def _placed(self, parts: Sequence[Batch]) -> list[Batch]:
        return [part.to(self.spec.device) for part in parts]

    def _output(self, part: Batch) -> Tensor:
        return self._engine(part.input_ids, part.attention_mask)

    def _empty_output(self) -> Tensor:
        one_token = torch.zeros(1, 1, dtype=torch.int64, device=self.spec.device)
        return self._engine(one_token, one_token == 0)

    def _run_empty(self, *, boundary: bool) -> None:
        """Forward and backward with gradient zero, to keep step with ranks that hold more."""
        self._engine.set_gradient_accumulation_boundary(boundary)
        self._engine.backward(self._empty_output().float().sum() * 0.0, scale_wrt_gas=False)

    def _whole(self, tensor: Tensor, writer: int | None = None) -> Any:
        """With ZeRO 3 the whole parameter inside the block, kept as rank `writer` leaves it."""
        return self._deepspeed.zero.GatheredParameters([tensor], modifier_rank=writer, enabled=self._sharded)


class _Checked:
    """Makes an optimiser clip and refuse non-finite gradients the way DeepSpeed's own wrappers do.

    ZeRO 0 in float32 calls the given optimiser directly; the engine reads `overflow` and `_global_grad_norm` of it.
    """

    clip_grad = math.inf
    overflow = False
    _global_grad_norm = 0.0
    param_groups: list[dict[str, Any]]

    def step(self, closure: None = None) -> None:
        """One update, or none with `overflow` set."""
        parameters = self.param_groups[0]["params"]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        self._global_grad_norm = float(norm)
        self.overflow = not math.isfinite(self._global_grad_norm)
        if not self.overflow:
            nn.utils.clip_grads_with_norm_(parameters, self.clip_grad, norm)
            super().step(closure)  # type: ignore[misc]  # of the optimiser it is mixed into


def _checked(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    return type(f"Checked{kind.__name__}", (_Checked, kind), {})


def _load_deepspeed(spec: TrainerSpec) -> ModuleType:
    """The library, told which device to use, without compiled operators and with its messages on standard error."""
    os.environ["DS_ACCELERATOR"] = spec.device.type
    os.environ["LOCAL_RANK"] = str(spec.device.index or 0)
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+. is deprecated", FutureWarning)
    with contextlib.redirect_stdout(sys.stderr), without("mlflow"):
        import deepspeed
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__ = {}  # it would spend minutes compiling a shared-memory collective
        deepspeed.init_distributed(auto_mpi_discovery=False, dist_init_required=False)
    log = logging.getLogger("DeepSpeed")
    log.handlers.clear()  # its own one writes to standard output, which belongs to the command's answer
    log.propagate = True
    log.setLevel(logging.WARNING)
    return deepspeed


def _engine_config(spec: TrainerSpec, parameters: Sequence[Tensor]) -> dict[str, Any]:
    """DeepSpeed configuration for a model of these parameters."""
    size = sum(parameter.numel() for parameter in parameters)
    bucket = min(size + size % 2, BUCKET)  # an odd one is refused
    longest_vector = max((parameter.numel() for parameter in parameters if parameter.dim() == 1), default=0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # not used: micro-batches come as the caller cut them
        "gradient_accumulation_steps": 1,  # not used: the boundary is set by hand
        "communication_data_type": "fp32",
        "gradient_clipping": 0.0,  # set on the optimiser, where it may change
        "zero_allow_untested_optimizer": True,  # every optimiser here works element by element, so it can be spread
        "bf16": {"enabled": spec.model.dtype == "bfloat16"},
        "zero_optimization": {
            "stage": spec.train.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
            "stage3_param_persistence_threshold": longest_vector + 1,  # norms and biases stay whole, matrices do not
        },
    }
    if spec.train.offload_optimizer:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        config["zero_force_ds_cpu_optimizer"] = False  # torch's own, as on every other backend; nothing is compiled
    if spec.model.dtype == "bfloat16" and spec.train.zero_stage > 0:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config
