"""Rollout with vLLM, in this process; the only place that imports vLLM, because its settings must be there before."""

import gc
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy
import torch
from torch import Tensor

from engine.backends.base import Completion, RolloutEngine, RolloutSpec
from engine.backends.modelling import expected_shapes, load_config
from engine.backends.serving import check_lengths, check_request, check_served, completion, end_token_ids
from engine.backends.weights import check_tensors
from engine.errors import ConfigError, DivergedError, Problem, ShapeError, TransientError

# A worker process of its own would reserve a core and pickle every weight.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"  # split by load, sums would depend on the neighbours of a sample
os.environ.setdefault("VLLM_PLUGINS", "")
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, ModelRegistry, SamplingParams
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

GIB = 1 << 30
SHORTEST_CONTEXT = 16  # tokens; room for the weight probe whatever the run's own lengths
ROOMY_STEP = 8192  # prompt tokens of one scheduler step
MOST_CONCURRENT = 1024  # samples; beyond it buffers grow and throughput does not
TEMPERATURES = (0.01, 2.0)  # vLLM silently raises what is below and refuses what is above
SHARED_BLOCK = 32  # tokens of a cached prefix; the default of 128 is longer than most prompts that a group shares
FINISH_REASONS = {"stop": 0, "length": 1}


class VLLMRollout(RolloutEngine):
    """A vLLM engine on this rank, built with dummy weights: it serves nothing before the first load_weights."""

    def __init__(self, spec: RolloutSpec) -> None:
        self._spec = spec
        config = load_config(spec.source)
        check_lengths(spec, config)
        self._vocab_size = config.vocab_size
        self._shapes = expected_shapes(spec.source, "lm")
        self._ends = list(end_token_ids(spec.source))
        self._version: int | None = None
        self._llm = _build(spec, config.architectures)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Serve these weights from now on.

        vLLM repacks weights after loading, so they go through its reload path. Its prefix cache is keyed by prompt,
        not by weights: TransientError if it was not reset. StoreError if names or shapes are not those of the model,
        DivergedError if a weight is not finite.
        """
        self._version = None
        weights = dict(tensors)
        check_tensors(weights, self._shapes, f"weights of version {version}")  # vLLM would be left half loaded
        _check_finite(weights, version)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(weights.items())})
        self._llm.collective_rpc(_pack_output_layer)
        if not self._llm.reset_prefix_cache():
            raise TransientError(
                f"vLLM did not reset its prefix cache for version {version}; old keys and values would be served.",
                remedy="Finish or abort running requests before a sync.",
            )
        self._version = version

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, temperature: float, max_tokens: int
    ) -> list[Completion]:
        """One response per prompt, in order, each with its own seed in [0, 2**63).

        Log-probabilities are those of the distribution sampled from, after temperature, top-k and top-p. At
        temperature 0 they are the model's own (temperature 1, no cut): a greedy choice has no distribution.
        """
        version = check_served(self._version)
        check_request(self._spec, self._vocab_size, prompts, seeds, max_tokens)
        _check_temperature(temperature)
        greedy = temperature == 0
        settings = {
            "temperature": temperature,
            "top_p": 1.0 if greedy else self._spec.top_p,
            "top_k": 0 if greedy else self._spec.top_k,
            "max_tokens": max_tokens,
            "logprobs": 0,  # of the sampled token alone
            "flat_logprobs": True,
            "stop": list(self._spec.stop),
            "stop_token_ids": self._ends,
            "ignore_eos": True,  # the end tokens are given above, whether or not vLLM has a tokenizer
            "detokenize": bool(self._spec.stop),
            "skip_clone": True,
        }
        outputs = self._run(prompts, [SamplingParams(seed=seed, **settings) for seed in seeds])
        return [_as_completion(output.outputs[0], version) for output in outputs]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability (temperature 1, no cut) of every token but the first; reads no cached prefix."""
        check_served(self._version)
        limit = _context(self._spec) - 1
        for number, sequence in enumerate(sequences):
            if not 2 <= len(sequence) <= limit:
                raise ShapeError(f"sequence {number} has {len(sequence)} tokens; 2 to {limit} can be scored.")
        once = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        outputs = self._run(sequences, [once] * len(sequences))
        return [list(output.prompt_logprobs.logprobs) for output in outputs]

    def close(self) -> None:
        """Release the memory of weights and cache; the process group stays, a trainer of this process may share it."""
        self._version = None
        client = self._llm.llm_engine.engine_core
        client._finalizer.detach()  # vLLM's own shutdown destroys every process group
        client.engine_core.model_executor.shutdown()
        del self._llm
        gc.unfreeze()  # vLLM froze what was there when it started
        gc.collect()

    def _run(self, prompts: Sequence[Sequence[int]], params: list[SamplingParams]) -> list[Any]:
        if not prompts:
            return []
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        with _process_state_kept(), _no_compilation():
            return self._llm.generate(requests, params, use_tqdm=False)


