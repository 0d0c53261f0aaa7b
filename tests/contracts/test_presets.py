"""Every preset is a whole configuration; those for GPUs fit the hardware they name, by the dry run that their header gives."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.loading import parse_config
from engine.offline_loading import is_offline, parse_offline
from engine.sizing import GIB
from tests.contracts.sources import ROOT
from tests.helpers.command import environment

PRESETS = ROOT / "deployments" / "presets"
GPU = sorted(path.stem for path in PRESETS.glob("gpu-*.yaml"))
SECONDS = 200


def command_of(name: str) -> list[str]:
    """The dry run in the header of a preset, without `hybridflow`."""
    (line,) = [
        line for line in (PRESETS / f"{name}.yaml").read_text().splitlines() if line.startswith("#   hybridflow ")
    ]
    return line.split()[2:]


def dry_run(name: str, *more: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "engine.cli", *command_of(name), "--json", *more]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=SECONDS)


@pytest.fixture(scope="module")
def planned() -> dict[str, dict[str, Any]]:
    """Name -> answer of its dry run, without a network, a GPU or weights."""
    answers = {}
    for name in GPU:
        done = dry_run(name)
        assert done.returncode == 0, done.stderr
        answers[name] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.parametrize("file", sorted(PRESETS.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_preset_has_no_faulty_option(file: Path):
    """Of what lies outside the repository only the model may be missing."""
    parsed = parse_offline(file) if is_offline(file) else parse_config(file, elsewhere=True)
    assert parsed.config is not None and {problem.key for problem in parsed.problems} <= {"model.source"}


def test_there_are_presets_for_one_eight_and_sixteen_gpus():
    assert GPU == ["gpu-16x-split-13b", "gpu-1x-grpo-1.5b", "gpu-8x-ppo-7b"]


EXPECTED = {
    # parameters N; devices of each pool; roles whose weights, gradients and optimiser state are checked: (bytes per
    # parameter with one rank, ranks they are divided by)
    "gpu-1x-grpo-1.5b": (1_543_714_304, {"shared": 1}, {"policy": 1, "reference": 1}),
    "gpu-8x-ppo-7b": (6_738_415_616, {"shared": 8}, {"policy": 8, "critic": 8, "reference": 8}),
    "gpu-16x-split-13b": (13_015_864_320, {"rollout": 8, "train": 8}, {"policy": 8, "reference": 8}),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_reported_sizes_are_those_worked_out_by_hand(name: str, planned: dict[str, dict[str, Any]]):
    count, pools, spread = EXPECTED[name]
    sizes = planned[name]["sizes"]
    assert sizes["architecture"]["parameters"] == count
    assert {pool: found["devices"] for pool, found in sizes["pools"].items()} == pools
    assert sizes["roles"].keys() == {*spread, "rollout"}
    for role, ranks in spread.items():
        memory, own = sizes["roles"][role], sizes["roles"][role]["parameters"]
        assert own == (count - 32_000 * 4096 + 4096 + 1 if role == "critic" else count)
        assert memory["weights"] == -(-2 * own // ranks)  # bfloat16
        trained = role != "reference"
        assert memory["gradients"] == trained * -(-4 * own // ranks)  # float32
        assert memory["optimiser"] == trained * -(-12 * own // ranks)  # two moments and the float32 master
    assert sizes["roles"]["rollout"]["weights"] == 2 * count


@pytest.mark.parametrize("name", EXPECTED)
def test_the_fullest_device_has_room_to_spare(name: str, planned: dict[str, dict[str, Any]]):
    sizes = planned[name]["sizes"]
    assert sizes["machine"]["gpu_bytes"] == 80 * GIB and sizes["notes"] == []
    assert all(pool["share"] <= 0.9 for pool in sizes["pools"].values())


def test_a_colocated_device_holds_engine_and_trainers_and_their_work_in_turn(planned: dict[str, dict[str, Any]]):
    sizes = planned["gpu-8x-ppo-7b"]["sizes"]
    trainers = [sizes["roles"][role] for role in ("policy", "critic", "reference")]
    held = sum(memory["total"] - memory["activations"] for memory in trainers)
    work = max(memory["activations"] for memory in trainers)
    engine = int(0.4 * 80 * GIB)
    assert sizes["pools"]["shared"]["bytes"] == engine + held + work + 2 * GIB  # one context per process


def test_optimiser_steps_and_disk(planned: dict[str, dict[str, Any]]):
    answer = planned["gpu-8x-ppo-7b"]
    assert answer["plan"]["optimiser_steps"] == (200 - 5) * 4, "the policy's: the critic warms up for five iterations"
    disk, count = answer["sizes"]["disk"], 6_738_415_616
    critic = count - 32_000 * 4096 + 4096 + 1
    assert disk["checkpoint"] == 14 * (count + critic) and disk["checkpoints"] == 2 + 1 + 1
    assert disk["total"] == 4 * disk["checkpoint"] + disk["experience"] + 2 * count


def test_a_device_that_is_too_small_is_refused_with_all_there_is_to_fix():
    done = dry_run(
        "gpu-8x-ppo-7b", "--set", "placement.device_memory_gib=24", "rollout.tensor_parallel=3", "train.foo=1"
    )
    assert done.returncode == 2 and done.stderr.count("error:") == 1
    for key in ("placement.device_memory_gib = 24.0", "rollout.tensor_parallel = 3", "train.foo"):
        assert key in done.stderr
    assert "pool shared" in done.stderr and "train.zero_stage" in done.stderr and "one of 1, 2, 4, 8" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["error"]["type"] == "ConfigError"
