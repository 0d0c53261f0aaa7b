"""One optimiser step on two data-parallel ranks: our backends against torch's DistributedDataParallel, on the same rows.

Usage: python benchmarks/data_parallel.py [--steps 6]
A small Llama (2.5M parameters) in float32, two gloo processes of one thread. The ways take turns within every round, so that
a busy moment of the machine falls on all of them.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from engine.algorithms.logprobs import token_logprobs
from engine.algorithms.losses import sft_loss
from engine.backends.base import TrainerSpec
from engine.backends.trainers import build_trainer
from engine.batch import Batch, response_ids, response_positions
from engine.config import ModelConfig, OptimizerConfig, TrainConfig

RANKS, ROWS, PROMPT, RESPONSE = 2, 8, 32, 32
SHAPE = {"vocab_size": 2048, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6}
OPTIONS = OptimizerConfig(lr=1e-4)
Step = Callable[[Batch], float]  # rows of this rank -> norm of the gradient of all ranks


def rows(step: int, rank: int) -> Batch:
    """This rank's rows of one step."""
    generator = torch.Generator().manual_seed(step * RANKS + rank)
    ids = torch.randint(SHAPE["vocab_size"], (ROWS, PROMPT + RESPONSE), generator=generator)
    everywhere = torch.ones(ROWS, PROMPT + RESPONSE, dtype=torch.bool)
    return Batch(
        {
            "input_ids": ids,
            "attention_mask": everywhere,
            "prompt_lengths": torch.full((ROWS,), PROMPT),
            "response_lengths": torch.full((ROWS,), RESPONSE),
            "response_mask": everywhere[:, :RESPONSE],
        }
    )


def loss(logits: Tensor, part: Batch):  # type: ignore[no-untyped-def]
    """Mean over the response tokens of both ranks."""
    chosen = logits.gather(1, response_positions(part)[..., None].expand(-1, -1, logits.shape[-1]))
    logprobs = token_logprobs(chosen, response_ids(part), temperature=1.0)
    return sft_loss(logprobs, part.response_mask, normalizer=float(RANKS * ROWS * RESPONSE))


def ours(source: Path, rank: int, **train: object) -> Step:
    """A trainer of one of our backends."""
    trainer = build_trainer(
        TrainerSpec(
            head="lm",
            model=ModelConfig(source=str(source)),
            source=source,
            train=TrainConfig.model_validate(train),
            optimizer=OPTIONS,
            total_steps=1000,
            seed=0,
            rank=rank,
            world_size=RANKS,
            device=torch.device("cpu"),
        )
    )
    return lambda part: trainer.step([part], loss)["train/grad_norm"]


def distributed_data_parallel(source: Path) -> Step:
    """The same step by torch's own means."""
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIONS.lr, weight_decay=0.0, fused=True)

    def step(part: Batch) -> float:
        logits = wrapped(input_ids=part.input_ids, attention_mask=part.attention_mask, use_cache=False).logits
        (loss(logits, part).loss * RANKS).backward()  # it averages over ranks
        norm = nn.utils.clip_grad_norm_(model.parameters(), OPTIONS.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    return step


def measure(rank: int, source: Path, steps: int) -> None:
    """Take every step once by each way; rank 0 prints medians and the largest difference of the norms."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{source}.rendezvous", rank=rank, world_size=RANKS)
    ways: dict[str, Step] = {
        "DistributedDataParallel": distributed_data_parallel(source),
        "torch": ours(source, rank, backend="torch"),
        "fsdp": ours(source, rank, backend="fsdp"),
        "deepspeed, ZeRO 2": ours(source, rank, backend="deepspeed", zero_stage=2),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    norms: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(steps + 1):
        part = rows(number, rank)
        for name, step in ways.items():
            dist.barrier()
            start = time.perf_counter()
            norms[name].append(step(part))
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        report(seconds, norms)
    dist.destroy_process_group()


def report(seconds: dict[str, list[float]], norms: dict[str, list[float]]) -> None:
    """A Markdown table; the first step of each way warms up and is left out of the times."""
    wanted = norms["DistributedDataParallel"]
    print("| way | median s a step | largest relative difference of the gradient norm |\n|---|---|---|")
    for name, times in seconds.items():
        gap = max(abs(found - norm) / norm for found, norm in zip(norms[name], wanted, strict=True))
        print(f"| {name} | {statistics.median(times[1:]):.3f} | {gap:.1e} |")


def main() -> None:
    """Run both ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "model"
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE, **HEADS)).save_pretrained(source)
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=measure, args=(rank, source, arguments.steps)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed")


if __name__ == "__main__":
    main()