def _context(spec: RolloutSpec) -> int:
    return max(spec.max_prompt_tokens + spec.max_response_tokens, SHORTEST_CONTEXT)


def _build(spec: RolloutSpec, architectures: list[str] | None) -> LLM:
    step = spec.max_batched_tokens or max(ROOMY_STEP, _context(spec))
    if step < _context(spec):
        remedy = f"a step must hold the longest sample, {_context(spec)} tokens; without the key it does"
        problem = Problem("rollout.max_batched_tokens", step, remedy)
        raise ConfigError("The scheduler step is too small.", problems=[problem])
    for architecture in architectures or ():  # without any, vLLM says what is wrong
        _inspect_here(architecture)
    try:
        with _process_state_kept(), _no_compilation():
            return LLM(
                model=str(spec.source),
                load_format="dummy",
                dtype=spec.dtype,
                skip_tokenizer_init=not spec.stop,
                max_model_len=_context(spec),
                max_num_batched_tokens=step,
                max_num_seqs=min(spec.max_batch, MOST_CONCURRENT, step),
                enable_chunked_prefill=False,  # a split prompt would draw from its sample's seed twice
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                **_device_settings(spec),
            )
    except ValueError as error:  # also pydantic's
        raise ConfigError(f"vLLM refuses the rollout settings: {error}") from error


def _device_settings(spec: RolloutSpec) -> dict[str, Any]:
    if torch.cuda.is_available():
        return {"gpu_memory_utilization": spec.gpu_memory_utilization, "tensor_parallel_size": spec.tensor_parallel}
    if spec.tensor_parallel > 1:
        remedy = "tensor parallel rollout needs GPUs; use 1 on CPU"
        problem = Problem("rollout.tensor_parallel", spec.tensor_parallel, remedy)
        raise ConfigError("The engine cannot be split over CPU processes.", problems=[problem])
    return {"enforce_eager": True, "kv_cache_memory_bytes": spec.kv_cache_gib * GIB, "block_size": SHARED_BLOCK}


def _check_finite(weights: dict[str, Tensor], version: int) -> None:
    """NaN would outlive these weights: vLLM's attention also multiplies what earlier samples left in a cache block."""
    for name, tensor in weights.items():
        if not bool(torch.isfinite(tensor).all()):
            raise DivergedError(f"{name} of version {version} holds values that are not finite; it was not served.")


def _pack_output_layer(worker: Any) -> None:
    """A tied output layer is given no weights of its own, so vLLM's reload keeps what it packed from the old ones."""
    for layer in worker.get_model().modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def _inspect_here(architecture: str) -> None:
    """Have vLLM look at the model class in this process; by default it starts another one, which takes seconds."""
    if architecture in ModelRegistry.models and not torch.cuda.is_available():
        ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def _no_compilation() -> AbstractContextManager[Any]:
    """On CPU, run the sampler's small compiled functions eagerly: building them takes longer than they ever save."""
    return nullcontext() if torch.cuda.is_available() else torch.compiler.set_stance("force_eager")


@contextmanager
def _process_state_kept() -> Iterator[None]:
    """vLLM seeds and draws from the global generators and, on CPU, disables torch.set_num_threads: undo both."""
    set_num_threads, python_state, numpy_state = torch.set_num_threads, random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)


def _check_temperature(temperature: float) -> None:
    lowest, highest = TEMPERATURES
    if temperature != 0 and not lowest <= temperature <= highest:
        problem = Problem("rollout.temperature", temperature, f"vLLM samples at {lowest} to {highest}")
        raise ConfigError("The temperature cannot be served.", problems=[problem])


def _as_completion(output: Any, version: int) -> Completion:
    if output.finish_reason not in FINISH_REASONS:
        raise TransientError(f"vLLM ended a response with {output.finish_reason!r} instead of stop or length.")
    return completion(output.token_ids, output.logprobs.logprobs, FINISH_REASONS[output.finish_reason], version)
