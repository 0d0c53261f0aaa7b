"""Every option of a run, its default and bounds; frozen, unknown keys refused. Rules between options: checks.py."""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Coefficient = Annotated[float, Field(ge=0.0)]


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no NaN; a number may be written as text."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=False, validate_default=True)


class ModelConfig(Section):
    """The policy's architecture, tokenizer and starting weights."""

    source: str  # local folder, Hub id, models:/NAME@ALIAS, models:/NAME/VERSION, runs:KEY[/ITERATION] or a .gguf file
    init: Literal["pretrained", "random"] = "pretrained"  # random: weights drawn from the run seed
    dtype: Literal["float32", "bfloat16"] = "float32"
    chat_template: str | None = None  # text of a Jinja template, used only where the tokenizer has none


class DataSource(Section):
    """One file, `save_to_disk` folder or Hub data set; rows of verl, TRL and OpenRLHF shape are recognised."""

    path: str
    format: Literal["auto", "jsonl", "csv", "parquet", "disk", "hub"] = "auto"
    split: str = "train"  # of a Hub data set or a saved DatasetDict
    subset: str | None = None  # configuration name of a Hub data set
    input_key: str | None = None  # column of the prompt; None = recognised from the row shape
    label_key: str | None = None  # column of the reference answer; None = recognised from the row shape


class DataConfig(Section):
    """What prompts the run trains and is evaluated on, and what happens to rows that do not fit."""

    train: Annotated[tuple[DataSource, ...], Field(min_length=1)]
    eval: tuple[DataSource, ...] = ()
    eval_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.01  # taken out of train where eval is empty
    max_prompt_tokens: PositiveInt = 512  # after the chat template, on the ids sent to the engine
    overlong: Literal["error", "filter", "keep_end"] = "error"
    bad_lines: Literal["error", "skip"] = "error"
    max_bad_share: Share = 0.01  # with bad_lines: skip, more bad lines than this still fail
    duplicates: Literal["keep", "drop"] = "keep"
    overlap: Literal["error", "drop"] = "error"  # train rows that are also evaluation rows (case and spaces ignored)
    system_prompt: str | None = None  # put before conversations that have no system message


class OptimizerConfig(Section):
    """AdamW and its rate; shared by the policy, the critic and supervised fine-tuning."""

    lr: Annotated[float, Field(gt=0.0)] = 1.0e-5
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0.0)] = 1.0e-8
    weight_decay: Coefficient = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after warm-up; linear and cosine end at 0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0


class SFTConfig(OptimizerConfig):
    """Optional supervised stage that makes the start checkpoint from prompt and answer rows."""

    data: tuple[DataSource, ...] = ()  # empty = the training rows of `data`
    steps: PositiveInt
    batch_size: PositiveInt = 32


class CorrectionConfig(Section):
    """Importance weights for the gap between sampler and trainer (metrics are always on)."""

    mode: Literal["none", "token", "icepop", "sequence", "geometric"] = "none"
    cap: Annotated[float, Field(gt=0.0)] = 2.0
    floor: Annotated[float, Field(ge=0.0)] | None = None


class PolicyLossConfig(Section):
    """What the clipped policy loss of both algorithms needs."""

    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    clip_high: Annotated[float, Field(gt=0.0)] = 0.2
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    entropy_coef: Coefficient = 0.0
    correction: CorrectionConfig = CorrectionConfig()
    max_logprob_gap: Annotated[float, Field(gt=0.0)] = 1.0  # mean |sampler - trainer| in nats above which a step stops


class GRPOConfig(PolicyLossConfig):
    """Group relative policy optimisation (Shao et al. 2024)."""

    name: Literal["grpo"] = "grpo"
    scale: Literal["std", "none"] = "std"
    aggregation: Literal["sequence-mean", "token-mean", "fixed"] = "sequence-mean"
    kl_loss_coef: Coefficient = 0.0
    kl_loss_kind: Literal["k1", "k2", "k3", "abs"] = "k3"


