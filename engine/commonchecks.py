"""Rules between options that every kind of run has (data, checkpoints, registry, root), and how rules are applied."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

from engine.errors import Problem
from engine.offlineconfig import AnyConfig
from engine.roots import is_remote, root_problem

C = TypeVar("C")
Rule = tuple[Callable[[C], Iterator[Problem]], tuple[str, ...]]  # a rule with the options it reads


def apply_rules(rules: Sequence[Rule[C]], config: C, unknown: Collection[str]) -> list[Problem]:
    """What the rules find; those that read an unknown option, whose value means nothing, are left out."""
    known = (rule for rule, keys in rules if not any(overlap(key, name) for key in keys for name in unknown))
    return [problem for rule in known for problem in rule(config)]


def overlap(key: str, name: str) -> bool:
    """Whether one of two options is the other, or contains it."""
    long, short = (key, name) if len(key) >= len(name) else (name, key)
    return long == short or long.startswith((f"{short}.", f"{short}["))


def _retention(config: AnyConfig) -> Iterator[Problem]:
    checkpoint = config.checkpoint
    if config.evaluation.every is None and "keep_best" in checkpoint.model_fields_set and checkpoint.keep_best > 0:
        remedy = "nothing is scored between start and end; set evaluation.every, or leave it out"
        yield Problem("checkpoint.keep_best", checkpoint.keep_best, remedy)


def _unused_data(config: AnyConfig) -> Iterator[Problem]:
    data = config.data
    if data.eval and "eval_fraction" in data.model_fields_set:
        yield Problem(
            "data.eval_fraction", data.eval_fraction, "has no use where data.eval is given; remove one of the two"
        )
    if data.bad_lines == "error" and "max_bad_share" in data.model_fields_set:
        yield Problem("data.max_bad_share", data.max_bad_share, "needs data.bad_lines: skip; set that, or leave it out")


def _secrets(config: AnyConfig) -> Iterator[Problem]:
    uri = config.registry.tracking_uri if config.registry else None
    if uri and (password := urlsplit(uri).password):
        remedy = "holds a password, which would be kept in run.json; give it by MLFLOW_TRACKING_PASSWORD instead"
        yield Problem("registry.tracking_uri", uri.replace(password, "***"), remedy)


def _root(config: AnyConfig) -> Iterator[Problem]:
    if is_remote(config.root) and (problem := root_problem(config.root)) is not None:
        yield problem


def _registry_address(config: AnyConfig) -> Iterator[Problem]:
    if is_remote(config.root) and config.registry is not None and config.registry.tracking_uri is None:
        remedy = (
            "MLflow's SQLite file cannot lie on object storage; give the address of an MLflow server, or a file here"
        )
        yield Problem("registry.tracking_uri", None, f"{remedy} (sqlite:///FILE)")


COMMON_RULES: tuple[Rule[AnyConfig], ...] = (
    (_retention, ("checkpoint.keep_best", "evaluation.every")),
    (_unused_data, ("data",)),
    (_root, ("root",)),
    (_registry_address, ("root", "registry")),
    (_secrets, ("registry",)),
)
