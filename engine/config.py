"""Every option of a run, its default and bounds; frozen, unknown keys refused. Rules between options: checks.py.

The sections `model` and `train` are in trainconfig.py, `algorithm` in algorithmconfig.py, `reward` in rewardconfig.py.
"""

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field

from engine.algorithmconfig import AlgorithmConfig as AlgorithmConfig
from engine.algorithmconfig import ConstraintConfig as ConstraintConfig
from engine.algorithmconfig import CriticConfig as CriticConfig
from engine.algorithmconfig import CustomConfig as CustomConfig
from engine.algorithmconfig import DAPOConfig as DAPOConfig
from engine.algorithmconfig import GRPOConfig as GRPOConfig
from engine.algorithmconfig import KLLossConfig as KLLossConfig
from engine.algorithmconfig import KLRewardConfig as KLRewardConfig
from engine.algorithmconfig import OnlineConfig as OnlineConfig
from engine.algorithmconfig import PPOConfig as PPOConfig
from engine.algorithmconfig import ReinforcePlusPlusConfig as ReinforcePlusPlusConfig
from engine.algorithmconfig import RLOOConfig as RLOOConfig
from engine.algorithmconfig import SafeGRPOConfig as SafeGRPOConfig
from engine.algorithmconfig import SafeRLHFConfig as SafeRLHFConfig
from engine.rewardconfig import ChoiceReward as ChoiceReward
from engine.rewardconfig import ExactMatchReward as ExactMatchReward
from engine.rewardconfig import FormatReward as FormatReward
from engine.rewardconfig import HttpReward as HttpReward
from engine.rewardconfig import JsonSchemaReward as JsonSchemaReward
from engine.rewardconfig import JudgeReward as JudgeReward
from engine.rewardconfig import LengthPenaltyReward as LengthPenaltyReward
from engine.rewardconfig import MathReward as MathReward
from engine.rewardconfig import ModelReward as ModelReward
from engine.rewardconfig import NumberReward as NumberReward
from engine.rewardconfig import PythonReward as PythonReward
from engine.rewardconfig import ReasoningGymReward as ReasoningGymReward
from engine.rewardconfig import RegexReward as RegexReward
from engine.rewardconfig import RepetitionPenaltyReward as RepetitionPenaltyReward
from engine.rewardconfig import RewardConfig as RewardConfig
from engine.rewardconfig import component_names as component_names
from engine.rewardconfig import needs_answer as needs_answer
from engine.trainconfig import NUMBER, NonNegativeInt, PositiveFloat, PositiveInt, Real, Share
from engine.trainconfig import EngineConfig as EngineConfig
from engine.trainconfig import LoraConfig as LoraConfig
from engine.trainconfig import ModelConfig as ModelConfig
from engine.trainconfig import OptimizerConfig as OptimizerConfig
from engine.trainconfig import Section as Section
from engine.trainconfig import TrainConfig as TrainConfig


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
    eval_fraction: Annotated[float, NUMBER, Field(gt=0.0, lt=1.0)] = 0.01  # taken out of train where eval is empty
    max_prompt_tokens: PositiveInt = 512  # after the chat template, on the ids sent to the engine
    overlong: Literal["error", "filter", "keep_end"] = "error"
    bad_lines: Literal["error", "skip"] = "error"
    max_bad_share: Share = 0.01  # with bad_lines: skip, more bad lines than this still fail
    duplicates: Literal["keep", "drop"] = "keep"
    overlap: Literal["error", "drop"] = "error"  # train rows that are also evaluation rows (case and spaces ignored)
    system_prompt: str | None = None  # put before conversations that have no system message


class SFTConfig(OptimizerConfig):
    """Optional supervised stage that makes the start checkpoint from prompt and answer rows."""

    data: tuple[DataSource, ...] = ()  # empty = the training rows of `data`
    steps: PositiveInt
    batch_size: PositiveInt = 32


class RolloutConfig(Section):
    """How responses are generated."""

    backend: Literal["vllm", "hf"] = "vllm"
    samples_per_prompt: PositiveInt = 8
    temperature: Annotated[float, NUMBER, Field(ge=0.01, le=2.0)] = (
        1.0  # the range in which the engine samples as asked
    )
    top_p: Annotated[float, NUMBER, Field(gt=0.0, le=1.0)] = 1.0
    top_k: NonNegativeInt = 0  # 0 = all tokens
    max_response_tokens: PositiveInt = 256
    stop: tuple[str, ...] = ()
    kv_cache_gib: PositiveInt = 1  # CPU engine
    gpu_memory_utilization: Annotated[float, NUMBER, Field(gt=0.0, lt=1.0)] = 0.5  # GPU engine
    max_batched_tokens: PositiveInt | None = None  # None = room for the longest prompt and 8192 tokens
    tensor_parallel: PositiveInt = 1


class PoolConfig(Section):
    """A share of the cluster: `ranks` processes of every kind placed in it."""

    ranks: PositiveInt = 1
    # Of each rank, by Ray's names (CPU, GPU, memory in bytes, or a custom one); None = 1 CPU and, where there are, 1 GPU.
    resources: Annotated[dict[str, PositiveFloat], Field(min_length=1)] | None = None