class PPOConfig(PolicyLossConfig):
    """Proximal policy optimisation with a critic (Schulman et al. 2017; Ouyang et al. 2022)."""

    name: Literal["ppo"] = "ppo"
    aggregation: Literal["sequence-mean", "token-mean", "fixed"] = "token-mean"
    gamma: Share = 1.0
    lam: Share = 0.95
    kl_coef: Coefficient = 0.0  # token penalty in the reward
    kl_target: Annotated[float, Field(gt=0.0)] | None = None  # nats per response; set = adaptive coefficient
    kl_horizon: PositiveInt = 10_000  # samples, of the adaptive coefficient
    value_clip: Annotated[float, Field(gt=0.0)] | None = 0.2
    critic_lr: Annotated[float, Field(gt=0.0)] | None = None  # None = 10 x train.lr
    critic_warmup: Annotated[int, Field(ge=0)] = 0  # iterations in which only the critic learns


AlgorithmConfig = Annotated[GRPOConfig | PPOConfig, Field(discriminator="name")]
ALGORITHMS = ("grpo", "ppo")


class RolloutConfig(Section):
    """How responses are generated."""

    backend: Literal["vllm", "hf"] = "vllm"
    samples_per_prompt: PositiveInt = 8
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0  # 0 = all tokens
    max_response_tokens: PositiveInt = 256
    stop: tuple[str, ...] = ()
    kv_cache_gib: PositiveInt = 1  # CPU engine
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5  # GPU engine
    max_batched_tokens: PositiveInt | None = None  # None = room for the longest prompt and 8192 tokens
    tensor_parallel: PositiveInt = 1


class TrainConfig(OptimizerConfig):
    """The optimiser steps of one iteration and the engine that runs them."""

    backend: Literal["deepspeed", "torch"] = "deepspeed"
    zero_stage: Literal[0, 1, 2, 3] = 0
    prompts_per_iteration: PositiveInt = 64
    mini_batches: PositiveInt = 1  # optimiser steps per epoch
    epochs: PositiveInt = 1
    micro_batch_tokens: PositiveInt = 8192  # most tokens, padding included, in one forward pass of a rank
    gradient_checkpointing: bool = False


class ExactMatchReward(Section):
    """1 where the stripped response equals the answer, else 0."""

    kind: Literal["exact_match"] = "exact_match"
    weight: float = 1.0
    ignore_case: bool = False


class NumberReward(Section):
    """1 where the last number of the response equals the answer within `tolerance`, else 0."""

    kind: Literal["number"] = "number"
    weight: float = 1.0
    tolerance: Coefficient = 0.0


class MathReward(Section):
    """1 where math-verify finds response and answer equal, else 0."""

    kind: Literal["math"] = "math"
    weight: float = 1.0
    timeout_s: Annotated[float, Field(gt=0.0)] = 5.0


class RegexReward(Section):
    """1 where the pattern is found in the response, else 0."""

    kind: Literal["regex"] = "regex"
    weight: float = 1.0
    pattern: str


