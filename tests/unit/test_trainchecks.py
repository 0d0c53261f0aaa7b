"""Rules between the options of training: each refuses what would be ignored or cannot work, and lets the rest pass."""

import os
from typing import Any

import pytest

from engine.checks import check_config
from engine.config import config_digest
from tests.helpers.configs import config

ADAPTIVE = {"schedule": "adaptive_kl", "kl_target": 0.01, "lr": 1e-4}
SFT = {"steps": 5}


@pytest.fixture(autouse=True)
def four_cpus_and_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def found(**changed: Any) -> dict[str, str]:
    return {problem.key: problem.remedy for problem in check_config(config(**changed))}


def train(**options: Any) -> dict[str, Any]:
    return {"train": options}


REFUSED = {
    "betas of sgd": (train(optimizer="sgd", betas=[0.9, 0.9]), "train.betas"),
    "eps of sgd": (train(optimizer="sgd", eps=1e-6), "train.eps"),
    "betas of rmsprop": (train(optimizer="rmsprop", betas=[0.9, 0.9]), "train.betas"),
    "alpha of adamw": (train(alpha=0.9), "train.alpha"),
    "alpha of sgd": (train(optimizer="sgd", alpha=0.9), "train.alpha"),
    "momentum of adam": (train(optimizer="adam", momentum=0.9), "train.momentum"),
    "nesterov of rmsprop": (train(optimizer="rmsprop", momentum=0.9, nesterov=True), "train.nesterov"),
    "nesterov without momentum": (train(optimizer="sgd", nesterov=True), "train.nesterov"),
    "momentum of adamw in sft": ({"sft": {**SFT, "momentum": 0.9}}, "sft.momentum"),
    "a target for a constant rate": (train(kl_target=0.1), "train.kl_target"),
    "bounds of a linear rate": (train(schedule="linear", lr_min=1e-6), "train.lr_min"),
    "an adaptive rate without target": (train(schedule="adaptive_kl"), "train.schedule"),
    "an adaptive rate with one step": (train(**ADAPTIVE, mini_batches=1), "train.schedule"),
    "an adaptive rate in sft": ({"sft": {**SFT, **ADAPTIVE}}, "sft.schedule"),
    "a start outside of the bounds": (train(**{**ADAPTIVE, "lr": 1e-2}, lr_max=1e-3), "train.lr"),
    "a stage for fsdp": (train(backend="fsdp", zero_stage=2), "train.zero_stage"),
    "offloading by torch": (train(backend="torch", offload_optimizer=True), "train.offload_optimizer"),
    "offloading what is not spread": (train(offload_optimizer=True), "train.offload_optimizer"),
    "layers cut by deepspeed": (
        {**train(tensor_parallel=2), "placement": {"ranks": 2}},
        "train.tensor_parallel",
    ),
    "layers cut over ranks that are not there": (
        {**train(backend="fsdp", tensor_parallel=2), "placement": {"ranks": 3}},
        "train.tensor_parallel",
    ),
    "adapters in deepspeed": ({"model": {"lora": {}}}, "train.backend"),
    "adapters in cut layers": (
        {**train(backend="torch", tensor_parallel=2), "placement": {"ranks": 2}, "model": {"lora": {}}},
        "train.tensor_parallel",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    changed, key = REFUSED[name]
    assert list(found(**changed)) == [key]


ALLOWED = {
    "adam": train(optimizer="adam", betas=[0.8, 0.9], eps=1e-6, weight_decay=0.1),
    "rmsprop": train(optimizer="rmsprop", alpha=0.9, eps=1e-6, momentum=0.5),
    "sgd": train(optimizer="sgd", momentum=0.9, nesterov=True),
    "another optimiser in sft": {"sft": {**SFT, "optimizer": "sgd", "momentum": 0.9}},
    "an adaptive rate": train(**ADAPTIVE, lr_min=1e-6, lr_max=1e-3, warmup_steps=1),
    "an adaptive rate over epochs": train(**ADAPTIVE, mini_batches=1, epochs=2),
    "offloading": train(zero_stage=2, offload_optimizer=True),
    "fsdp": train(backend="fsdp", gradient_checkpointing=True),
    "cut layers": {**train(backend="fsdp", tensor_parallel=2), "placement": {"ranks": 4}},
    "adapters": {**train(backend="fsdp"), "model": {"lora": {"rank": 4, "targets": ["q_proj"]}}},
}


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name: str):
    assert found(**ALLOWED[name]) == {}


def test_ranks_of_one_copy_of_the_model_share_their_rows():
    """One sample is enough for two ranks that hold one copy, not for two copies."""
    one_sample = {"prompts_per_iteration": 2, "mini_batches": 8, "backend": "fsdp"}
    assert list(found(train=one_sample, placement={"ranks": 2})) == ["train.mini_batches"]
    assert found(train={**one_sample, "tensor_parallel": 2}, placement={"ranks": 2}) == {}


@pytest.mark.parametrize("changed", [{"optimizer": "adam"}, {"kl_target": 0.1}, {"backend": "fsdp"}])
def test_another_training_is_another_run(changed: dict[str, Any]):
    assert config_digest(config(train=changed), {}) != config_digest(config(), {})


def test_the_same_training_on_other_ranks_is_the_same_run():
    assert config_digest(config(train={"tensor_parallel": 2}), {}) == config_digest(config(), {})
