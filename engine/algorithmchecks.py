"""Rules between the options of an algorithm and the rest of the run."""

from collections.abc import Callable, Iterator

from engine.config import (
    ConstraintConfig,
    DAPOConfig,
    KLLossConfig,
    KLRewardConfig,
    RLOOConfig,
    RunConfig,
    SafeRLHFConfig,
)
from engine.errors import Problem


def _group_size(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.compares_samples and config.rollout.samples_per_prompt == 1:
        remedy = (
            f"{algorithm.name} compares the samples of a prompt and learns nothing from one; "
            "use at least 2, or algorithm ppo"
        )
        yield Problem("rollout.samples_per_prompt", 1, remedy)


def _truncated_sampling(config: RunConfig) -> Iterator[Problem]:
    remedy = (
        "samples come from a cut distribution that the trainer does not know; "
        "set algorithm.correction.mode (token is the usual one), or sample from all tokens"
    )
    if config.algorithm.correction.mode == "none" and config.rollout.top_p < 1.0:
        yield Problem("rollout.top_p", config.rollout.top_p, remedy)
    if config.algorithm.correction.mode == "none" and config.rollout.top_k > 0:
        yield Problem("rollout.top_k", config.rollout.top_k, remedy)


def _correction(config: RunConfig) -> Iterator[Problem]:
    correction = config.algorithm.correction
    if correction.mode == "none":
        for name in sorted({"cap", "floor"} & correction.model_fields_set):
            remedy = "has no use with correction.mode: none; choose a mode, or leave it out"
            yield Problem(f"algorithm.correction.{name}", correction.model_dump()[name], remedy)
    elif correction.floor is not None and correction.floor > correction.cap:
        yield Problem("algorithm.correction.floor", correction.floor, f"is above cap = {correction.cap}; lower it")


def _kl(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    unused = "kl_loss_kind" in algorithm.model_fields_set
    if isinstance(algorithm, KLLossConfig) and unused and algorithm.kl_loss_coef == 0:
        remedy = "has no use with kl_loss_coef 0; set the coefficient, or leave it out"
        yield Problem("algorithm.kl_loss_kind", algorithm.kl_loss_kind, remedy)
    if isinstance(algorithm, KLRewardConfig):
        if algorithm.kl_target is not None and algorithm.kl_coef == 0:
            remedy = "adapts kl_coef, which is 0 and stays so; give kl_coef a start value, or leave the target out"
            yield Problem("algorithm.kl_target", algorithm.kl_target, remedy)
        if algorithm.kl_target is None and "kl_horizon" in algorithm.model_fields_set:
            remedy = "is used by the adaptive coefficient only; set kl_target, or leave it out"
            yield Problem("algorithm.kl_horizon", algorithm.kl_horizon, remedy)


def _ratio(config: RunConfig) -> Iterator[Problem]:
    algorithm, train = config.algorithm, config.train
    if algorithm.on_policy and train.mini_batches * train.epochs > 1:
        remedy = f"{algorithm.name} has no ratio, so it is right for one optimiser step per iteration only; use 1"
        key = "train.mini_batches" if train.mini_batches > 1 else "train.epochs"
        yield Problem(key, max(train.mini_batches, train.epochs), remedy)
    if isinstance(algorithm, RLOOConfig) and algorithm.loss == "reinforce":
        for name in sorted({"clip_low", "clip_high", "dual_clip"} & algorithm.model_fields_set):
            remedy = "has no use with loss: reinforce, which has no ratio; leave it out, or use loss: clip"
            yield Problem(f"algorithm.{name}", algorithm.model_dump()[name], remedy)


def _cost(config: RunConfig) -> Iterator[Problem]:
    constrained = isinstance(config.algorithm, ConstraintConfig)
    if constrained and not config.cost:
        yield Problem("cost", [], f"{config.algorithm.name} needs scorers of harm, written like those of reward")
    if config.cost and not constrained:
        remedy = f"has no use in {config.algorithm.name}; use safe_rlhf or safe_grpo, or leave it out"
        yield Problem("cost", [component.kind for component in config.cost], remedy)


def _multiplier(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    if isinstance(algorithm, ConstraintConfig) and algorithm.multiplier_init > algorithm.multiplier_max:
        remedy = f"is above multiplier_max = {algorithm.multiplier_max:g}; lower it"
        yield Problem("algorithm.multiplier_init", algorithm.multiplier_init, remedy)


def _overlong(config: RunConfig) -> Iterator[Problem]:
    algorithm, longest = config.algorithm, config.rollout.max_response_tokens
    if isinstance(algorithm, DAPOConfig) and (algorithm.overlong_buffer or 0) > longest:
        remedy = f"is more than the longest response, {longest} tokens; use less"
        yield Problem("algorithm.overlong_buffer", algorithm.overlong_buffer, remedy)


def _guards(config: RunConfig) -> Iterator[Problem]:
    clips = "clip_high" in config.algorithm.policy_loss_options
    one_step = config.train.mini_batches * config.train.epochs == 1
    for position, guard in enumerate(config.guards):
        key = f"guards[{position}]"
        if guard.above is None and guard.below is None:
            yield Problem(f"{key}.above", None, "a guard without a bound guards nothing; give above, below or both")
        elif guard.above is not None and guard.below is not None and guard.below > guard.above:
            yield Problem(f"{key}.below", guard.below, f"is more than above = {guard.above:g}; every value is outside")
        if guard.watch == "kl" and not config.needs_reference:
            remedy = "needs a reference, which this run does not have; set algorithm.kl_coef or kl_loss_coef, or watch step_kl"
            yield Problem(f"{key}.watch", guard.watch, remedy)
        if guard.watch == "clip_share" and not clips:
            yield Problem(f"{key}.watch", guard.watch, f"{config.algorithm.name} clips nothing; watch something else")
        elif guard.watch in ("step_kl", "clip_share") and one_step:
            remedy = (
                "is 0 in every iteration: with one optimiser step the policy has not moved when it is measured; "
                "use at least 2 train.mini_batches or epochs, or watch kl"
            )
            yield Problem(f"{key}.watch", guard.watch, remedy)
        if guard.patience > config.iterations:
            remedy = f"the run has {config.iterations} iterations, so it would never act; use fewer"
            yield Problem(f"{key}.patience", guard.patience, remedy)


def _pretraining(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    if not isinstance(algorithm, SafeRLHFConfig):
        return
    if algorithm.ptx_coef > 0 and config.sft is None:
        yield Problem(
            "algorithm.ptx_coef", algorithm.ptx_coef, "learns from the rows of sft; give sft, or leave it out"
        )
    if algorithm.ptx_coef == 0 and "ptx_rows" in algorithm.model_fields_set:
        yield Problem("algorithm.ptx_rows", algorithm.ptx_rows, "has no use with ptx_coef 0; set that, or leave it out")


# Each rule with the options it reads.
ALGORITHM_RULES: tuple[tuple[Callable[[RunConfig], Iterator[Problem]], tuple[str, ...]], ...] = (
    (_group_size, ("algorithm.name", "rollout.samples_per_prompt")),
    (_truncated_sampling, ("algorithm.correction", "rollout.top_p", "rollout.top_k")),
    (_correction, ("algorithm.correction",)),
    (_kl, ("algorithm",)),
    (_ratio, ("algorithm", "train.mini_batches", "train.epochs")),
    (_cost, ("algorithm", "cost")),
    (_multiplier, ("algorithm",)),
    (_pretraining, ("algorithm", "sft")),
    (_guards, ("guards", "algorithm", "iterations", "train.mini_batches", "train.epochs")),
    (_overlong, ("algorithm", "rollout.max_response_tokens")),
)
