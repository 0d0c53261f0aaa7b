"""A sample without a score teaches nothing: neither its tokens nor its presence change what any role learns."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.weights import load_folder
from engine.batch import Batch
from engine.config import RunConfig
from engine.controller.layout import roles_of
from engine.dataflows import grpo
from engine.dataflows.find import Dataflow, find_dataflow
from engine.dataflows.roles import Progress, Roles
from engine.workers.trained import TrainedWorker
from tests.helpers.learning import hand_over, load_toy, start_toy, toy_config, toy_prompts
from tests.helpers.tiny import tiny_folder

FORMS: dict[str, dict[str, Any]] = {
    "ppo": {"name": "ppo", "kl_coef": 0.05, "critic_lr": 0.01},
    "grpo": {"name": "grpo", "kl_loss_coef": 0.1, "entropy_coef": 0.01},
    "dr_grpo": {"name": "dr_grpo", "kl_loss_coef": 0.1},
    "rloo": {"name": "rloo", "kl_loss_coef": 0.1, "correction": {"mode": "token"}},
    "remax": {"name": "remax", "kl_loss_coef": 0.1},
    "reinforce_plus_plus": {"name": "reinforce_plus_plus", "kl_coef": 0.05, "entropy_coef": 0.01},
    "reinforce_plus_plus_baseline": {"name": "reinforce_plus_plus_baseline", "kl_loss_coef": 0.1},
    "opo": {"name": "opo", "entropy_coef": 0.01},
    "gpg": {"name": "gpg", "entropy_coef": 0.01},
    "dapo": {"name": "dapo", "entropy_coef": 0.01, "overlong_buffer": 3},
    "gspo": {"name": "gspo", "kl_loss_coef": 0.1},
    "cispo": {"name": "cispo", "entropy_coef": 0.01},
    "gmpo": {"name": "gmpo", "kl_loss_coef": 0.1},
    "safe_rlhf": {"name": "safe_rlhf", "kl_coef": 0.05, "critic_lr": 0.01},
    "safe_grpo": {"name": "safe_grpo", "kl_loss_coef": 0.1},
}
PLAIN_STEPS = {
    "optimizer": "sgd",
    "lr": 0.5,
    "max_grad_norm": 1e6,
    "prompts_per_iteration": 4,
    "micro_batch_tokens": 64,
}
RULES = {"reward": [{"kind": "exact_match"}]}  # scored in this process; the scores are replaced


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("toy") / "model")


def config_of(source: Path, form: str, **train: Any) -> RunConfig:
    algorithm = FORMS[form]
    constrained = algorithm["name"].startswith("safe")
    sections = {**RULES, "cost": [{"kind": "repetition_penalty"}] if constrained else []}
    return toy_config(source, algorithm, rollout={"samples_per_prompt": 4}, train={**PLAIN_STEPS, **train}, **sections)


def started(stack: ExitStack, config: RunConfig, source: Path) -> Roles:
    roles = start_toy(stack, config, source, roles_of(config))
    load_toy(roles, config, source)
    return roles


def experience(config: RunConfig, source: Path) -> Batch:
    """Real samples with drawn scores, so that every group has spread."""
    with ExitStack() as stack:
        roles = started(stack, config, source)
        hand_over(roles, source.parent)
        return with_drawn_scores(sampled(roles, config))


def sampled(roles: Roles, config: RunConfig) -> Batch:
    flow: Dataflow = grpo if config.algorithm.name == "dapo" else find_dataflow(config)  # dapo would throw groups away
    batch = flow.make_experience(roles, toy_prompts(config, 1).index(torch.arange(4)), config)
    if flow is grpo:
        batch = batch.with_fields(draws=torch.ones_like(batch.group_ids))
    return batch


def with_drawn_scores(batch: Batch) -> Batch:
    generator = torch.Generator().manual_seed(3)
    drawn = {name: torch.rand(len(batch), generator=generator) for name in ("scores", "costs") if name in batch}
    if "greedy_scores" in batch:
        drawn["greedy_scores"] = torch.rand(4, generator=generator).repeat_interleave(4)
    return batch.with_fields(**drawn)


def learned(config: RunConfig, source: Path, batch: Batch) -> dict[str, Tensor]:
    """Weights of all trained roles after one iteration from the run's start."""
    weights: dict[str, Tensor] = {}
    with ExitStack() as stack:
        roles = started(stack, config, source)
        find_dataflow(config).learn(roles, batch, config, Progress(1))
        for group in (roles.policy, roles.critic, roles.cost_critic):
            if group is not None:
                folder = source.parent / "learned" / group.role
                group.call(TrainedWorker.save, str(folder), str(source), False)
                weights |= {f"{group.role}.{name}": tensor.clone() for name, tensor in load_folder(folder).items()}
    return weights


def without_score(batch: Batch, rows: list[int], name: str = "scores") -> Batch:
    missing = batch.fields[name].clone()
    missing[rows] = torch.nan
    return batch.with_fields(**{name: missing})


def with_other_tokens(batch: Batch, rows: list[int]) -> Batch:
    """The same lengths, other response ids, other numbers of everything that was measured on them."""
    ids, changed = batch.input_ids.clone(), {}
    for row in rows:
        start, stop = int(batch.prompt_lengths[row]), int(batch.lengths()[row])
        ids[row, start:stop] = 3 + (ids[row, start:stop] + 5) % 10
    names = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "values", "cost_values")
    for name in (name for name in names if name in batch):
        values = batch.fields[name].clone()
        values[rows] = torch.where(batch.response_mask[rows], values[rows] - 0.7, values[rows])
        changed[name] = values
    return batch.with_fields(input_ids=ids, **changed)


def missing_in(form: str) -> list[str]:
    """Every place where a sample of this form can miss a number."""
    return ["scores", *({"remax": ["greedy_scores"], "safe_rlhf": ["costs"], "safe_grpo": ["costs"]}.get(form, []))]


CASES = [(form, name) for form in FORMS for name in missing_in(form)]


@pytest.mark.parametrize(("form", "name"), CASES)
def test_what_an_unscored_sample_says_changes_nothing(source: Path, form: str, name: str) -> None:
    """Three epochs, because on its first step a critic that is held to its old values has no gradient."""
    config = config_of(source, form, epochs=1 if form == "opo" else 3)
    rows = [4, 5, 6, 7] if name == "greedy_scores" else [1, 6]
    batch = without_score(experience(config, source), rows, name)
    before = learned(config, source, batch)
    after = learned(config, source, with_other_tokens(batch, rows))
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize(
    ("form", "name"), [case for case in CASES if case[0] in ("ppo", "grpo", "dr_grpo", "remax", "reinforce_plus_plus")]
)
def test_learning_is_as_if_the_unscored_sample_had_not_been_drawn(source: Path, form: str, name: str) -> None:
    """Plain gradient steps, so that a loss divided by too much is seen. (One form for each way to sum; GPG counts
    unscored samples by its definition.)"""
    config = config_of(source, form)
    rows = [4, 5, 6, 7] if name == "greedy_scores" else [1, 6]
    batch = without_score(experience(config, source), rows, name)
    others = [row for row in range(len(batch)) if row not in rows]
    without, with_them = (learned(config, source, part) for part in (batch.index(others), batch))
    torch.testing.assert_close(with_them, without, rtol=1e-4, atol=1e-6)
