"""The import table: which layer may import what. A new module needs a row, a new exception a reason."""

from dataclasses import dataclass

from tests.contracts.sources import inside


@dataclass(frozen=True)
class Layer:
    """What one layer may import.

    ours: our packages, besides the layer itself; never: what it must not import, whatever `ours` says;
    only: if given, the only libraries beside the standard library that it may import.
    """

    ours: tuple[str, ...]
    never: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None


def engine(*names: str) -> tuple[str, ...]:
    return tuple(f"engine.{name}" for name in names)


ORCHESTRATION = ("prefect", "mlflow")
ENGINES = ("vllm", "deepspeed")
HEAVY = ("torch", "ray", *ENGINES)
PLAIN = ("ray", *ENGINES, *ORCHESTRATION)  # what most of the engine must not import

VALUES = engine("batch", "config", "errors", "metrics", "seeds")
RAY_FILES = engine("controller.ray_group", "controller.pool")
BACKENDS = ("torch_train", "deepspeed_train", "fsdp_train", "vllm_rollout", "hf_rollout")
ANY_BACKEND = engine(*(f"backends.{name}" for name in BACKENDS))
STAND_ALONE = ("flows",)  # modules of these layers do not import their neighbours
STEPS = ("tasks.rollout", "tasks.train", "tasks.evaluate", "tasks.registry")  # called by flows, never by other tasks


def backend(name: str) -> Layer:
    """A backend knows what backends share, and no other backend."""
    others = tuple(other for other in ANY_BACKEND if other != f"engine.backends.{name}")
    return Layer(ours=("engine.backends", *VALUES), never=(*others, "ray", *ORCHESTRATION))


