"""Which rollout engine a name stands for; each library is loaded only when its engine is wanted."""

from typing import Literal

from engine.backends.base import RolloutEngine, RolloutSpec


def build_engine(spec: RolloutSpec, backend: Literal["vllm", "hf"]) -> RolloutEngine:
    """A rollout engine without weights: `load_weights` comes before the first request."""
    if backend == "vllm":
        from engine.backends.vllm_rollout import VLLMRollout

        return VLLMRollout(spec)
    from engine.backends.hf_rollout import HFRollout

    return HFRollout(spec)
