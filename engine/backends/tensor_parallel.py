"""Cuts every layer of a model over the tensor-parallel ranks, by the plan that its architecture brings along."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Size, Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from engine.backends.modelling import Model, named_weights
from engine.backends.ranks import Mesh
from engine.errors import ConfigError, Problem
from engine.trainchecks import check_division

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
PARTIAL = "replicated_with_grad_allreduce"  # whole on every rank, which sees only the gradient of its own heads


@dataclass(frozen=True)
class Cut:
    """shapes: of the whole tensors; dims: along which some are cut; partial: whole ones whose gradients must be summed.

    All by Hugging Face name. Embeddings, head and norms stay whole.
    """

    shapes: Mapping[str, Size]
    dims: Mapping[str, int]
    partial: frozenset[str]


def cut_layers(module: Model, mesh: Mesh) -> Cut:
    """Replace the matrices of attention and feed-forward layers by this rank's rows or columns.

    Raises ConfigError where heads or columns do not divide, or the architecture brings no plan of this kind.
    """
    shapes = {name: tensor.shape for name, tensor in named_weights(module).items()}
    if mesh.tensor.size == 1:
        return Cut(shapes, {}, frozenset())
    transformer = module.transformer
    plan = _plan(transformer.config, mesh.tensor.size)
    styles = {path: STYLES[style]() for path, style in plan.items() if style in STYLES}
    # Every rank has read or drawn the same weights: nothing has to be sent.
    parallelize_module(transformer, mesh.device_mesh["tensor"], styles, src_data_rank=None)
    named = named_weights(module)
    dims = {name: dim for name, tensor in named.items() if (dim := _dim(tensor)) is not None}
    patterns = [f"*{path}.weight" for path, style in plan.items() if style == PARTIAL]
    partial = {name for name in named for pattern in patterns if fnmatchcase(name, pattern)}
    return Cut(shapes, dims, frozenset(partial))


def _plan(config: Any, size: int) -> dict[str, str]:
    problems = check_division(config.to_dict(), size)
    plan = {path: style for path, style in (config.base_model_tp_plan or {}).items() if path.startswith("layers.")}
    if other := sorted(set(plan.values()) - {*STYLES, PARTIAL}):
        remedy = f"layers of {config.model_type} models would have to be cut in ways not supported ({', '.join(other)})"
        problems.append(Problem("train.tensor_parallel", size, f"{remedy}; use 1"))
    if not plan:
        remedy = (
            f"transformers has no plan for {config.model_type} models; use 1, or train.backend: fsdp to save memory"
        )
        problems.append(Problem("train.tensor_parallel", size, remedy))
    if problems:
        raise ConfigError("The model cannot be cut over tensor-parallel ranks.", problems=problems)
    return plan


def _dim(tensor: Tensor) -> int | None:
    if not isinstance(tensor, DTensor) or not tensor.placements[0].is_shard():
        return None
    return int(tensor.placements[0].dim)  # type: ignore[attr-defined]