LAYERS = {
    "flows": Layer(ours=("tasks", "engine.config"), never=("mlflow", *HEAVY)),
    "tasks": Layer(
        ours=("tasks", *engine("session", "runs", "store", "loading", "config", "errors", "data", "gguf")),
        never=(*STEPS, "ray", *ENGINES),
    ),
    "deployments": Layer(ours=("flows", "tasks", *engine("config", "errors")), never=HEAVY),
    # The command is the top: it may import anything of ours, inside the functions that need it.
    "engine.cli": Layer(ours=("engine", "flows", "tasks"), never=(*HEAVY, *ORCHESTRATION)),
    "engine.commands": Layer(ours=("engine", "flows", "tasks"), never=("ray", *ENGINES)),
    "engine.display": Layer(ours=VALUES, never=(*HEAVY, *ORCHESTRATION)),
    # From a file to a checked configuration: importable without torch.
    "engine.preflight": Layer(
        ours=engine("checks", "config", "data", "errors", "loading"), never=(*HEAVY, *ORCHESTRATION)
    ),
    "engine.loading": Layer(
        ours=engine("checks", "config", "data.sources", "errors", "explain", "yamlfile"), never=(*HEAVY, *ORCHESTRATION)
    ),
    "engine.checks": Layer(
        ours=engine("config", "errors", "graph", "planner", "reward.checks"), never=(*HEAVY, *ORCHESTRATION)
    ),
    "engine.explain": Layer(ours=engine("config", "errors", "yamlfile"), only=("pydantic", "pydantic_core")),
    "engine.yamlfile": Layer(ours=("engine.errors",), only=("yaml",)),
    "engine.environment": Layer(ours=engine("config", "errors"), only=()),
    # The session and what it is made of.
    "engine.session": Layer(ours=("engine",), never=("engine.cli", *ANY_BACKEND, *PLAIN)),
    "engine.placement": Layer(
        ours=(*VALUES, *engine("runs", "graph", "planner", "controller", "dataflows", "workers")), never=PLAIN
    ),
    "engine.evaluation": Layer(ours=(*VALUES, *engine("data", "dataflows", "experience", "workers")), never=PLAIN),
    "engine.experience": Layer(ours=(*VALUES, *engine("data", "store")), never=PLAIN),
    # What runs, from the loop down to the libraries.
    "engine.dataflows": Layer(
        ours=(*VALUES, *engine("algorithms", "controller", "workers", "data.completions")), never=(*RAY_FILES, *PLAIN)
    ),
    "engine.workers": Layer(
        ours=(
            *VALUES,
            *engine("algorithms", "backends", "controller.dispatch", "controller.worker", "data.templating", "reward"),
        ),
        never=(*ANY_BACKEND, *PLAIN),
    ),
    "engine.backends": Layer(ours=VALUES, never=(*ANY_BACKEND, *PLAIN)),
    **{f"engine.backends.{name}": backend(name) for name in BACKENDS},
    "engine.backends.deepspeed_state": backend("deepspeed_train"),
    "engine.backends.trainers": Layer(ours=("engine.backends", *VALUES), never=PLAIN),  # name -> trainer
    "engine.backends.engines": Layer(ours=("engine.backends", *VALUES), never=PLAIN),  # name -> sampler
    "engine.controller": Layer(ours=(*VALUES, "engine.graph"), never=("transformers", *PLAIN)),
    "engine.controller.ray_group": Layer(
        ours=(*VALUES, "engine.graph", "engine.controller"), never=("transformers", *ENGINES, *ORCHESTRATION)
    ),
    "engine.controller.pool": Layer(
        ours=(*VALUES, "engine.graph", "engine.controller"), never=("transformers", *ENGINES, *ORCHESTRATION)
    ),
    "engine.reward": Layer(ours=engine("config", "errors"), never=(*HEAVY, *ORCHESTRATION)),
    "engine.data": Layer(ours=engine("config", "errors"), never=(*HEAVY, *ORCHESTRATION)),
    # Plain data about where and when things run: importable without torch.
    "engine.planner": Layer(ours=engine("config", "errors", "graph"), never=("transformers", *HEAVY, *ORCHESTRATION)),
    "engine.graph": Layer(ours=engine("config", "errors"), never=("transformers", *HEAVY, *ORCHESTRATION)),
    # The run directory.
    "engine.retention": Layer(ours=engine("config", "errors", "store"), never=(*HEAVY, *ORCHESTRATION)),
    "engine.runs": Layer(ours=engine("config", "errors", "store", "lease"), never=(*HEAVY, *ORCHESTRATION)),
    "engine.store": Layer(ours=engine("config", "errors", "lease"), never=(*HEAVY, *ORCHESTRATION)),
    "engine.lease": Layer(ours=("engine.errors",), only=("psutil", "fsspec")),
    # Values and pure functions.
    "engine.gguf": Layer(ours=("engine.errors",), only=("torch", "transformers", "gguf")),
    "engine.algorithms": Layer(ours=("engine.errors",), only=("torch",)),
    "engine.batch": Layer(ours=("engine.errors",), only=("torch", "safetensors", "numpy")),
    "engine.seeds": Layer(ours=("engine.errors",), only=("torch",)),
    "engine.metrics": Layer(ours=("engine.errors",), only=()),
    "engine.config": Layer(ours=("engine.errors",), only=("pydantic", "pydantic_core", "yaml")),
    "engine.errors": Layer(ours=(), only=()),
}

# A heavy library has one home. Everything else reaches it through that file.
HOMES = {
    "ray": RAY_FILES,
    "vllm": engine("backends.vllm_rollout"),
    "deepspeed": engine("backends.deepspeed_train", "backends.deepspeed_state"),
    "mlflow": ("tasks", "deployments", "engine.commands"),
    "prefect": ("flows", "tasks", "deployments", "engine.commands"),
}


def layer_of(module: str) -> str | None:
    """The most specific row of the table for a module; None if there is none."""
    rows = [row for row in LAYERS if inside(module, (row,))]
    return max(rows, key=len, default=None)


def may_import(module: str, row: str, name: str) -> bool:
    """Whether a module of a layer may import one of our names."""
    own = module if row in STAND_ALONE else row
    return inside(name, (*LAYERS[row].ours, own))
