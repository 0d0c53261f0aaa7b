"""Every option of a run that learns from files alone (sft, dpo, reward and cost models): default, bounds, digest.

Sections mean the same as in engine/config.py where they have the same name. Rules between options: offline_checks.py.
"""

import hashlib
import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from engine.config import (
    CheckpointConfig,
    DataConfig,
    DataSource,
    EngineConfig,
    ModelConfig,
    RegistryConfig,
    RunConfig,
    config_digest,
)
from engine.trainconfig import NUMBER, PositiveFloat, PositiveInt, Real, Section

SUITE = "held_out"  # the one evaluation of these runs


class PreferenceSource(DataSource):
    """One source of rows; of preferences, the columns of the better and the worse completion may be named."""

    chosen_key: str | None = None  # None = `chosen`, or recognised from the row shape
    rejected_key: str | None = None  # None = `rejected`, or recognised from the row shape


class OfflineDataConfig(DataConfig):
    """The rows that are learned from and measured on."""

    train: Annotated[tuple[PreferenceSource, ...], Field(min_length=1)]  # type: ignore[assignment]
    eval: tuple[PreferenceSource, ...] = ()  # type: ignore[assignment]
    max_tokens: PositiveInt = 1024  # prompt and completion together; completions are cut there


class SFTObjective(Section):
    """Likelihood of the completions (prompt tokens are not learned)."""

    name: Literal["sft"] = "sft"


class DPOObjective(Section):
    """Direct preference optimisation (Rafailov et al. 2023) against the frozen start checkpoint."""

    name: Literal["dpo"] = "dpo"
    beta: PositiveFloat = 0.1
    variant: Literal["sigmoid", "length_normalised", "ipo"] = "sigmoid"


class RewardModelObjective(Section):
    """Bradley-Terry reward model: the chosen completion scores higher than the rejected one."""

    name: Literal["reward_model"] = "reward_model"
    margin: Literal["none", "data"] = (
        "none"  # data: the column `margin` says by how much at least (Touvron et al. 2023)
    )


class CostModelObjective(Section):
    """Cost model of Safe RLHF (Dai et al. 2024): chosen = the safer completion; costs above 0 mean unsafe."""

    name: Literal["cost_model"] = "cost_model"


Objective = Annotated[
    SFTObjective | DPOObjective | RewardModelObjective | CostModelObjective, Field(discriminator="name")
]
LANGUAGE_MODELS = ("sft", "dpo")  # objectives of `hybridflow sft`
SCORE_MODELS = ("reward_model", "cost_model")  # objectives of `hybridflow reward-model`


class OfflineTrainConfig(EngineConfig):
    """The optimiser steps and the engine that runs them."""

    batch_size: PositiveInt = 32  # rows, or pairs, of one optimiser step over all ranks


class OfflinePlacementConfig(Section):
    """The processes of the model, and of the reference beside it."""

    mode: Literal["colocate", "local"] = "colocate"  # local: everything in this process
    ranks: PositiveInt = 1
    timeout_s: PositiveFloat = 60.0  # for the processes to be placed
    call_timeout_s: PositiveFloat = 1800.0  # for one call to a role


class OfflineCheckpointConfig(CheckpointConfig):
    """When weights are written and which are kept; what was learned since the last ones is learned again after a kill."""

    every: PositiveInt = 100  # optimiser steps; evaluated steps and the last one are always written


class OfflineEvaluationConfig(Section):
    """Measurement on the held-out rows: of the start checkpoint, every k-th optimiser step and the final model."""

    every: PositiveInt | None = None  # optimiser steps; None = only start and end
    max_rows: PositiveInt | None = None
    bins: Annotated[int, NUMBER, Field(ge=2, le=100)] = 10  # of the calibration and of the histogram of margins


class OfflineGateConfig(Section):
    """What the final model must show before it becomes champion."""

    suite: ClassVar[str] = SUITE
    component: ClassVar[None] = None
    max_cost: ClassVar[None] = None
    cost_component: ClassVar[None] = None
    min_score: Real | None = None  # floor: accuracy on held-out pairs; of sft the mean log-likelihood per token
    min_gain: Real = 0.0  # over the start checkpoint


class OfflineConfig(Section):
    """One complete run on fixed rows: data to registered model."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=80)]
    seed: Annotated[int, NUMBER, Field(ge=0, lt=2**63)] = 0
    root: str = "runs"
    model: ModelConfig
    data: OfflineDataConfig
    objective: Objective
    train: OfflineTrainConfig = OfflineTrainConfig()
    steps: PositiveInt  # optimiser steps
    placement: OfflinePlacementConfig = OfflinePlacementConfig()
    checkpoint: OfflineCheckpointConfig = OfflineCheckpointConfig()
    evaluation: OfflineEvaluationConfig = OfflineEvaluationConfig()
    gate: OfflineGateConfig = OfflineGateConfig()
    registry: RegistryConfig | None = None

    @property
    def iterations(self) -> int:
        """What counts as done or planned in reports and in the run directory: optimiser steps."""
        return self.steps


AnyConfig = RunConfig | OfflineConfig

_NOT_RESULTS = ("root", "placement", "checkpoint", "registry", "gate")
_NOT_RESULTS_OF_TRAIN = {"tensor_parallel", "offload_optimizer"}


def parse_recorded(content: dict[str, Any]) -> AnyConfig:
    """The configuration in a run's record, of whichever kind it is."""
    kind: type[AnyConfig] = OfflineConfig if "objective" in content else RunConfig
    return kind.model_validate(content)


def digest_of(config: AnyConfig, fingerprints: dict[str, str]) -> str:
    """sha256 over all that changes results, for either kind of run."""
    if isinstance(config, OfflineConfig):
        return offline_digest(config, fingerprints)
    return config_digest(config, fingerprints)


def offline_digest(config: OfflineConfig, fingerprints: dict[str, str]) -> str:
    """sha256 over all that changes results, as engine.config.config_digest; when weights are written changes none."""
    content = config.model_dump(mode="json", exclude=set(_NOT_RESULTS))
    content["data"]["train"] = [_without_path(source) for source in content["data"]["train"]]
    content["data"]["eval"] = [_without_path(source) for source in content["data"]["eval"]]
    content["train"] = {name: value for name, value in content["train"].items() if name not in _NOT_RESULTS_OF_TRAIN}
    content["model"].pop("source")
    return hashlib.sha256(
        json.dumps({"options": content, "content": fingerprints}, sort_keys=True).encode()
    ).hexdigest()


def _without_path(source: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in source.items() if name != "path"}


def measured_steps(steps: int, every: int | None) -> set[int]:
    """Optimiser steps after which a run on fixed rows is measured: every k-th and the last."""
    return {step for step in range(1, steps + 1) if step == steps or (every is not None and step % every == 0)}


def committed_steps(steps: int, checkpoint_every: int, evaluation_every: int | None) -> list[int]:
    """Those after which its weights are written: every k-th, every measured one and the last."""
    return sorted({*range(checkpoint_every, steps + 1, checkpoint_every)} | measured_steps(steps, evaluation_every))
