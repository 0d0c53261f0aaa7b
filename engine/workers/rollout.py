"""Rollout: the generation engine; turns prompts into responses with the weights it was last given."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.backends import transfer_ipc
from engine.backends.base import Completion, RolloutSpec
from engine.backends.device import has_gpu, pick_device
from engine.backends.engines import build_engine
from engine.backends.transfer import Manifest
from engine.backends.transfer_broadcast import Endpoint, first_rank
from engine.backends.transfer_ipc import Exported
from engine.backends.weight_sync import WeightHandle, is_here, landed, receive
from engine.batch import Batch
from engine.controller.dispatch import DP, ONE_TO_ALL, ONE_TO_FIRST, dispatch
from engine.controller.layout import shares_pool, transport
from engine.controller.worker import Worker, WorkerContext
from engine.data.templating import load_tokenizer
from engine.seeds import derive


class RolloutWorker(Worker):
    """One generation engine; every rank holds all weights and answers its share of the prompts."""

    shows_rows = True

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        config = context.config
        rollout = config.rollout
        longest = [suite.max_response_tokens or 0 for suite in config.evaluation.suites]
        spec = RolloutSpec(
            source=context.source,
            dtype=config.model.dtype,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_response_tokens=max(rollout.max_response_tokens, *longest),
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=rollout.stop,
            kv_cache_gib=rollout.kv_cache_gib,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            max_batched_tokens=rollout.max_batched_tokens,
            tensor_parallel=rollout.tensor_parallel,
            max_batch=-(-config.samples_per_iteration // context.world_size),
            shares_gpu=has_gpu() and shares_pool(config, "rollout"),
            transport=transport(config, trainer=pick_device().type, engine=pick_device().type),
        )
        self._tokenizer = load_tokenizer(str(context.source), config.model.chat_template)
        self._engine = build_engine(spec, rollout.backend)
        self._version = -1

    @dispatch(ONE_TO_FIRST)
    def sleep(self) -> bool:
        """Give the memory of a GPU shared with trainers back; True if the engine has to be given weights again."""
        return self._engine.sleep()

    @dispatch(ONE_TO_ALL)
    def wake(self) -> None:
        """Take it again, before weights are received."""
        self._engine.wake()

    @dispatch(ONE_TO_ALL)
    def receive(self, handle: WeightHandle) -> None:
        """Serve the weights behind the handle and forget cached prefixes."""
        self._engine.load_weights(receive(handle), version=handle.version)
        self._version = handle.version

    @dispatch(ONE_TO_ALL)
    def sees(self, handle: WeightHandle) -> bool:
        """Whether the weights behind the handle can be read on this rank's host."""
        return is_here(handle)

    @dispatch(ONE_TO_ALL)
    def receive_carried(self, handle: WeightHandle, content: Any, folder: str) -> None:
        """As `receive`, of weights published on another host; content: what PolicyWorker.carry gave."""
        with landed(handle, content, Path(folder)) as own:
            self.receive(own)

    @dispatch(ONE_TO_ALL)
    def join_mapping(self) -> None:
        """Get ready for weights in memory of this rank's GPU."""
        self._engine.join_senders(transfer_ipc.INIT)

    @dispatch(ONE_TO_ALL)
    def receive_mapped(self, exported: Exported) -> list[dict[str, int]]:
        """Serve the weights that a trainer's process holds on this rank's GPU; checksums of what arrived."""
        arrived = self._engine.load_sent(exported.update_info(), version=exported.manifest.version)
        self._version = exported.manifest.version
        return arrived

    @dispatch(ONE_TO_ALL)
    def join_broadcast(self, endpoint: Endpoint) -> None:
        """Enter the group of the sender and all engines; waits for all of them."""
        first = first_rank(self.context.rank, self.context.config.rollout.tensor_parallel)
        self._engine.join_senders(endpoint.init_info(first))

    @dispatch(ONE_TO_ALL)
    def receive_broadcast(self, manifest: Manifest) -> list[dict[str, int]]:
        """Serve the weights that are being broadcast; checksums of what arrived on each of the engine's devices."""
        arrived = self._engine.load_sent(manifest.update_info(), version=manifest.version)
        self._version = manifest.version
        return arrived

    @dispatch(ONE_TO_ALL)
    def probe(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probability (temperature 1) of every token but the first of each sequence, as the engine sees it."""
        return self._engine.score(sequences)

    @dispatch(DP)
    def generate(self, prompts: Batch) -> Batch:
        """One response per row at the training temperature: the prompts' batch with the response fields added.

        A response depends only on the weights, the prompt and (prompt_seeds, sample_ids), not on ranks or batch order.
        """
        return self._respond(
            prompts, self.context.config.rollout.temperature, self.context.config.rollout.max_response_tokens
        )

    @dispatch(DP)
    def generate_greedy(self, prompts: Batch, max_response_tokens: int) -> Batch:
        """One greedy response per row, for evaluation and for greedy baselines."""
        return self._respond(prompts, 0.0, max_response_tokens)

    def close(self) -> None:
        """Release the engine."""
        self._engine.close()

    def _respond(self, prompts: Batch, temperature: float, max_tokens: int) -> Batch:
        lengths = prompts.prompt_lengths.tolist()
        ids = [row[:length].tolist() for row, length in zip(prompts.input_ids, lengths, strict=True)]
        seeds = [
            derive("sample", seed, sample)
            for seed, sample in zip(prompts.prompt_seeds.tolist(), prompts.sample_ids.tolist(), strict=True)
        ]
        responses: dict[int, tuple[Completion, str]] = {}

        def answered(rows: Sequence[int]) -> Batch:
            asked, both = prompts.index(rows), [responses[row] for row in rows]
            kept = {name: asked.fields[name] for name in ("prompt_lengths", "group_ids", "sample_ids", "prompt_seeds")}
            made = _response_fields([ids[row] for row in rows], [one for one, _ in both], self._version)
            return Batch({**kept, **made}, {**asked.columns, "response": [text for _, text in both]})

        def finished(row: int, one: Completion) -> None:
            responses[row] = (one, self._tokenizer.decode(list(one.token_ids), skip_special_tokens=True))
            self.show_row(row, answered)

        self._engine.generate(ids, seeds, temperature=temperature, max_tokens=max_tokens, finished=finished)
        return answered(range(len(prompts)))


def _response_fields(prompts: Sequence[list[int]], completions: Sequence[Completion], version: int) -> dict[str, Any]:
    rows = len(prompts)
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
    response_lengths = torch.tensor([len(one.token_ids) for one in completions], dtype=torch.int64)
    lengths = prompt_lengths + response_lengths
    width, responses = (int(lengths.max()), int(response_lengths.max())) if rows else (0, 0)
    input_ids = torch.zeros(rows, width, dtype=torch.int64)
    logprobs = torch.zeros(rows, responses)
    for row, (prompt, one) in enumerate(zip(prompts, completions, strict=True)):
        input_ids[row, : int(lengths[row])] = torch.tensor([*prompt, *one.token_ids])
        logprobs[row, : len(one.logprobs)] = torch.tensor(one.logprobs)
    return {
        "input_ids": input_ids,
        "attention_mask": torch.arange(width) < lengths[:, None],
        "response_lengths": response_lengths,
        "response_mask": torch.arange(responses) < response_lengths[:, None],
        "rollout_logprobs": logprobs,
        "finish_reason": torch.tensor([one.finish_reason for one in completions], dtype=torch.int8),
        "policy_version": torch.full((rows,), version, dtype=torch.int64),
    }
