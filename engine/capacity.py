"""Whether a run fits its devices and disk: what the dry run reports and refuses beyond configuration and data."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.architecture import Architecture
from engine.config import RunConfig
from engine.errors import Problem
from engine.roots import is_remote
from engine.sizing import (
    BYTES,
    GIB,
    LEARNS,
    RoleMemory,
    kv_bytes,
    longest_sample,
    role_memory,
    roles_of,
    state_bytes,
)

CONTEXT = GIB  # CUDA context, kernels and NCCL's buffers of one process on one GPU
TIGHT = 0.9  # share of a device above which the report warns
_SMALLER = (
    "raise train.zero_stage or placement.ranks, lower train.micro_batch_tokens or rollout.gpu_memory_utilization, "
    "turn on train.gradient_checkpointing, or use larger devices"
)
_TEXT_BYTES = 4  # of a token, in the table of texts


@dataclass(frozen=True)
class Machine:
    """Where a run is to fit; None = not known, and nothing is compared with it.

    gpu_bytes: memory of one GPU; ram_bytes: memory that all processes share where there are no GPUs; disk_bytes: free
    for the root; shared_bytes: free in the folder through which weights are handed over.
    """

    gpu_bytes: int | None = None
    ram_bytes: int | None = None
    disk_bytes: int | None = None
    shared_bytes: int | None = None


@dataclass(frozen=True)
class Processes:
    """Processes that are alike: `ranks` of them, each with these roles on `devices` devices of its own."""

    roles: tuple[str, ...]
    ranks: int
    devices: int = 1


@dataclass(frozen=True)
class Capacity:
    """What a run needs, and everything that does not fit."""

    report: dict[str, Any]
    lines: list[str]
    problems: list[Problem]


def capacity(config: RunConfig, shapes: Architecture, machine: Machine) -> Capacity:
    """Memory per device of every pool, disk and divisibility of a run on a machine."""
    roles = {role: role_memory(config, shapes, role, machine.gpu_bytes) for role in roles_of(config)}
    pools = {name: _pool(sets, roles, machine) for name, sets in pools_of(config).items()}
    engine, disk, host = _engine(config, shapes, roles["rollout"]), _disk(config, shapes), _host(config, shapes)
    report = {
        "architecture": {"model_type": shapes.model_type, "parameters": shapes.parameters, "layers": shapes.layers},
        "machine": asdict(machine),
        "roles": {role: {**asdict(memory), "total": memory.total} for role, memory in roles.items()},
        "engine": engine,
        "pools": pools,
        "disk": disk,
        "host": host,
        "samples_per_rank_and_step": _dealt(config),
        "notes": list(_notes(config, pools, machine)),
    }
    problems = [
        *_tensor_parallel(config, shapes),
        *_memory(config, roles, pools, machine),
        *_cache(config, roles["rollout"], engine, machine),
        *_room(config, disk, host, machine),
    ]
    return Capacity(report, _lines(report), problems)


def pools_of(config: RunConfig) -> dict[str, list[Processes]]:
    """Pool -> the kinds of processes on its devices; on the first device there is one of each kind."""
    placement, trained = config.placement, tuple(role for role in roles_of(config) if role != "rollout")
    engine = Processes(("rollout",), placement.rollout_ranks, config.rollout.tensor_parallel)
    trainers = Processes(trained, placement.ranks)
    if placement.mode == "local":
        return {"local": [Processes((*trained, "rollout"), 1)]}
    if placement.mode == "colocate":
        return {"shared": [engine, trainers]}
    if placement.mode == "split":
        return {"rollout": [engine], "train": [trainers]}
    return {"rollout": [engine], **{role: [Processes((role,), placement.ranks)] for role in trained}}


def _pool(sets: list[Processes], roles: dict[str, RoleMemory], machine: Machine) -> dict[str, Any]:
    """devices, roles and bytes: of the fullest device with GPUs, else of all processes together."""
    counts = [1 if machine.gpu_bytes is not None else kind.ranks * kind.devices for kind in sets]
    needed = sum(count * _process_bytes(kind, roles, machine) for count, kind in zip(counts, sets, strict=True))
    return {
        "devices": max(kind.ranks * kind.devices for kind in sets),
        "roles": [role for kind in sets for role in kind.roles],
        "bytes": needed,
        "share": None if machine.gpu_bytes is None else needed / machine.gpu_bytes,
    }


def _process_bytes(kind: Processes, roles: dict[str, RoleMemory], machine: Machine) -> int:
    """The roles of a process hold their state together and work in turn."""
    parts = [roles[role] for role in kind.roles]
    context = CONTEXT if machine.gpu_bytes is not None else 0
    return sum(part.held for part in parts) + max(part.activations for part in parts) + context


def _engine(config: RunConfig, shapes: Architecture, memory: RoleMemory) -> dict[str, int]:
    per_token = kv_bytes(config, shapes)
    tokens = memory.kv_cache // per_token
    return {
        "kv_bytes_per_token": per_token,
        "kv_cache_tokens": tokens,
        "longest_sample": longest_sample(config),
        "samples_at_a_time": tokens // longest_sample(config),
    }


def _disk(config: RunConfig, shapes: Architecture) -> dict[str, int]:
    """Bytes below the root at most: checkpoints kept and one in the making, start, experience of all iterations, model."""
    weights = BYTES[config.model.dtype] * shapes.parameters
    checkpoint = sum(state_bytes(config, shapes, role) for role in roles_of(config) if role in LEARNS)
    settings = config.checkpoint
    best = settings.keep_best if config.evaluation.every is not None else 0
    saved = -(-config.iterations // settings.every)
    kept = min(saved, settings.keep_last + best + 1)
    start = weights if config.sft is not None or config.model.init == "random" else 0
    experience = config.iterations * config.samples_per_iteration * _sample_bytes(config)
    registered = weights if config.registry is not None else 0
    return {
        "checkpoint": checkpoint,
        "checkpoints": kept,
        "start": start,
        "experience": experience,
        "registered": registered,
        "total": kept * checkpoint + start + experience + registered,
    }


def _sample_bytes(config: RunConfig) -> int:
    """Ids 8, mask 1 and text of every token; mask 1 and two log-probabilities of 4 of a response token, and whatever
    reference and critics add to it."""
    roles = roles_of(config)
    response = 9 + 4 * ("reference" in roles) + 4 * len(config.algorithm.critics)
    tokens = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return tokens * (9 + _TEXT_BYTES) + config.rollout.max_response_tokens * response


def _host(config: RunConfig, shapes: Architecture) -> dict[str, int]:
    """Bytes of main memory besides the devices: while a rank builds a model, while rank 0 writes one with its optimiser
    state, and what lies in shared memory while weights are handed over."""
    weights = BYTES[config.model.dtype] * shapes.parameters
    return {
        "rank_while_loading": weights,
        "first_rank_while_saving": max(
            state_bytes(config, shapes, role) for role in roles_of(config) if role in LEARNS
        ),
        "shared_memory": weights,
    }


def _dealt(config: RunConfig) -> list[int]:
    """Fewest and most samples of a rank in one optimiser step."""
    samples, ranks = config.samples_per_iteration // config.train.mini_batches, config.placement.ranks
    return [samples // ranks, -(-samples // ranks)]


def _notes(config: RunConfig, pools: dict[str, Any], machine: Machine) -> Iterator[str]:
    fewest, most = _dealt(config)
    if fewest != most:
        yield f"an optimiser step gives {most} samples to some of the {config.placement.ranks} ranks and {fewest} to others"
    for name, pool in pools.items():
        if pool["share"] is not None and TIGHT < pool["share"] <= 1:
            yield f"pool {name} would fill {pool['share']:.0%} of a device: an estimate this close may not hold"
    if machine.gpu_bytes is None and machine.ram_bytes is None:
        yield "the devices are not known, so memory was not compared; set placement.device_memory_gib"


def _tensor_parallel(config: RunConfig, shapes: Architecture) -> Iterator[Problem]:
    parallel = config.rollout.tensor_parallel
    counts = {"attention heads": shapes.heads, "numbers in its MLP": shapes.intermediate}
    uneven = [f"{count} {what}" for what, count in counts.items() if count % parallel]
    if shapes.kv_heads % parallel and parallel % shapes.kv_heads:
        uneven.append(f"{shapes.kv_heads} key heads")
    if uneven:
        fits = [n for n in range(1, shapes.heads + 1) if _divides(n, shapes)]
        remedy = (
            f"the model has {' and '.join(uneven)}, which it does not divide; use one of {', '.join(map(str, fits))}"
        )
        yield Problem("rollout.tensor_parallel", parallel, remedy)


def _divides(parallel: int, shapes: Architecture) -> bool:
    keys = shapes.kv_heads % parallel == 0 or parallel % shapes.kv_heads == 0
    return shapes.heads % parallel == 0 and shapes.intermediate % parallel == 0 and keys


def _memory(
    config: RunConfig, roles: dict[str, RoleMemory], pools: dict[str, Any], machine: Machine
) -> Iterator[Problem]:
    if machine.gpu_bytes is not None:
        for name, pool in pools.items():
            if pool["bytes"] > machine.gpu_bytes:
                remedy = (
                    f"a device of pool {name} would need {_size(pool['bytes'])} ({_parts(pool, roles)}); {_SMALLER}"
                )
                yield Problem("placement.device_memory_gib", round(machine.gpu_bytes / GIB, 1), remedy)
    elif machine.ram_bytes is not None:
        needed = sum(pool["bytes"] for pool in pools.values())
        if needed > machine.ram_bytes:
            remedy = (
                f"all processes together would need {_size(needed)}; this machine has {_size(machine.ram_bytes)}. "
                "Lower the ranks, train.micro_batch_tokens or rollout.kv_cache_gib, or use a smaller model"
            )
            yield Problem("model.source", config.model.source, remedy)


def _parts(pool: dict[str, Any], roles: dict[str, RoleMemory]) -> str:
    held = {role: roles[role].held for role in pool["roles"]}
    parts = [f"{role} {_size(count)}" for role, count in held.items()]
    return ", ".join([*parts, f"while working {_size(pool['bytes'] - sum(held.values()))}"])


def _cache(config: RunConfig, memory: RoleMemory, engine: dict[str, int], machine: Machine) -> Iterator[Problem]:
    if config.rollout.backend == "hf" or engine["samples_at_a_time"] >= 1:
        return
    room = f"leaves a key-value cache of {engine['kv_cache_tokens']} tokens; one sample has up to {engine['longest_sample']}"
    if machine.gpu_bytes is None:
        yield Problem("rollout.kv_cache_gib", config.rollout.kv_cache_gib, f"{room}. Raise it")
        return
    taken = f"weights and work of the engine take {_size(memory.weights + memory.activations)} of it"
    remedy = f"{room} ({taken}). Raise it, or rollout.tensor_parallel"
    yield Problem("rollout.gpu_memory_utilization", config.rollout.gpu_memory_utilization, remedy)


def _room(config: RunConfig, disk: dict[str, int], host: dict[str, int], machine: Machine) -> Iterator[Problem]:
    if machine.disk_bytes is not None and disk["total"] > machine.disk_bytes:
        other = (
            "Put the cache of the URL elsewhere (HYBRIDFLOW_CACHE)" if is_remote(config.root) else "Use another root"
        )
        remedy = (
            f"the run needs up to {_size(disk['total'])} ({disk['checkpoints']} checkpoints of "
            f"{_size(disk['checkpoint'])}, experience {_size(disk['experience'])}); {_size(machine.disk_bytes)} are free. "
            f"{other}, or keep fewer checkpoints (checkpoint.keep_last, keep_best)"
        )
        yield Problem("root", config.root, remedy)
    if machine.shared_bytes is not None and host["shared_memory"] > machine.shared_bytes:
        remedy = (
            f"handing over the weights takes {_size(host['shared_memory'])} of shared memory; "
            f"{_size(machine.shared_bytes)} are free. Give the container more, for example --shm-size"
        )
        yield Problem("shared memory", str(Path("/dev/shm")), remedy)


def _lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    shapes, engine, disk, host = (report[name] for name in ("architecture", "engine", "disk", "host"))
    lines = [f"  model: {shapes['model_type']}, {shapes['parameters']:,} parameters"]
    for role, memory in report["roles"].items():
        parts = [
            f"{name} {_size(memory[name])}"
            for name in ("weights", "gradients", "optimiser", "buffers", "kv_cache", "activations")
            if memory[name]
        ]
        lines.append(f"  {role}: {_size(memory['total'])} per device ({', '.join(parts)})")
    for name, pool in report["pools"].items():
        of = "" if pool["share"] is None else f", {pool['share']:.0%} of it"
        each = "all processes" if pool["share"] is None else "fullest device"
        lines.append(f"  pool {name}: {pool['devices']} devices, {each} {_size(pool['bytes'])}{of}")
    lines.append(
        f"  engine: cache of {engine['kv_cache_tokens']:,} tokens, {engine['samples_at_a_time']} samples of full length"
    )
    lines.append(
        f"  disk: up to {_size(disk['total'])} ({disk['checkpoints']} checkpoints of {_size(disk['checkpoint'])}, "
        f"experience {_size(disk['experience'])})"
    )
    lines.append(
        f"  main memory: {_size(host['rank_while_loading'])} per rank while loading, "
        f"{_size(host['first_rank_while_saving'])} in rank 0 while saving, {_size(host['shared_memory'])} shared"
    )
    return lines + [f"  note: {note}" for note in report["notes"]]


def _size(count: int) -> str:
    """GiB, or MiB of what is small."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"
