"""The only place that chooses between GPU and CPU: device, collectives, attention kernel, number types, what they give."""

import resource
import time
from functools import cache
from importlib.util import find_spec

import torch

from engine.errors import ConfigError, Problem

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PROBE, _PROBES = 1024, 5  # side and number of the matrix products that measure a CPU

# Dense peak of known GPUs in FLOP/s from their data sheets: bfloat16 with tensor cores, float32 without. The first entry
# whose words are all in the device's name counts, so the longer of two comes first.
_PEAKS = {
    "B200": {"bfloat16": 2250e12, "float32": 75e12},
    "H200 NVL": {"bfloat16": 835e12, "float32": 60e12},
    "H200": {"bfloat16": 989e12, "float32": 67e12},
    "H100 PCIe": {"bfloat16": 756e12, "float32": 51e12},
    "H100 NVL": {"bfloat16": 835e12, "float32": 60e12},
    "H100": {"bfloat16": 989e12, "float32": 67e12},
    "A100": {"bfloat16": 312e12, "float32": 19.5e12},
    "L40S": {"bfloat16": 362e12, "float32": 91.6e12},
    "A10": {"bfloat16": 125e12, "float32": 31.2e12},
    "L4": {"bfloat16": 121e12, "float32": 30.3e12},
}


def has_gpu() -> bool:
    """Whether this process may see a GPU."""
    return torch.cuda.is_available()


def gpu_indices() -> list[int]:
    """The GPUs this process may see."""
    return list(range(torch.cuda.device_count()))


def gpu_bytes() -> int | None:
    """Memory of the first GPU this process may see; None without one."""
    return torch.cuda.get_device_properties(0).total_memory if has_gpu() else None


def free_gpu_bytes() -> int:
    """Memory of the current GPU that no process holds."""
    return torch.cuda.mem_get_info()[0]


def gpu_id() -> str:
    """Name of the current GPU that is the same in every process, whatever GPUs a process may see."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def release_mapped_memory() -> None:
    """Take back memory of the current GPU that other processes had mapped and no longer do."""
    torch.cuda.ipc_collect()


def pick_device(index: int = 0) -> torch.device:
    """The index-th GPU this process may see, else the CPU."""
    return torch.device("cuda", index) if has_gpu() else torch.device("cpu")


def collective_backend(device: torch.device) -> str:
    """What `torch.distributed` should use: NCCL for GPU tensors, gloo for CPU tensors."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def attention_kernel(device: torch.device, dtype: torch.dtype) -> str:
    """The attention transformers should use: flash attention where it is installed and applies, else torch's own."""
    if device.type == "cuda" and dtype == torch.bfloat16 and find_spec("flash_attn") is not None:
        return "flash_attention_2"
    return "sdpa"


def parameter_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch type of model.dtype. Raises ConfigError if the device cannot compute in it."""
    dtype = DTYPES[name]
    if (device.type, name) == ("cuda", "bfloat16") and not torch.cuda.is_bf16_supported(including_emulation=False):
        problem = Problem("model.dtype", name, "use float32, or a GPU of compute capability 8.0 or higher")
        raise ConfigError(f"{torch.cuda.get_device_name(device)} has no bfloat16 arithmetic.", problems=[problem])
    return dtype


def peak_memory(device: torch.device) -> int:
    """Most bytes this process has held since it began: tensors on a GPU, all memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_rate(dtype: str, device: torch.device) -> float:
    """FLOP/s the device can reach in model.dtype: of a GPU as its data sheet says, NaN if it is not known here; of a CPU
    as measured, once per process, with the threads it has."""
    if device.type == "cuda":
        return listed_rate(torch.cuda.get_device_name(device), dtype)
    return _measured_rate(DTYPES[dtype])


def listed_rate(name: str, dtype: str) -> float:
    """FLOP/s of a GPU by its name; NaN if it is not listed."""
    words = name.replace("-", " ").split()
    for listed, rates in _PEAKS.items():
        if all(word in words for word in listed.split()):
            return rates[dtype]
    return float("nan")


@cache
def _measured_rate(dtype: torch.dtype) -> float:
    """The best of a few products of two matrices of side n: 2 n^3 operations each."""
    matrix = torch.ones(_PROBE, _PROBE, dtype=dtype)
    seconds = []
    for _ in range(_PROBES):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        seconds.append(time.perf_counter() - start)
    return 2 * _PROBE**3 / min(seconds)