class PlacementConfig(Section):
    """Which processes the roles share."""

    mode: Literal["colocate", "split", "standalone", "map", "local"] = "colocate"  # local: everything in this process
    ranks: PositiveInt = 1  # processes of each trained or scoring role
    rollout_ranks: PositiveInt = 1  # CPUs or GPUs that generate; rollout.tensor_parallel of them make one engine
    pools: dict[str, PoolConfig] = Field(default_factory=dict)  # mode map: the pools by name
    roles: dict[str, str] = Field(default_factory=dict)  # mode map: role -> pool
    timeout_s: PositiveFloat = 60.0  # for the processes to be placed
    call_timeout_s: PositiveFloat = 1800.0  # for one call to a role
    device_memory_gib: PositiveFloat | None = None  # of one GPU, for the dry run; None = ask the GPU


class CheckpointConfig(Section):
    """When weights are written and which are kept; the experience of every iteration is always written."""

    every: PositiveInt = 1  # iterations; the last one is always written
    keep_last: PositiveInt = 2
    keep_best: NonNegativeInt = 1  # by evaluation score, besides keep_last
    # Seconds that a step may go on after SIGTERM, to commit itself before the machine is taken away; 0 = given up at once.
    grace_s: Annotated[float, NUMBER, Field(ge=0.0)] = 0.0


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


class GuardConfig(Section):
    """A bound that an iteration must keep, and what happens where it does not (engine/guards.py says what is read)."""

    watch: Literal[
        "kl",
        "step_kl",
        "entropy",
        "length",
        "clip_share",
        "dead_groups",
        "reward_spread",
        "mismatch",
        "mismatch_weight",
    ]
    above: Real | None = None  # more than this is outside
    below: Real | None = None  # less than this is outside
    action: Literal["warn", "lower_rate", "stop"] = "warn"  # lower_rate: half of it from the next iteration on
    patience: PositiveInt = 1  # iterations in a row


class GateConfig(Section):
    """What the final policy must show before it becomes champion."""

    suite: str = "held_out"
    component: str | None = None  # one reward by its kind, instead of their weighted sum; its weight may be 0
    min_score: Real | None = None  # floor of the mean score
    min_gain: Real = 0.0  # over the start checkpoint
    max_cost: Real | None = None  # ceiling of the mean cost, of a run with `cost`
    cost_component: str | None = None  # one entry of cost by its kind, instead of their weighted sum


class RegistryConfig(Section):
    """Where the final model is registered."""

    model: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
    tracking_uri: str | None = None  # None = SQLite in the run root


class RunConfig(Section):
    """One complete run: data to registered model."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=80)]
    seed: Annotated[int, NUMBER, Field(ge=0, lt=2**63)] = 0
    root: str = "runs"
    model: ModelConfig
    data: DataConfig
    sft: SFTConfig | None = None
    algorithm: AlgorithmConfig = GRPOConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    reward: Annotated[tuple[RewardConfig, ...], Field(min_length=1)]
    cost: tuple[RewardConfig, ...] = ()  # of safe_rlhf and safe_grpo: positive = harmful
    max_unscored_share: Share = 0.1  # of one step's samples; above it the step fails
    placement: PlacementConfig = PlacementConfig()
    iterations: PositiveInt
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    guards: tuple[GuardConfig, ...] = ()
    gate: GateConfig = GateConfig()
    registry: RegistryConfig | None = None

    @property
    def samples_per_iteration(self) -> int:
        """Responses generated and learned from in one iteration."""
        return self.train.prompts_per_iteration * self.rollout.samples_per_prompt

    @property
    def policy_steps(self) -> int:
        """Optimiser steps that the policy takes after the start checkpoint: none while only the critics learn."""
        warmup = self.algorithm.critic_warmup if isinstance(self.algorithm, CriticConfig) else 0
        return (self.iterations - warmup) * self.train.epochs * self.train.mini_batches

    @property
    def needs_answer(self) -> bool:
        """Whether every row must carry a reference answer."""
        return any(needs_answer(component) for component in (*self.reward, *self.cost))

    @property
    def scoring_models(self) -> dict[str, ModelReward]:
        """The entries of `reward` and `cost` that are models, by key: reward[0], say."""
        sections = {"reward": self.reward, "cost": self.cost}
        entries = {f"{name}[{i}]": one for name, section in sections.items() for i, one in enumerate(section)}
        return {key: one for key, one in entries.items() if isinstance(one, ModelReward)}

    @property
    def needs_reference(self) -> bool:
        """Whether the frozen start policy has to score responses."""
        return self.algorithm.needs_reference


# Of a scorer: where its service is and how long it is waited for.
_PATIENCE = {
    "__all__": {"url", "base_url", "token_env", "batch_size", "concurrency", "retries", "backoff_s", "timeout_s"}
}
# Options that move work around without changing what is computed: left out of the digest, so a run may be continued
# in another folder, on other processes, with another retention or with more patience for its scorers.
_NOT_RESULTS: dict[str, Any] = {
    "root": True,
    "max_unscored_share": True,
    "placement": True,
    "checkpoint": True,
    "registry": True,
    "gate": True,
    "train": {"tensor_parallel", "offload_optimizer"},
    "reward": _PATIENCE,
    "cost": _PATIENCE,
}


def config_digest(config: RunConfig, fingerprints: dict[str, str]) -> str:
    """sha256 over all that changes results: options, with every path replaced by the fingerprint of its content.

    fingerprints: {"data/train": sha256, "model": sha256, ...} of what the paths held when the run was made.
    """
    content = config.model_dump(mode="json", exclude=_NOT_RESULTS)
    content = _without_paths(content)
    for model in (content["model"], *content["reward"], *content["cost"]):
        model.pop("source", None)  # only scorers by a model have one
    text = json.dumps({"options": content, "content": fingerprints}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key != "path"}
        # A JSON schema may well describe a property of that name.
        return {key: item if key == "definition" else _without_paths(item) for key, item in kept.items()}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    return value
