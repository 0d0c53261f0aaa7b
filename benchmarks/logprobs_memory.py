"""Peak memory of token log-probabilities, forward and backward: log-softmax of everything against a slice at a time.

Usage: python benchmarks/logprobs_memory.py [--tokens 2048] [--vocabulary 49152] [--rounds 3]
Each way runs in a process of its own; memory is what its peak resident size grew by over the logits (bfloat16). The
gradient of the logits, as large as they are, is part of both.
"""

import argparse
import multiprocessing
import resource
import statistics
import sys
import time

import torch

from engine.algorithms.logprobs import token_logprobs

MIB = 2**20


def naive(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The textbook line: a float32 copy of all logits, its log-softmax, and both again in backward."""
    return logits.float().log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


def sliced(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What an update uses."""
    return token_logprobs(logits, targets, temperature=1.0)


WAYS = {"log-softmax of everything": naive, "a slice at a time": sliced}


def peak_bytes() -> int:
    """Most memory this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure(name: str, tokens: int, vocabulary: int, results: "multiprocessing.SimpleQueue[tuple[int, float]]") -> None:
    """Put (bytes above the logits, seconds) of one forward and backward pass."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, vocabulary, generator=generator, dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    WAYS[name](logits[:2], targets[:2]).sum().backward()  # libraries load on first use
    logits.grad = None
    before, start = peak_bytes(), time.perf_counter()
    WAYS[name](logits, targets).sum().backward()
    results.put((peak_bytes() - before, time.perf_counter() - start))


def in_a_process(name: str, tokens: int, vocabulary: int) -> tuple[int, float]:
    """The measurement with a peak of its own."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=measure, args=(name, tokens, vocabulary, results))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"{name} ended with {process.exitcode}")
    return results.get()


def main() -> None:
    """Print medians of both ways as a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    whole = arguments.tokens * arguments.vocabulary * 4 / MIB
    print(f"{arguments.tokens} tokens x {arguments.vocabulary} entries: one float32 copy is {whole:.0f} MiB\n")
    print("| way | peak above the logits, MiB | seconds |\n|---|---|---|")
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in WAYS}
    for _ in range(arguments.rounds):
        for name in WAYS:
            found[name].append(in_a_process(name, arguments.tokens, arguments.vocabulary))
    for name, results in found.items():
        memory = statistics.median(result[0] for result in results) / MIB
        print(f"| {name} | {memory:.0f} | {statistics.median(result[1] for result in results):.2f} |")


if __name__ == "__main__":
    main()
