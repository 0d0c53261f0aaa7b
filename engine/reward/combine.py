"""Reward: the weighted sum of all components, with every unscored sample counted and none invented."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import PythonReward, RewardConfig
from engine.errors import ConfigError, Problem, ShapeError, TransientError
from engine.reward.build import build_scorer
from engine.reward.canary import canary_finding
from engine.reward.scorer import Sample, Score, Scorer, Unscored

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """One sample that one component could not score."""

    index: int  # of the Sample
    component: str
    reason: str  # a traceback where there was one


@dataclass(frozen=True)
class Scored:
    """Scores of a list of samples, in its order; NaN = unscored."""

    scores: list[float]  # weighted sum; unscored as soon as one component is
    components: dict[str, list[float]]  # unweighted, by component
    failures: list[Failure]


@dataclass(frozen=True)
class _Component:
    name: str  # the kind, numbered from its second use on: regex, regex_2
    key: str  # where it stands in the configuration
    config: RewardConfig
    scorer: Scorer

    def problem(self, found: str) -> Problem:
        if isinstance(self.config, PythonReward):
            return Problem(f"{self.key}.function", self.config.function, found)
        return Problem(f"{self.key}.kind", self.config.kind, found)


class Reward:
    """Scores samples with every configured component. Owns the scorer processes: close it, or use it in a `with`.

    max_unscored_share: of the samples of one call; above it `score` raises.
    """

    def __init__(self, rewards: tuple[RewardConfig, ...], *, max_unscored_share: float) -> None:
        self.max_unscored_share = max_unscored_share
        kinds = [config.kind for config in rewards]
        self._components = [
            _Component(_unique(kinds, position), f"reward[{position}]", config, build_scorer(config))
            for position, config in enumerate(rewards)
        ]

    def __enter__(self) -> "Reward":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, samples: list[Sample]) -> Scored:
        """Scores, components and failures of the samples, in their order.

        Raises ConfigError if a function returns something that is no score, ShapeError if a scorer returns too many or
        too few, TransientError if more than `max_unscored_share` of the samples stay unscored.
        """
        components: dict[str, list[float]] = {}
        failures: list[Failure] = []
        for component in self._components:
            results = component.scorer.score(samples)
            _check_results(component, results, samples)
            components[component.name] = [math.nan if isinstance(one, Unscored) else one for one in results]
            failures += [
                Failure(sample.index, component.name, one.reason)
                for sample, one in zip(samples, results, strict=True)
                if isinstance(one, Unscored)
            ]
        weights = [component.config.weight for component in self._components]
        columns = zip(*components.values(), strict=True)
        scores = [sum(weight * one for weight, one in zip(weights, column, strict=True)) for column in columns]
        self._check_share(scores, failures)
        return Scored(scores, components, failures)

    def canary(self, samples: list[Sample]) -> None:
        """Score known-right and known-wrong responses to a few real rows through the real path, before training starts.

        samples: rows with their answers; their responses are not used.
        Raises ConfigError naming each component that fails.
        """
        problems: list[Problem] = []
        for component in self._components:
            if finding := canary_finding(component.config, component.scorer, samples):
                problems.append(component.problem(finding))
        if problems:
            raise ConfigError("The reward cannot score known answers:", problems=problems)

    def close(self) -> None:
        """Kill all scorer processes; returns when they are gone."""
        for component in self._components:
            component.scorer.close()

    def _check_share(self, scores: list[float], failures: list[Failure]) -> None:
        if not failures:
            return
        unscored = sum(math.isnan(score) for score in scores)
        first = failures[0]
        found = (
            f"{unscored} of {len(scores)} samples have no score; "
            f"the first is sample {first.index}, component {first.component}: {first.reason}"
        )
        if unscored > self.max_unscored_share * len(scores):
            raise TransientError(
                f"max_unscored_share allows {self.max_unscored_share:g}, but {found}",
                remedy="Mend the scorer, raise its timeout_s, or raise max_unscored_share; then resume the run.",
                role="reward",
            )
        log.warning("%s", found)


def _unique(kinds: Sequence[str], position: int) -> str:
    kind = kinds[position]
    earlier = kinds[:position].count(kind)
    return f"{kind}_{earlier + 1}" if earlier else kind


def _check_results(component: _Component, results: list[Score], samples: list[Sample]) -> None:
    if len(results) != len(samples):
        raise ShapeError(
            f"The reward component {component.name} was asked for {len(samples)} scores and returned {len(results)}.",
            remedy="A scorer returns exactly one entry per sample, in order.",
        )
    for sample, result in zip(samples, results, strict=True):
        if isinstance(result, Unscored) and result.cause == "type":
            raise ConfigError(
                f"A score of sample {sample.index} is no number:",
                problems=[component.problem(result.reason)],
            )
