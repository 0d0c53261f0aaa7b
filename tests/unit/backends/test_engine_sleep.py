"""An engine that shares a GPU: what it gives back, when it refuses to wake; the GPU itself is simulated by two numbers."""

from types import SimpleNamespace

import pytest

from engine.backends.base import RolloutEngine
from engine.errors import ConfigError

pytest.importorskip("vllm")
from engine.backends import vllm_rollout

GIB = 2**30


@pytest.fixture
def gpu(monkeypatch):
    """Free bytes of a GPU, of which the engine holds 30 GiB while it is awake."""
    state = SimpleNamespace(free=40 * GIB, calls=[])
    monkeypatch.setattr(vllm_rollout, "free_gpu_bytes", lambda: state.free)
    return state


class Resident:
    """Stands for vLLM's engine: takes and gives memory, nothing else."""

    def __init__(self, gpu) -> None:
        self.gpu = gpu

    def sleep(self, level: int) -> None:
        self.gpu.calls.append(("sleep", level))
        self.gpu.free += 30 * GIB

    def wake_up(self) -> None:
        self.gpu.calls.append(("wake_up", None))
        self.gpu.free -= 30 * GIB


def engine(gpu, *, shares_gpu: bool) -> RolloutEngine:
    built = object.__new__(vllm_rollout.VLLMRollout)
    built._spec = SimpleNamespace(shares_gpu=shares_gpu, gpu_memory_utilization=0.4)
    built._version, built._given_back, built._llm = 3, None, Resident(gpu)
    return built


def test_it_forgets_its_weights_once_and_takes_its_memory_again(gpu):
    shared = engine(gpu, shares_gpu=True)
    assert shared.sleep() and shared._version is None and gpu.free == 70 * GIB
    assert not shared.sleep()
    shared.wake()
    shared.wake()
    assert gpu.calls == [("sleep", 2), ("wake_up", None)] and gpu.free == 40 * GIB


def test_it_does_not_wake_into_memory_that_the_trainers_hold(gpu):
    shared = engine(gpu, shares_gpu=True)
    shared.sleep()
    gpu.free = 25 * GIB
    with pytest.raises(ConfigError, match=r"rollout\.gpu_memory_utilization = 0\.4: .*30\.0 GiB.*25\.0 GiB"):
        shared.wake()
    assert gpu.calls == [("sleep", 2)]


def test_an_engine_with_a_device_of_its_own_never_sleeps(gpu):
    alone = engine(gpu, shares_gpu=False)
    assert not alone.sleep()
    alone.wake()
    assert alone._version == 3 and gpu.calls == []
