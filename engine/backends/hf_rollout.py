"""Rollout with transformers alone: small, readable and slow; vLLM is compared with it, and it replaces vLLM."""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from engine.backends.base import Completion, Finished, RolloutEngine, RolloutSpec, unheard
from engine.backends.device import attention_kernel, parameter_dtype, pick_device
from engine.backends.modelling import expected_shapes, load_config
from engine.backends.serving import check_lengths, check_request, check_served, completion, end_token_ids
from engine.backends.weights import check_tensors

STOP, LENGTH = 0, 1


class HFRollout(RolloutEngine):
    """A transformers model in evaluation mode; at most spec.max_batch samples are computed at a time."""

    def __init__(self, spec: RolloutSpec) -> None:
        self._spec = spec
        self._device = pick_device()
        self._ends = set(end_token_ids(spec.source))
        self._tokenizer = AutoTokenizer.from_pretrained(spec.source) if spec.stop else None
        self._shapes = expected_shapes(spec.source, "lm")
        self._version: int | None = None
        config = load_config(spec.source)
        check_lengths(spec, config)
        dtype = parameter_dtype(spec.dtype, self._device)
        with torch.random.fork_rng():
            kernel = attention_kernel(self._device, dtype)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=kernel)
        self._model = model.to(self._device).eval()

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Serve these weights from now on; no prefix outlives a call. StoreError if they are not those of the model."""
        self._version = None
        weights = dict(tensors)
        check_tensors(weights, self._shapes, f"weights of version {version}")
        served = self._model.state_dict()
        for name, tensor in weights.items():
            served[name].copy_(tensor)
        self._version = version

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        temperature: float,
        max_tokens: int,
        finished: Finished = unheard,
    ) -> list[Completion]:
        """One response per prompt, in order; temperature, top-k and top-p in vLLM's order, greedy as there.

        The draws of a sample come from its own seed alone; its logits may differ in the last bits with its neighbours.
        """
        check_served(self._version)
        check_request(self._spec, self._model.config.vocab_size, prompts, seeds, max_tokens)
        responses: list[Completion] = []
        for start in range(0, len(prompts), self._spec.max_batch):
            part, heard = slice(start, start + self._spec.max_batch), partial(_from, start, finished)
            responses += self._respond(prompts[part], seeds[part], temperature, max_tokens, heard)
        return responses

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability (temperature 1, no cut) of every token but the first."""
        check_served(self._version)
        scores = []
        for sequence in sequences:
            ids = torch.tensor([list(sequence)], device=self._device)
            logprobs = self._model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
            scores.append(logprobs.gather(-1, ids[:, 1:, None])[0, :, 0].tolist())
        return scores

    def close(self) -> None:
        """Release the model."""
        self._version = None
        del self._model

    def _respond(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        temperature: float,
        max_tokens: int,
        finished: Finished,
    ) -> list[Completion]:
        version = check_served(self._version)
        draws = torch.stack([_uniform(seed, max_tokens) for seed in seeds])
        ids: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        responses: dict[int, Completion] = {}

        def finish(row: int, reason: int) -> None:
            responses[row] = completion(ids[row], logprobs[row], reason, version)
            finished(row, responses[row])

        running = list(range(len(prompts)))
        inputs, mask = _left_padded(prompts)
        cache = DynamicCache(config=self._model.config)
        for step in range(max_tokens):
            candidates = self._next_logprobs(inputs, mask, cache, temperature)
            chosen = _choose(candidates, draws[running, step], greedy=temperature == 0)
            values = candidates.gather(-1, chosen[:, None])[:, 0].tolist()
            for row, token, value in zip(running, chosen.tolist(), values, strict=True):
                ids[row].append(token)
                logprobs[row].append(value)
                if self._ended(ids[row]):
                    finish(row, STOP)
            places = [place for place, row in enumerate(running) if row not in responses]
            if not places:
                break
            kept = torch.tensor(places)
            running = [running[place] for place in places]
            cache.batch_select_indices(kept.to(self._device))
            inputs = chosen[kept, None]
            mask = torch.nn.functional.pad(mask[kept], (0, 1), value=True)
        for row in running:
            if row not in responses:
                finish(row, LENGTH)
        return [responses[row] for row in range(len(prompts))]

    def _next_logprobs(self, inputs: Tensor, mask: Tensor, cache: DynamicCache, temperature: float) -> Tensor:
        """[b, V] float32 on the CPU: log-probabilities of the next token of each row, as they are sampled from."""
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -inputs.shape[1] :]
        output = self._model(
            input_ids=inputs.to(self._device),
            attention_mask=mask.to(self._device),
            position_ids=positions.to(self._device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = output.logits[:, -1].float().cpu()
        if temperature > 0:
            logits = _cut(logits / temperature, self._spec.top_k, self._spec.top_p)
        return logits.log_softmax(-1)

    def _ended(self, tokens: list[int]) -> bool:
        if tokens[-1] in self._ends:
            return True
        if self._tokenizer is None:
            return False
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return any(stop in text for stop in self._spec.stop)


def _from(start: int, finished: Finished, row: int, response: Completion) -> None:
    """Tell of a response of the part of a call that begins at `start`."""
    finished(start + row, response)


def _uniform(seed: int, size: int) -> Tensor:
    """[size] float64 in [0, 1): the draws of one sample; a longer response continues a shorter one."""
    return torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids [b, P] int64 and mask [b, P] bool with all prompts ending in the last column."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return ids, torch.arange(width) >= width - lengths[:, None]


def _cut(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits [b, V] with everything outside the k likeliest tokens, then outside the nucleus of mass p, at -inf."""
    if 0 < top_k < logits.shape[-1]:
        lowest = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    if top_p < 1:
        ascending, order = logits.sort(-1)
        outside = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        outside[:, -1] = False
        logits = logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
    return logits


def _choose(logprobs: Tensor, draws: Tensor, *, greedy: bool) -> Tensor:
    """[b] int64: the likeliest token, or the one whose share of the cumulated probability the draw falls into."""
    if greedy:
        return logprobs.argmax(-1)
    cumulated = logprobs.double().exp().cumsum(-1)
    reached = torch.searchsorted(cumulated, draws[:, None] * cumulated[:, -1:], right=True)
    return reached[:, 0].clamp(max=logprobs.shape[-1] - 1)
