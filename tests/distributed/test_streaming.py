"""Scoring beside generation, on Ray: it begins before generation ends, changes no number, and fails as it should."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine.batch import Batch
from engine.config import HttpReward, LengthPenaltyReward, PythonReward, RepetitionPenaltyReward, RunConfig
from engine.controller.cluster import cluster
from engine.controller.layout import PoolPlan
from engine.controller.local_group import LocalGroup
from engine.controller.mesh import Mesh
from engine.controller.pool import Pool
from engine.controller.ray_group import Builds, HostSet, RayGroup
from engine.controller.worker import Worker, WorkerContext
from engine.errors import ConfigError, TransientError, WorkerError
from engine.workers.cost import CostWorker
from engine.workers.reward import RewardWorker
from tests.helpers.streaming import HANG_S, Writer
from tests.unit.reward.service import honest, serving

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
CALL_S = 2 * HANG_S
SCORERS = "tests.unit.reward.functions"


def marked(**options: Any) -> PythonReward:
    return PythonReward(function=f"{SCORERS}:marks", needs_answer=False, **options)


def context(role: str, rank: int, ranks: int, *rewards: Any) -> WorkerContext:
    config = SimpleNamespace(reward=rewards, cost=rewards)
    return WorkerContext(role, rank, ranks, cast(RunConfig, config), Path())


@dataclass
class Cluster:
    """Roles of one test module, in pools of their own."""

    stack: ExitStack
    builds: Builds

    def role(self, name: str, worker: type[Worker], ranks: int, *rewards: Any) -> RayGroup:
        pool = self.stack.enter_context(Pool(name, PoolPlan(ranks, {"CPU": 0.1}), 1, CALL_S))
        shows = worker.shows_rows
        hosts = HostSet(name, pool, ranks, "streaming", CALL_S, self.builds, shows_rows=shows)
        self.stack.callback(hosts.close)
        hosts.add(worker, [context(name, rank, ranks, *rewards) for rank in range(ranks)])
        return RayGroup(name, hosts, Mesh(data=ranks))


@pytest.fixture(scope="module")
def on_ray(ray_address: str) -> Iterator[None]:
    os.environ["RAY_ADDRESS"] = ray_address
    with cluster("streaming"):
        del os.environ["RAY_ADDRESS"]
        yield


@pytest.fixture(scope="module")
def roles(on_ray: None) -> Iterator[Cluster]:
    """For roles that live as long as the module."""
    yield from _opened()


@pytest.fixture
def mortal(on_ray: None) -> Iterator[Cluster]:
    """For roles of one test, which may die."""
    yield from _opened()


def _opened() -> Iterator[Cluster]:
    with ExitStack() as stack:
        builds = Builds()
        stack.callback(builds.watch.close)
        yield Cluster(stack, builds)


@pytest.fixture(scope="module")
def writer(roles: Cluster) -> RayGroup:
    return roles.role("writer", Writer, 2)


@pytest.fixture(scope="module")
def reward(roles: Cluster) -> RayGroup:
    return roles.role("reward", RewardWorker, 1, marked())


def rows(*responses: str, extra: dict[int, dict[str, Any]] | None = None) -> Batch:
    """Prompts, and what is to be answered; extra: more of it by row."""
    count = len(responses)
    more = extra or {}
    extras = [{"response": text, **more.get(row, {})} for row, text in enumerate(responses)]
    fields = {
        "input_ids": torch.ones(count, 2, dtype=torch.int64),
        "prompt_lengths": torch.full((count,), 2),
    }
    return Batch(
        fields, {"prompt": [f"p{row}" for row in range(count)], "answer": [*map(str, range(count))], "extra": extras}
    )


def everything(batch: Batch) -> tuple[Any, ...]:
    return [repr(value) for value in batch.scores.tolist()], batch.columns


def waiting(folder: Path) -> Batch:
    """Prompts of which the first, which its rank writes last, waits for a mark that the scorer of the third makes."""
    mark = str(folder / "scored")
    return rows("abc", "", "ab", extra={0: {"wait_for": mark}, 2: {"mark": mark}})


def test_scoring_begins_before_generation_ends(writer: RayGroup, reward: RayGroup, tmp_path: Path) -> None:
    scored = reward.call(RewardWorker.score, writer.submit(Writer.generate, waiting(tmp_path)))
    assert repr(scored.scores.tolist()) == "[3.0, nan, 2.0]"


def test_costs_are_scored_beside_generation_as_well(writer: RayGroup, roles: Cluster, tmp_path: Path) -> None:
    cost = roles.role("cost", CostWorker, 1, marked())
    scored = cost.call(CostWorker.score, writer.submit(Writer.generate, waiting(tmp_path)))
    assert repr(scored.costs.tolist()) == "[3.0, nan, 2.0]"


def test_time_of_scoring_begins_when_generation_is_over(writer: RayGroup, reward: RayGroup) -> None:
    """What overlaps with generation costs a step nothing, and waiting for responses is no scoring."""
    reward.call(RewardWorker.score, writer.submit(Writer.generate, rows("a")))  # whatever is started once
    prompts = rows("a", "b", "c", extra={0: {"pause_s": 3.0}, 2: {"scoring_s": 0.5}})
    generated = writer.submit(Writer.generate, prompts)
    writer.take_seconds(), reward.take_seconds(), reward.take_spans()
    reward.call(RewardWorker.score, generated)
    generated.result()
    assert writer.take_seconds()["writer.generate"] > 3.0
    assert reward.take_seconds()["reward.score"] < 2.0
    (scored,) = reward.take_spans()
    assert scored.began > max(span.began for span in writer.take_spans()) + 2.5


@pytest.fixture(scope="module")
def kinds(roles: Cluster) -> Iterator[tuple[LocalGroup, RayGroup, RayGroup]]:
    """Scorers of all kinds that score samples one by one: in this process, on one rank and on two."""
    with serving(honest) as service:
        rewards = (
            LengthPenaltyReward(max_tokens=4, buffer_tokens=3),
            RepetitionPenaltyReward(ngram=1, unit="characters", weight=0.5),
            marked(workers=2),
            HttpReward(url=service.url, batch_size=2, retries=0),
        )
        local = LocalGroup(RewardWorker, context("reward", 0, 1, *rewards))
        one, two = (roles.role(f"kinds-{ranks}", RewardWorker, ranks, *rewards) for ranks in (1, 2))
        yield local, one, two
        local.close()


class TestTheSameResult:
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_as_in_one_process(
        self, kinds: tuple[LocalGroup, RayGroup, RayGroup], ranks: int, writer: RayGroup
    ) -> None:
        """Two writers; rules, a function and a service; rows that a component declines, and ranks without any row."""
        local, reward = kinds[0], kinds[ranks]
        for count in (1, 7):
            pauses = {row: {"pause_s": 0.2} for row in (0, 3)}  # so that rows come in several parts
            prompts = rows(*["0", "", "cc", "ddd", "4", "", "ffff"][:count], extra=pauses)
            expected = local.call(RewardWorker.score, _written(prompts))
            for method in (Writer.generate, Writer.generate_unseen):
                found = reward.submit(RewardWorker.score, writer.submit(method, prompts)).result()
                assert everything(found) == everything(expected)

    def test_of_two_generations_that_follow_each_other(self, writer: RayGroup, reward: RayGroup) -> None:
        """As for a greedy baseline: each score gets its own responses, also of a generation that is long over."""
        first, second = (writer.submit(Writer.generate, rows(*texts)) for texts in (["a"] * 5, ["bb"] * 3))
        scores = [reward.submit(RewardWorker.score, generated) for generated in (second, first)]
        assert [scored.result().scores.tolist() for scored in scores] == [[2.0] * 3, [1.0] * 5]


class TestFailures:
    def test_an_engine_that_dies_is_named_by_both(self, mortal: Cluster, reward: RayGroup, tmp_path: Path) -> None:
        """It dies while responses that it has finished are being scored; its end is noticed, and Ray tells the reward."""
        writer, mark = mortal.role("mortal", Writer, 2), str(tmp_path / "scored")
        prompts = rows("a", "b", "c", "d", extra={2: {"mark": mark}, 0: {"wait_for": mark, "die": True}})
        generated = writer.submit(Writer.generate, prompts)
        scores = reward.submit(RewardWorker.score, generated)
        with pytest.raises(TransientError, match=r"process of mortal ended.* during generate") as caught:
            generated.result()
        assert caught.value.where.items() >= {"role": "mortal", "rank": 0}.items()
        with pytest.raises(TransientError, match="result of generate is lost") as caught:
            scores.result()
        assert caught.value.where["role"] == "mortal"

    def test_an_error_of_the_engine_stays_its_own(self, writer: RayGroup, reward: RayGroup) -> None:
        generated = writer.submit(Writer.generate, rows("a", "b", "c", "d", extra={1: {"fail": True}}))
        with pytest.raises(WorkerError, match="generate raised ZeroDivisionError") as caught:
            reward.call(RewardWorker.score, generated)
        assert caught.value.where == {"role": "writer", "rank": 1}

    def test_a_scorer_that_returns_no_score_fails_with_role_and_rank(self, roles: Cluster, writer: RayGroup) -> None:
        """It has seen the faulty response before the last one is written."""
        faulty = PythonReward(function=f"{SCORERS}:text_for_one_character", needs_answer=False)
        wrong = roles.role("wrong", RewardWorker, 2, faulty)
        generated = writer.submit(Writer.generate, rows("aa", "aa", "aa", "a"))
        with pytest.raises(ConfigError, match="no score of sample 1") as caught:
            wrong.call(RewardWorker.score, generated)
        assert caught.value.where.items() >= {"role": "wrong", "rank": 1}.items()


def _written(prompts: Batch) -> Batch:
    """The same responses, made in this process."""
    return Writer(context("writer", 0, 1)).generate(prompts)
