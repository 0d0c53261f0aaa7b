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

VALUES = engine("batch", "config", "errors", "metrics", "offlineconfig", "seeds")
OFFLINE = engine("offlineconfig", "offline_checks", "offline_loading", "offline_preflight")  # runs on fixed rows
RAY_FILES = engine(*(f"controller.{name}" for name in ("cluster", "ray_group", "pool", "promise")))
BACKENDS = ("torch_train", "deepspeed_train", "fsdp_train", "vllm_rollout", "hf_rollout")
ANY_BACKEND = engine(*(f"backends.{name}" for name in BACKENDS))
STAND_ALONE = ("flows",)  # modules of these layers do not import their neighbours
STEPS = (
    "tasks.rollout",
    "tasks.train",
    "tasks.evaluate",
    "tasks.registry",
    "tasks.offline_steps",
)  # called by flows, never by other tasks


def backend(name: str) -> Layer:
    """A backend knows what backends share, and no other backend."""
    others = tuple(other for other in ANY_BACKEND if other != f"engine.backends.{name}")
    return Layer(ours=("engine.backends", *VALUES), never=(*others, "ray", *ORCHESTRATION))


LAYERS = {
    "flows": Layer(ours=("tasks", *engine("config", "offlineconfig")), never=("mlflow", *HEAVY)),
    "tasks": Layer(
        ours=(
            "tasks",
            *engine("session", "runs", "store", "preflight", "loading", "config", "errors", "data", "gguf"),
            *engine("guards", "leftovers", "outlook", "remote", "remote_store", "repair", "retention", "roots"),
            *OFFLINE,
            "engine.offline_session",
        ),
        never=(*STEPS, "ray", *ENGINES),
    ),
    "deployments": Layer(ours=("flows", "tasks", *engine("config", "errors")), never=HEAVY),
    # The command is the top: it may import anything of ours, inside the functions that need it.
    "engine.cli": Layer(ours=("engine", "flows", "tasks"), never=(*HEAVY, *ORCHESTRATION)),
    "engine.commands": Layer(ours=("engine", "flows", "tasks"), never=("ray", *ENGINES)),
    "engine.display": Layer(ours=VALUES, never=(*HEAVY, *ORCHESTRATION)),
    # From a file to a checked configuration: importable without torch.
    "engine.preflight": Layer(
        ours=engine(
            "architecture",
            "capacity",
            "checks",
            "config",
            "data",
            "errors",
            "loading",
            "remote",
            "roots",
            "sizing",
            "trainchecks",
        ),
        never=(*HEAVY, *ORCHESTRATION),
    ),
    "engine.capacity": Layer(ours=engine("architecture", "config", "errors", "roots", "sizing"), only=()),
    "engine.sizing": Layer(ours=engine("architecture", "config"), only=()),
    "engine.architecture": Layer(ours=("engine.errors",), only=()),
    "engine.offline_preflight": Layer(
        ours=(*engine("architecture", "data", "errors", "loading", "remote", "trainchecks"), *OFFLINE),
        never=(*HEAVY, *ORCHESTRATION),
    ),
    "engine.offline_loading": Layer(
        ours=engine("loading", "offline_checks", "offlineconfig"), never=(*HEAVY, *ORCHESTRATION)
    ),
    "engine.offline_checks": Layer(ours=engine("commonchecks", "errors", "offlineconfig", "trainchecks"), only=()),
    "engine.commonchecks": Layer(ours=engine("errors", "offlineconfig", "roots"), only=()),
    "engine.loading": Layer(
        ours=engine("checks", "config", "data.sources", "errors", "explain", "roots", "trainconfig", "yamlfile"),
        never=(*HEAVY, *ORCHESTRATION),
    ),
    "engine.checks": Layer(
        ours=engine(
            "algorithmchecks",
            "commonchecks",
            "config",
            "controller.layout",
            "errors",
            "graph",
            "placement_checks",
            "planner",
            "reward.checks",
            "trainchecks",
        ),
        never=(*HEAVY, *ORCHESTRATION),
    ),
    "engine.placement_checks": Layer(
        ours=engine("config", "controller.layout", "errors", "graph"), never=(*HEAVY, *ORCHESTRATION)
    ),
    "engine.algorithmchecks": Layer(ours=engine("config", "errors"), only=()),
    "engine.trainchecks": Layer(ours=engine("config", "controller.layout", "errors"), only=()),
    "engine.explain": Layer(
        ours=engine("config", "errors", "trainconfig", "yamlfile"), only=("pydantic", "pydantic_core")
    ),
    "engine.yamlfile": Layer(ours=("engine.errors",), only=("yaml",)),
    "engine.environment": Layer(ours=engine("config", "errors", "offlineconfig"), only=()),
    # The session and what it is made of.
    "engine.session": Layer(ours=("engine",), never=("engine.cli", *ANY_BACKEND, *PLAIN)),
    "engine.offline_session": Layer(ours=("engine",), never=("engine.cli", *ANY_BACKEND, *PLAIN)),
    "engine.offline_placement": Layer(
        ours=(*VALUES, *engine("runs", "placed", "controller", "dataflows", "workers")), never=PLAIN
    ),
    "engine.placed": Layer(ours=(), only=()),
    "engine.placement": Layer(
        ours=(*VALUES, *engine("runs", "graph", "placed", "planner", "controller", "dataflows", "workers")), never=PLAIN
    ),
    "engine.handover": Layer(
        ours=(*VALUES, *engine("backends", "controller", "dataflows", "workers")), never=(*ANY_BACKEND, *PLAIN)
    ),
    "engine.evaluation": Layer(ours=(*VALUES, *engine("data", "dataflows", "experience", "workers")), never=PLAIN),
    "engine.device_memory": Layer(ours=engine("config", "errors"), only=()),
    "engine.guards": Layer(ours=engine("config", "errors", "metrics"), only=()),
    "engine.experience": Layer(ours=(*VALUES, *engine("data", "store", "unscored", "writing")), never=PLAIN),
    "engine.unscored": Layer(ours=engine("batch", "errors", "writing"), never=PLAIN),
    # What runs, from the loop down to the libraries.
    "engine.dataflows": Layer(
        ours=(*VALUES, *engine("algorithms", "controller", "workers", "data.completions")), never=(*RAY_FILES, *PLAIN)
    ),
    "engine.workers": Layer(
        ours=(
            *VALUES,
            *engine(
                "algorithms",
                "backends",
                "controller.dispatch",
                "controller.layout",
                "controller.mesh",
                "controller.stream",
                "controller.worker",
                "data.templating",
                "reward",
                "writing",
            ),
        ),
        never=(*ANY_BACKEND, *PLAIN),
    ),
    "engine.backends": Layer(ours=(*VALUES, "engine.trainchecks"), never=(*ANY_BACKEND, *PLAIN)),
    "engine.backends.exchange": Layer(ours=(), only=()),
    **{f"engine.backends.{name}": backend(name) for name in BACKENDS},
    "engine.backends.transfer_broadcast": backend("vllm_rollout"),  # the sender's end of vLLM's transfer
    "engine.backends.deepspeed_state": backend("deepspeed_train"),
    "engine.backends.trainers": Layer(ours=("engine.backends", *VALUES), never=PLAIN),  # name -> trainer
    "engine.backends.engines": Layer(ours=("engine.backends", *VALUES), never=PLAIN),  # name -> sampler
    "engine.controller": Layer(
        ours=(*VALUES, *engine("backends.device", "graph", "utilisation")), never=("transformers", *PLAIN)
    ),
    # Plain data about ranks and processes: importable without torch.
    "engine.controller.mesh": Layer(ours=("engine.errors",), only=()),
    "engine.controller.layout": Layer(ours=engine("config", "errors", "graph"), only=()),
    "engine.controller.cluster": Layer(ours=("engine.errors",), never=("transformers", *ENGINES, *ORCHESTRATION)),
    "engine.controller.ray_group": Layer(
        ours=(*VALUES, "engine.graph", "engine.controller"), never=("transformers", *ENGINES, *ORCHESTRATION)
    ),
    "engine.controller.promise": Layer(
        ours=(*VALUES, "engine.controller"), never=("transformers", *ENGINES, *ORCHESTRATION)
    ),
    "engine.controller.watch": Layer(ours=(), only=("psutil",)),
    "engine.controller.pool": Layer(
        ours=(*VALUES, "engine.graph", "engine.controller"), never=("transformers", *ENGINES, *ORCHESTRATION)
    ),
    "engine.reward": Layer(ours=engine("config", "errors"), never=(*HEAVY, *ORCHESTRATION)),
    "engine.data": Layer(ours=engine("config", "errors", "offlineconfig"), never=(*HEAVY, *ORCHESTRATION)),
    "engine.resharding": Layer(ours=("engine.errors",), only=("torch",)),
    # Plain data about where and when things run: importable without torch.
    "engine.resharding.layout": Layer(ours=("engine.errors",), only=()),
    "engine.resharding.plan": Layer(ours=engine("errors", "resharding.layout"), only=()),
    "engine.planner": Layer(ours=engine("config", "errors", "graph"), never=("transformers", *HEAVY, *ORCHESTRATION)),
    "engine.graph": Layer(ours=engine("config", "errors"), never=("transformers", *HEAVY, *ORCHESTRATION)),
    # The run directory.
    "engine.retention": Layer(ours=engine("config", "errors", "store"), never=(*HEAVY, *ORCHESTRATION)),
    "engine.runs": Layer(
        ours=engine("config", "errors", "offlineconfig", "remote_store", "roots", "store"),
        never=(*HEAVY, *ORCHESTRATION),
    ),
    "engine.outlook": Layer(ours=engine("offlineconfig", "store"), only=()),
    "engine.repair": Layer(
        ours=engine("errors", "remote_lease", "remote_store", "runs"), never=(*HEAVY, *ORCHESTRATION)
    ),
    "engine.leftovers": Layer(
        ours=engine("backends.exchange", "errors", "lease", "roots"), never=(*HEAVY, *ORCHESTRATION)
    ),
    "engine.store": Layer(ours=engine("config", "errors", "lease"), never=(*HEAVY, *ORCHESTRATION)),
    "engine.remote_store": Layer(
        ours=engine("errors", "remote", "remote_lease", "roots", "store", "survey"), never=(*HEAVY, *ORCHESTRATION)
    ),
    "engine.survey": Layer(ours=engine("errors", "remote", "store"), only=()),
    "engine.remote_lease": Layer(ours=engine("errors", "lease", "remote", "roots"), only=()),
    "engine.remote": Layer(ours=engine("errors", "roots"), only=("fsspec",)),
    "engine.roots": Layer(ours=("engine.errors",), only=()),
    "engine.writing": Layer(ours=("engine.errors",), only=("safetensors",)),
    "engine.lease": Layer(ours=("engine.errors",), only=("psutil",)),
    # Values and pure functions.
    "engine.gguf": Layer(ours=("engine.errors",), only=("torch", "transformers", "gguf")),
    "engine.algorithms": Layer(ours=("engine.errors",), only=("torch",)),
    "engine.batch": Layer(ours=("engine.errors",), only=("torch", "safetensors", "numpy")),
    "engine.seeds": Layer(ours=("engine.errors",), only=("torch",)),
    "engine.utilisation": Layer(ours=engine("architecture", "metrics"), only=()),
    "engine.metrics": Layer(ours=("engine.errors",), only=()),
    "engine.config": Layer(
        ours=engine("algorithmconfig", "errors", "rewardconfig", "trainconfig"),
        only=("pydantic", "pydantic_core", "yaml"),
    ),
    "engine.offlineconfig": Layer(ours=engine("config", "trainconfig"), only=("pydantic",)),
    "engine.algorithmconfig": Layer(ours=("engine.trainconfig",), only=("pydantic",)),
    "engine.rewardconfig": Layer(ours=("engine.trainconfig",), only=("pydantic",)),
    "engine.trainconfig": Layer(ours=(), only=("pydantic", "pydantic_core")),
    "engine.errors": Layer(ours=(), only=()),
}

# A heavy library has one home. Everything else reaches it through that file.
HOMES = {
    "ray": RAY_FILES,
    "vllm": engine("backends.vllm_rollout", "backends.transfer_broadcast"),
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
