"""Reward: the weighted sum of all components, with every unscored sample counted and none invented."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.config import HttpReward, JudgeReward, PythonReward, RewardConfig, component_names
from engine.errors import ConfigError, Problem, ShapeError
from engine.reward.build import build_scorer
from engine.reward.canary import canary_finding
from engine.reward.scorer import FAULTS, Sample, Score, Scorer, Unscored
from engine.reward.threads import side_by_side

LARGEST = 3.4028234663852886e38  # of float32, in which scores travel


@dataclass(frozen=True)
class Failure:
    """One sample that one component could not score."""

    index: int  # of the Sample
    component: str  # or "sum", of all of them
    reason: str  # a traceback where there was one


@dataclass(frozen=True)
class Scored:
    """Scores of a list of samples, in its order; NaN = unscored."""

    scores: list[float]  # weighted sum; unscored as soon as one component is that weighs anything
    components: dict[str, list[float]]  # unweighted, by component
    failures: list[Failure]


@dataclass(frozen=True)
class _Component:
    name: str  # the kind, numbered from its second use on: regex, regex_2
    key: str  # where it stands in the configuration
    config: RewardConfig
    scorer: Scorer

    def problem(self, found: str) -> Problem:
        match self.config:
            case PythonReward():
                return Problem(f"{self.key}.function", self.config.function, found)
            case HttpReward():
                return Problem(f"{self.key}.url", self.config.url, found)
            case JudgeReward():
                return Problem(f"{self.key}.base_url", self.config.base_url, found)
            case _:
                return Problem(f"{self.key}.kind", self.config.kind, found)


class Reward:
    """Scores samples with every configured component. Owns the scorer processes: close it, or use it in a `with`.

    Components work side by side: each waits for its own processes or service. section: of the configuration, for messages;
    models: scorers of the entries that are reward models, by position.
    """

    def __init__(
        self,
        rewards: tuple[RewardConfig, ...],
        section: str = "reward",
        *,
        models: Mapping[int, Scorer] | None = None,
    ) -> None:
        self._section = section
        names, given = component_names(rewards), models or {}
        self._components = [
            _Component(
                names[position],
                f"{section}[{position}]",
                config,
                given[position] if position in given else build_scorer(config),
            )
            for position, config in enumerate(rewards)
        ]

    def __enter__(self) -> "Reward":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, samples: Iterable[Sample]) -> Scored:
        """Scores, components and failures of the samples, in their order.

        samples: gone through once for each component and once more, always in the same order; they may arrive while those
        before them are scored.

        Raises ConfigError if a function returns something that is no score or a service refuses to answer, ShapeError if
        a scorer returns too many or too few.
        """
        components: dict[str, list[float]] = {}
        failures: list[Failure] = []
        every = len(self._components)
        found = side_by_side(lambda component: component.scorer.score(samples), self._components, at_once=every)
        samples = list(samples)
        for component, results in zip(self._components, found, strict=True):
            _check_results(component, results, samples)
            components[component.name] = [math.nan if isinstance(one, Unscored) else one for one in results]
            failures += [
                Failure(sample.index, component.name, one.reason)
                for sample, one in zip(samples, results, strict=True)
                if isinstance(one, Unscored)
            ]
        weights = [component.config.weight for component in self._components]
        columns = zip(*components.values(), strict=True)
        scores = [
            sum(weight * one for weight, one in zip(weights, column, strict=True) if weight)  # 0 times NaN is no gap
            for column in columns
        ]
        for place, score in enumerate(scores):
            if abs(score) > LARGEST:
                reason = f"the weighted sum of {self._section} is {score:g}, beyond what float32 holds"
                failures.append(Failure(samples[place].index, "sum", reason))
                scores[place] = math.nan
        return Scored(scores, components, failures)

    def canary(self, samples: list[Sample]) -> None:
        """Score known-right and known-wrong responses to a few real rows through the real path, before training starts.

        samples: rows with their answers; their responses are not used.
        Raises ConfigError naming each component that fails, TransientError if a service cannot be reached.
        """
        every = len(self._components)
        findings = side_by_side(
            lambda one: canary_finding(one.config, one.scorer, samples), self._components, at_once=every
        )
        both = zip(self._components, findings, strict=True)
        problems = [component.problem(finding) for component, finding in both if finding]
        if problems:
            raise ConfigError(f"The {self._section} cannot score known answers:", problems=problems)

    def close(self) -> None:
        """Kill all scorer processes; returns when they are gone."""
        for component in self._components:
            component.scorer.close()


def _check_results(component: _Component, results: list[Score], samples: list[Sample]) -> None:
    if len(results) != len(samples):
        raise ShapeError(
            f"The reward component {component.name} was asked for {len(samples)} scores and returned {len(results)}.",
            remedy="A scorer returns exactly one entry per sample, in order.",
        )
    for sample, result in sorted(zip(samples, results, strict=True), key=lambda pair: pair[0].index):
        if isinstance(result, Unscored) and result.cause in FAULTS:
            raise ConfigError(
                f"There is no score of sample {sample.index}, and there would be none at another attempt:",
                problems=[component.problem(result.reason)],
            )
