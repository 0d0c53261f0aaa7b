"""The only place that chooses between GPU and CPU: device, collectives, attention kernel, number types."""

from importlib.util import find_spec

import torch

from engine.errors import ConfigError, Problem

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_device(index: int = 0) -> torch.device:
    """The index-th GPU this process may see, else the CPU."""
    return torch.device("cuda", index) if torch.cuda.is_available() else torch.device("cpu")


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