class ReasoningGymReward(Section):
    """Score of a reasoning-gym verifier; the row's `extra` carries the entry that the data set made."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    weight: float = 1.0
    dataset: str
    timeout_s: Annotated[float, Field(gt=0.0)] = 5.0


class PythonReward(Section):
    """A function `score(prompt, response, answer, extra) -> float | None`, by import path `package.module:function`."""

    kind: Literal["python"] = "python"
    weight: float = 1.0
    function: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    needs_answer: bool = True
    timeout_s: Annotated[float, Field(gt=0.0)] = 10.0
    workers: PositiveInt = 1  # killable scorer processes


RewardConfig = Annotated[
    ExactMatchReward | NumberReward | MathReward | RegexReward | ReasoningGymReward | PythonReward,
    Field(discriminator="kind"),
]


class PlacementConfig(Section):
    """Which processes the roles share."""

    mode: Literal["colocate", "split", "standalone", "local"] = "colocate"  # local: everything in this process
    ranks: PositiveInt = 1  # processes of each trained or scoring role
    rollout_ranks: PositiveInt = 1  # rollout engines
    timeout_s: Annotated[float, Field(gt=0.0)] = 60.0  # for the processes to be placed
    call_timeout_s: Annotated[float, Field(gt=0.0)] = 1800.0  # for one call to a role


class CheckpointConfig(Section):
    """When weights are written and which are kept; the experience of every iteration is always written."""

    every: PositiveInt = 1  # iterations; the last one is always written
    keep_last: PositiveInt = 2
    keep_best: Annotated[int, Field(ge=0)] = 1  # by evaluation score, besides keep_last


class SuiteConfig(Section):
    """One evaluation: greedy answers on held-out rows, scored by the run's reward."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")] = "held_out"
    data: tuple[DataSource, ...] = ()  # empty = the evaluation rows of `data`
    max_rows: PositiveInt | None = None
    max_response_tokens: PositiveInt | None = None  # None = rollout.max_response_tokens


class EvaluationConfig(Section):
    """Held-out evaluation of the start checkpoint, every k-th iteration and the final policy."""

    every: PositiveInt | None = None  # None = only start and end
    suites: Annotated[tuple[SuiteConfig, ...], Field(min_length=1)] = (SuiteConfig(),)


class GateConfig(Section):
    """What the final policy must show before it becomes champion."""

    suite: str = "held_out"
    min_score: float | None = None  # floor of score_mean
    min_gain: float = 0.0  # over the start checkpoint


class RegistryConfig(Section):
    """Where the final model is registered."""

    model: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
    tracking_uri: str | None = None  # None = SQLite in the run root


class RunConfig(Section):
    """One complete run: data to registered model."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=80)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    root: str = "runs"
    model: ModelConfig
    data: DataConfig
    sft: SFTConfig | None = None
    algorithm: AlgorithmConfig = GRPOConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    reward: Annotated[tuple[RewardConfig, ...], Field(min_length=1)]
    max_unscored_share: Share = 0.1  # of one step's samples; above it the step fails
    placement: PlacementConfig = PlacementConfig()
    iterations: PositiveInt
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    gate: GateConfig = GateConfig()
    registry: RegistryConfig | None = None

    @property
    def samples_per_iteration(self) -> int:
        """Responses generated and learned from in one iteration."""
        return self.train.prompts_per_iteration * self.rollout.samples_per_prompt

    @property
    def needs_answer(self) -> bool:
        """Whether every row must carry a reference answer."""
        return any(_needs_answer(reward) for reward in self.reward)

    @property
    def needs_reference(self) -> bool:
        """Whether the frozen start policy has to score responses."""
        if isinstance(self.algorithm, PPOConfig):
            return self.algorithm.kl_coef > 0
        return self.algorithm.kl_loss_coef > 0


def _needs_answer(reward: Section) -> bool:
    if isinstance(reward, PythonReward):
        return reward.needs_answer
    return isinstance(reward, ExactMatchReward | NumberReward | MathReward)


# Options that move work around without changing what is computed: left out of the digest, so a run may be continued
# in another folder, on other processes or with another retention.
_NOT_RESULTS: dict[str, set[str] | bool] = {
    "root": True,
    "placement": True,
    "checkpoint": True,
    "registry": True,
    "gate": True,
}


def config_digest(config: RunConfig, fingerprints: dict[str, str]) -> str:
    """sha256 over all that changes results: options, with every path replaced by the fingerprint of its content.

    fingerprints: {"data/train": sha256, "model": sha256, ...} of what the paths held when the run was made.
    """
    content = config.model_dump(mode="json", exclude=_NOT_RESULTS)
    content = _without_paths(content)
    content["model"].pop("source")
    text = json.dumps({"options": content, "content": fingerprints}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_paths(item) for key, item in value.items() if key != "path"}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    return value


def save_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration as JSON, so that a resumed run needs nothing else."""
    path.write_text(config.model_dump_json(indent=2))
