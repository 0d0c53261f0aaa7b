"""Seconds to hand a trainer's weights to a running vLLM engine, beside a plain copy of the same bytes.

Usage: python benchmarks/weight_sync.py MODEL_FOLDER [--rounds 5]
One process holds trainer weights and engine, so nothing but the hand-over is measured; both are timed in turn.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.backends.base import RolloutSpec
from engine.backends.engines import build_engine
from engine.backends.weight_sync import exchange_folder, publish, receive, retract
from engine.backends.weights import load_folder

GIB = 2**30


def engine_spec(source: Path, dtype: str) -> RolloutSpec:
    """A small engine: the hand-over depends on the weights alone."""
    return RolloutSpec(
        source=source,
        dtype=dtype,
        max_prompt_tokens=64,
        max_response_tokens=16,
        top_p=1.0,
        top_k=0,
        stop=(),
        kv_cache_gib=1,
        gpu_memory_utilization=0.5,
        max_batched_tokens=None,
        tensor_parallel=1,
        max_batch=8,
        shares_gpu=False,
    )


def timed(work: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    weights = {name: tensor.float().clone() for name, tensor in load_folder(arguments.model).items()}
    engine = build_engine(engine_spec(arguments.model, "float32"), "vllm")
    folder = exchange_folder("benchmark")
    copies, published, received = [], [], []
    for version in range(arguments.rounds + 1):
        copies.append(timed(lambda: {name: tensor.clone() for name, tensor in weights.items()}))
        started = time.perf_counter()
        handle = publish(weights, folder, version)
        published.append(time.perf_counter() - started)
        received.append(timed(lambda: engine.load_weights(receive(handle), version=version)))  # noqa: B023 - called now
        retract(handle)
    size = sum(tensor.nbytes for tensor in weights.values()) / GIB
    threads = torch.get_num_threads()
    print(f"{size:.2f} GiB, {threads} threads, median of {arguments.rounds} rounds after one to warm up\n")
    print("| step | s | times a copy |\n|---|---|---|")
    copy = statistics.median(copies[1:])
    both = [one + other for one, other in zip(published, received, strict=True)]
    rows = {"plain copy": copies, "publish": published, "receive and load": received, "whole hand-over": both}
    for name, seconds in rows.items():
        median = statistics.median(seconds[1:])
        print(f"| {name} | {median:.3f} | {median / copy:.1f} |")


if __name__ == "__main__":
    main()
