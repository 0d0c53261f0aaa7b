"""Memory of every role on one device, in bytes, from shapes alone: no weights are loaded and no torch is needed.

N parameters, w bytes per number of model.dtype (2 or 4), R ranks, T tokens of the longest sample, t tokens of the largest
micro-batch. What libraries take besides (allocator, contexts) is counted in engine/capacity.py.
"""

from dataclasses import dataclass

from engine.architecture import Architecture
from engine.config import RunConfig, TrainConfig

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}
BUCKET = 50_000_000  # elements in one collective of the training backends
SLICE = 2**25  # elements of the float32 slice in which log-probabilities are taken
ROOMY_STEP, MOST_CONCURRENT = 8192, 1024  # prompt tokens and samples of one step of the vLLM engine
LEARNS = {"policy": "lm", "critic": "value", "cost_critic": "value"}  # trained role -> its head


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of one rank of a role on each of its devices; what a role does not have is 0."""

    parameters: int  # of the whole model, not bytes
    weights: int = 0
    gradients: int = 0
    optimiser: int = 0
    buffers: int = 0  # of collectives, and layers put together from their shards
    kv_cache: int = 0
    activations: int = 0  # only while the role works

    @property
    def held(self) -> int:
        """What stays between two calls."""
        return self.weights + self.gradients + self.optimiser + self.buffers + self.kv_cache

    @property
    def total(self) -> int:
        """What is needed while the role works."""
        return self.held + self.activations


def roles_of(config: RunConfig) -> list[str]:
    """Roles of a run that hold a model."""
    roles = ["policy", *config.algorithm.critics]
    roles += ["reference"] if config.needs_reference else []
    return [*roles, "rollout"]


def role_memory(config: RunConfig, shapes: Architecture, role: str, gpu_bytes: int | None) -> RoleMemory:
    """The memory of one role. gpu_bytes: memory of one GPU, None on CPUs."""
    if role == "rollout":
        return engine_memory(config, shapes, gpu_bytes)
    if role == "reference":
        return frozen_memory(config, shapes)
    return trained_memory(config, shapes, LEARNS[role])


def trained_memory(config: RunConfig, shapes: Architecture, head: str) -> RoleMemory:
    """A role that learns.

    weights      w N, divided by R with ZeRO 3
    gradients    4 N, added up in float32 whatever the dtype; divided by R with ZeRO 2 and 3
    optimiser    8 N (two moments) + 4 N (float32 master, unless dtype is float32 and nothing is sharded); divided by R
                 with ZeRO 1, 2 and 3
    buffers      two float32 buckets for collectives; with ZeRO 3 also w (one layer + one embedding) put together
    activations  see `learning_bytes`
    """
    train, ranks, width = config.train, config.placement.ranks, BYTES[config.model.dtype]
    count = shapes.value_parameters if head == "value" else shapes.parameters
    spread = _spread(train, ranks)
    master = 4 if width < 4 or train.zero_stage > 0 else 0
    return RoleMemory(
        parameters=count,
        weights=_share(width * count, spread.weights),
        gradients=_share(4 * count, spread.gradients),
        optimiser=_share((8 + master) * count, spread.optimiser),
        buffers=_buffers(config, shapes, count),
        activations=max(learning_bytes(config, shapes, head), scoring_bytes(config, shapes, head)),
    )


def frozen_memory(config: RunConfig, shapes: Architecture) -> RoleMemory:
    """A reference policy: weights w N, divided by R with ZeRO 3; activations see `scoring_bytes`."""
    count = shapes.parameters
    spread = _spread(config.train, config.placement.ranks)
    return RoleMemory(
        parameters=count,
        weights=_share(BYTES[config.model.dtype] * count, spread.weights),
        buffers=_buffers(config, shapes, count) if spread.weights > 1 else 0,
        activations=scoring_bytes(config, shapes, "lm"),
    )


def layer_bytes(config: RunConfig, shapes: Architecture) -> int:
    """Bytes per token that one decoder layer keeps for its backward pass, with an attention that keeps no T x T matrix.

    Per norm 4 h + 4 + 2 w h; per norm of a query or key head, where the type has those, 4 d + 4 + w d; query, key, value
    (repeated for every head) and output 4 w a d, their normaliser 4 a; four tensors of the MLP 4 w f; the mask of the
    padding w T. h hidden, f intermediate, a heads of size d.
    """
    width, hidden, head = BYTES[config.model.dtype], shapes.hidden, shapes.head_dim
    norms = shapes.norms * (4 * hidden + 4 + 2 * width * hidden)
    if shapes.head_norms:
        norms += (shapes.heads + shapes.kv_heads) * (4 * head + 4 + width * head)
    attention = 4 * width * shapes.query_size + 4 * shapes.heads
    return norms + attention + 4 * width * shapes.intermediate + width * longest_sample(config)


def learning_bytes(config: RunConfig, shapes: Architecture, head: str) -> int:
    """Bytes of one forward and backward pass over t tokens with a vocabulary of V.

    Kept: per layer `layer_bytes` t, or w h t with gradient checkpointing. At the end the head: logits, those of the
    responses and their gradient 3 w V t, and three float32 slices; for values 8 h t. Then the layers: gradients in
    flight w (2 h + 2 f) t and, with checkpointing, one layer computed again. Head and layers come one after the other.
    """
    width, tokens = BYTES[config.model.dtype], micro_batch(config)
    layer = layer_bytes(config, shapes) * tokens
    in_flight = width * 2 * (shapes.hidden + shapes.intermediate) * tokens
    if config.train.gradient_checkpointing:
        kept, in_flight = width * shapes.hidden * tokens * shapes.layers, in_flight + layer
    else:
        kept = layer * shapes.layers
    if head == "value":
        return kept + max(8 * shapes.hidden * tokens, in_flight)
    logits = shapes.vocabulary * tokens
    return kept + max(3 * width * logits + 3 * 4 * min(logits, SLICE), in_flight)


def scoring_bytes(config: RunConfig, shapes: Architecture, head: str) -> int:
    """Bytes of a forward pass over t tokens that keeps nothing.

    The larger of one layer, w (4 h + 4 a d + 3 f) t, and the head: logits and those of the responses 2 w V t with two
    float32 slices, or values 8 h t.
    """
    width, tokens = BYTES[config.model.dtype], micro_batch(config)
    layer = width * (4 * shapes.hidden + 4 * shapes.query_size + 3 * shapes.intermediate) * tokens
    if head == "value":
        return max(layer, 8 * shapes.hidden * tokens)
    logits = shapes.vocabulary * tokens
    return max(layer, 2 * width * logits + 2 * 4 * min(logits, SLICE))


def engine_memory(config: RunConfig, shapes: Architecture, gpu_bytes: int | None) -> RoleMemory:
    """A rollout engine, on each of its rollout.tensor_parallel devices.

    weights      w N / tensor_parallel
    activations  one layer over the tokens of a step, w (4 h + 4 a d + 3 f) / tensor_parallel each, and float32 logits and
                 log-probabilities 8 V for every sample that is generated at a time
    kv_cache     vLLM on a GPU: what gpu_memory_utilization of the device leaves; vLLM on a CPU: kv_cache_gib;
                 transformers: `kv_bytes` for every sample of a batch and each of its tokens
    """
    rollout, width, parallel = config.rollout, BYTES[config.model.dtype], config.rollout.tensor_parallel
    batch = -(-config.samples_per_iteration // config.placement.rollout_ranks)
    longest = longest_sample(config)
    if rollout.backend == "hf":
        step, concurrent = batch * config.data.max_prompt_tokens, batch
    else:
        step = rollout.max_batched_tokens or max(ROOMY_STEP, longest)
        concurrent = min(batch, MOST_CONCURRENT, step)
    layer = width * (4 * shapes.hidden + 4 * shapes.query_size + 3 * shapes.intermediate)
    weights = _share(width * shapes.parameters, parallel)
    activations = _share(layer * step, parallel) + 8 * shapes.vocabulary * concurrent
    if rollout.backend == "hf":
        cache = batch * longest * kv_bytes(config, shapes)
    elif gpu_bytes is None:
        cache = rollout.kv_cache_gib * GIB
    else:
        cache = max(int(rollout.gpu_memory_utilization * gpu_bytes) - weights - activations, 0)
    return RoleMemory(shapes.parameters, weights=weights, kv_cache=cache, activations=activations)


def kv_bytes(config: RunConfig, shapes: Architecture) -> int:
    """Bytes of keys and values per token and device: 2 w d per layer and key head, the heads spread over the devices."""
    heads = _share(shapes.kv_heads, config.rollout.tensor_parallel)
    return 2 * BYTES[config.model.dtype] * shapes.layers * heads * shapes.head_dim


def state_bytes(config: RunConfig, shapes: Architecture, role: str) -> int:
    """Bytes of weights and optimiser state of a trained role in a checkpoint: w N + 8 N, + 4 N where dtype is not float32."""
    width = BYTES[config.model.dtype]
    count = shapes.value_parameters if LEARNS[role] == "value" else shapes.parameters
    return (width + 8 + (4 if width < 4 else 0)) * count


def longest_sample(config: RunConfig) -> int:
    """Most tokens of a prompt and its response."""
    suites = [suite.max_response_tokens or 0 for suite in config.evaluation.suites]
    return config.data.max_prompt_tokens + max(config.rollout.max_response_tokens, *suites)


def micro_batch(config: RunConfig) -> int:
    """Most tokens in one forward pass of a rank: train.micro_batch_tokens, or one sample, or all samples of the rank."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    rows = -(-config.samples_per_iteration // config.placement.ranks)
    return min(max(config.train.micro_batch_tokens, longest), rows * longest)


@dataclass(frozen=True)
class _Spread:
    """Over how many ranks each part of a trained role is divided."""

    weights: int
    gradients: int
    optimiser: int


def _spread(train: TrainConfig, ranks: int) -> _Spread:
    stage = train.zero_stage
    return _Spread(*(ranks if stage >= least else 1 for least in (3, 2, 1)))


def _buffers(config: RunConfig, shapes: Architecture, count: int) -> int:
    if config.placement.ranks == 1 and config.train.zero_stage == 0:
        return 0
    buckets = 2 * 4 * min(count, BUCKET)
    if config.train.zero_stage < 3:
        return buckets
    return buckets + BYTES[config.model.dtype] * (shapes.layer_parameters + shapes.vocabulary * shapes.hidden)


def _share(total: int, parts: int) -> int:
    return -(-total // parts)
