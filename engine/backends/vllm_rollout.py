"""Rollout with vLLM, in this process; the only place that imports vLLM, because its settings must be there before."""

import gc
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor

from engine.backends import transfer_broadcast, transfer_ipc
from engine.backends.base import Completion, Finished, RolloutEngine, RolloutSpec, unheard
from engine.backends.device import free_gpu_bytes, gpu_indices, has_gpu
from engine.backends.modelling import expected_shapes, load_config
from engine.backends.serving import check_lengths, check_request, check_served, completion, end_token_ids
from engine.backends.transfer import Recorder, require_finite
from engine.backends.weights import check_tensors, is_finite
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
TRANSFERS: dict[str, dict[str, str] | None] = {
    "file": None,
    "ipc": {"backend": transfer_ipc.BACKEND},
    "broadcast": {"backend": transfer_broadcast.BACKEND},
}
FINISH_REASONS = {"stop": 0, "length": 1}


class VLLMRollout(RolloutEngine):
    """A vLLM engine on this rank, built with dummy weights: it serves nothing before `wake` and `load_weights`."""

    def __init__(self, spec: RolloutSpec) -> None:
        self._spec = spec
        config = load_config(spec.source)
        check_lengths(spec, config)
        self._vocab_size = config.vocab_size
        self._shapes = expected_shapes(spec.source, "lm")
        self._ends = list(end_token_ids(spec.source))
        self._version: int | None = None
        self._given_back: int | None = None  # bytes, while the engine sleeps
        self._llm = _build(spec, config.architectures)
        with ExitStack() as undo:
            undo.callback(self.close)  # vLLM's own clean-up would destroy every process group
            self._try_out()
            self.sleep()
            undo.pop_all()

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
        self._serve(version)

    def join_senders(self, init: Mapping[str, Any]) -> None:
        """Tell vLLM's transfer engine where the weights come from; a broadcast waits here for the sender."""
        self._llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": dict(init)})

    def load_sent(self, update: Mapping[str, Any], *, version: int) -> list[dict[str, int]]:
        """Load what vLLM's transfer engine is sent, with the checks of `load_weights`; nothing is served if one fails."""
        self._version = None
        announced = zip(update["names"], update["shapes"], strict=True)
        shapes = {name: torch.empty(shape, device="meta") for name, shape in announced}
        check_tensors(shapes, self._shapes, f"weights of version {version}")
        self._llm.collective_rpc("start_weight_update")
        arrived = self._llm.collective_rpc(_receive, args=(dict(update),))
        self._llm.collective_rpc("finish_weight_update")
        require_finite([name for _, names in arrived for name in names], version)
        self._serve(version)
        return [checksums for checksums, _ in arrived]

    def _serve(self, version: int) -> None:
        self._llm.collective_rpc(_pack_output_layer)
        if not self._llm.reset_prefix_cache():
            raise TransientError(
                f"vLLM did not reset its prefix cache for version {version}; old keys and values would be served.",
                remedy="Finish or abort running requests before a sync.",
            )
        self._version = version

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        temperature: float,
        max_tokens: int,
        finished: Finished = unheard,
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
        responses: dict[int, Completion] = {}

        def finish(row: int, output: Any) -> None:
            responses[row] = _as_completion(output.outputs[0], version)
            finished(row, responses[row])

        self._run(prompts, [SamplingParams(seed=seed, **settings) for seed in seeds], finish)
        return [responses[row] for row in range(len(prompts))]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability (temperature 1, no cut) of every token but the first; reads no cached prefix."""
        check_served(self._version)
        limit = _context(self._spec) - 1
        for number, sequence in enumerate(sequences):
            if not 2 <= len(sequence) <= limit:
                raise ShapeError(f"sequence {number} has {len(sequence)} tokens; 2 to {limit} can be scored.")
        once = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        scores: dict[int, list[float]] = {}

        def finish(row: int, output: Any) -> None:
            scores[row] = list(output.prompt_logprobs.logprobs)

        self._run(sequences, [once] * len(sequences), finish)
        return [scores[row] for row in range(len(sequences))]

    def sleep(self) -> bool:
        """Give weights and cache of a shared GPU back; the next sync brings the weights again."""
        if not self._spec.shares_gpu or self._given_back is not None:
            return False
        self._version = None
        free = free_gpu_bytes()
        self._llm.sleep(level=2)  # forgets the weights: they are outdated once the trainers are done
        self._given_back = free_gpu_bytes() - free
        return True

    def wake(self) -> None:
        """Take the memory again; weights and cache hold nothing until `load_weights`."""
        if self._given_back is None:
            return
        if (free := free_gpu_bytes()) < self._given_back:
            remedy = (
                f"the engine gave {self._given_back / GIB:.1f} GiB back while it slept and finds {free / GIB:.1f} GiB "
                "free; lower it, or train.micro_batch_tokens, or give rollout a pool of its own (placement.mode: split)"
            )
            problem = Problem("rollout.gpu_memory_utilization", self._spec.gpu_memory_utilization, remedy)
            raise ConfigError("The rollout engine cannot wake: the trainers hold its memory.", problems=[problem])
        self._llm.wake_up()
        self._given_back = None

    def close(self) -> None:
        """Release the memory of weights and cache; the process group stays, a trainer of this process may share it."""
        self._version = None
        client = self._llm.llm_engine.engine_core
        client._finalizer.detach()  # vLLM's own shutdown destroys every process group
        client.engine_core.model_executor.shutdown()
        del self._llm
        gc.unfreeze()  # vLLM froze what was there when it started
        gc.collect()

    def _try_out(self) -> None:
        """Compute one token: a model that the engine builds but cannot run is found before anything is trained."""
        once = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        self._run([[0, 0]], [once], lambda row, output: None)

    def _run(
        self, prompts: Sequence[Sequence[int]], params: list[SamplingParams], finish: Callable[[int, Any], None]
    ) -> None:
        """Carry out all requests as LLM.generate does, which tells of none before the last; finish: number, output."""
        if not prompts:
            return
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        with _process_state_kept(), _no_compilation():
            identifiers = self._llm.enqueue(requests, params, use_tqdm=False)
            # What comes back is named without the characters that vLLM has added to make a number unique.
            rows = {identifier.partition("-")[0]: row for row, identifier in enumerate(identifiers)}
            while self._llm.llm_engine.has_unfinished_requests():
                for output in self._llm.llm_engine.step():
                    finish(rows.pop(output.request_id), output)


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
        with _process_state_kept(), _no_compilation(), _proxies_hidden():
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
    if has_gpu():
        return {
            "gpu_memory_utilization": spec.gpu_memory_utilization,
            "tensor_parallel_size": spec.tensor_parallel,
            "enable_sleep_mode": spec.shares_gpu,
            "weight_transfer_config": TRANSFERS[spec.transport],
        }
    if spec.tensor_parallel > 1:
        remedy = "tensor parallel rollout needs GPUs; use 1 on CPU"
        problem = Problem("rollout.tensor_parallel", spec.tensor_parallel, remedy)
        raise ConfigError("The engine cannot be split over CPU processes.", problems=[problem])
    return {"enforce_eager": True, "kv_cache_memory_bytes": spec.kv_cache_gib * GIB, "block_size": SHARED_BLOCK}


def _check_finite(weights: dict[str, Tensor], version: int) -> None:
    """NaN would outlive these weights: vLLM's attention also multiplies what earlier samples left in a cache block."""
    for name, tensor in weights.items():
        if not is_finite(tensor):
            raise DivergedError(f"{name} of version {version} holds values that are not finite; it was not served.")


