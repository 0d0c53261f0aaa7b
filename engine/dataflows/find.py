"""From the name of an algorithm to its dataflow: a file of this package, or a module of the user's own."""

import importlib
from typing import Protocol, cast

from pydantic import ValidationError

from engine.batch import Batch
from engine.config import CustomConfig, RunConfig
from engine.dataflows.roles import Learned, Progress, Roles
from engine.errors import ConfigError, Problem


class Dataflow(Protocol):
    """The two halves of an iteration; between them the experience is committed."""

    def make_experience(self, roles: Roles, prompts: Batch, config: RunConfig) -> Batch:
        """Generate, score and whatever else learning needs."""

    def learn(self, roles: Roles, batch: Batch, config: RunConfig, progress: Progress) -> Learned:
        """Advantages on the controller and one update call per trained role."""


def find_dataflow(config: RunConfig) -> Dataflow:
    """The dataflow of the run's algorithm. Raises ConfigError for one of the user's own that cannot be used."""
    algorithm = config.algorithm
    if not isinstance(algorithm, CustomConfig):
        return cast(Dataflow, importlib.import_module(f"engine.dataflows.{algorithm.name}"))
    try:
        module = importlib.import_module(algorithm.dataflow)
    except ModuleNotFoundError as error:
        remedy = f"{error}; put its folder on PYTHONPATH, or install what it imports"
        raise _refused("algorithm.dataflow", algorithm.dataflow, remedy) from error
    if missing := [name for name in ("make_experience", "learn") if not callable(vars(module).get(name))]:
        raise _refused("algorithm.dataflow", algorithm.dataflow, f"has no function {' and no '.join(missing)}")
    options = vars(module).get("Options")
    if options is None:
        if algorithm.options:
            raise _refused("algorithm.options", sorted(algorithm.options), f"{module.__name__} has no class Options")
        return cast(Dataflow, module)
    try:
        options.model_validate(algorithm.options)
    except ValidationError as error:
        problems = [
            Problem(".".join(("algorithm.options", *map(str, one["loc"]))), one["input"], one["msg"])
            for one in error.errors()
        ]
        raise ConfigError("The options of the dataflow do not fit:", problems=problems) from error
    return cast(Dataflow, module)


def _refused(key: str, value: object, remedy: str) -> ConfigError:
    return ConfigError("The dataflow cannot be used:", problems=[Problem(key, value, remedy)])