def _receive(worker: Any, update: dict[str, Any]) -> tuple[dict[str, int], list[str]]:
    """Run by each of vLLM's workers: checksums of what it was sent, and the names of what is not finite."""
    engine = worker.weight_transfer_engine
    recorder = Recorder(engine.model)
    engine.set_weight_update_target(recorder, engine.model_config)
    try:
        worker.update_weights(update)
    finally:
        engine.reset_weight_update_target()
    return recorder.checksums, recorder.not_finite


def _pack_output_layer(worker: Any) -> None:
    """A tied output layer is given no weights of its own, so vLLM's reload keeps what it packed from the old ones."""
    for layer in worker.get_model().modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def _inspect_here(architecture: str) -> None:
    """Have vLLM look at the model class in this process; by default it starts another one, which takes seconds."""
    if architecture in ModelRegistry.models and not has_gpu():
        ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def _no_compilation() -> AbstractContextManager[Any]:
    """On CPU, run the sampler's small compiled functions eagerly: building them takes longer than they ever save."""
    return nullcontext() if has_gpu() else torch.compiler.set_stance("force_eager")


@contextmanager
def _process_state_kept() -> Iterator[None]:
    """vLLM seeds and draws from the global generators and, on CPU, disables torch.set_num_threads: undo both."""
    set_num_threads, python_state, numpy_state = torch.set_num_threads, random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=gpu_indices()):
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)


@contextmanager
def _proxies_hidden() -> Iterator[None]:
    """vLLM looks at every value of every imported module; those that stand for a flask request cannot be looked at."""
    local = sys.modules.get("werkzeug.local")
    hidden = {
        name: module
        for name, module in list(sys.modules.items())
        if local is not None
        and isinstance(module, ModuleType)
        and any(type(value) is local.LocalProxy for value in list(vars(module).values()))
    }
    for name in hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(hidden)


def _check_temperature(temperature: float) -> None:
    lowest, highest = TEMPERATURES
    if temperature != 0 and not lowest <= temperature <= highest:
        problem = Problem("rollout.temperature", temperature, f"vLLM samples at {lowest} to {highest}")
        raise ConfigError("The temperature cannot be served.", problems=[problem])


def _as_completion(output: Any, version: int) -> Completion:
    if output.finish_reason not in FINISH_REASONS:
        raise TransientError(f"vLLM ended a response with {output.finish_reason!r} instead of stop or length.")
    return completion(output.token_ids, output.logprobs.logprobs, FINISH_REASONS[output.finish_reason], version)
