"""The layers of the project hold: who imports whom, where heavy libraries live, what stays light to import."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.contracts.layers import HEAVY, HOMES, LAYERS, ORCHESTRATION, layer_of, may_import
from tests.contracts.sources import PACKAGES, ROOT, imports, inside, module_name, python_files, relative, syntax

FILES = python_files(*PACKAGES)
SECONDS_FOR_ONE_IMPORT = 120


def with_names(path: Path) -> list[tuple[str, str]]:
    """(file:line, dotted name) of every import of a file."""
    return [(f"{relative(path)}:{line}", name) for line, name in imports(syntax(path))]


def test_every_module_has_a_row_in_the_import_table():
    packages = {name for name in PACKAGES if name not in LAYERS} | {"engine"}
    without = [module_name(path) for path in FILES if layer_of(module_name(path)) is None]
    assert not set(without) - packages, "add a row to LAYERS in tests/contracts/layers.py"


def test_a_layer_imports_only_the_layers_of_its_row():
    wrong = []
    for path in FILES:
        module = module_name(path)
        row = layer_of(module)
        ours = [(place, name) for place, name in with_names(path) if inside(name, PACKAGES)]
        wrong += [f"{place} imports {name}" for place, name in ours if row is None or not may_import(module, row, name)]
    assert not wrong, "\n".join(wrong)


def test_a_layer_imports_none_of_the_libraries_it_must_not_know():
    wrong = []
    for path in FILES:
        row = layer_of(module_name(path))
        never = LAYERS[row].never if row else HEAVY
        wrong += [f"{place} imports {name}" for place, name in with_names(path) if inside(name, never)]
    assert not wrong, "\n".join(wrong)


def test_pure_layers_import_only_their_named_libraries():
    wrong = []
    for path in FILES:
        row = layer_of(module_name(path))
        only = LAYERS[row].only if row else ()
        if only is None:
            continue
        allowed = (*sys.stdlib_module_names, *PACKAGES, *only)
        wrong += [f"{place} imports {name}" for place, name in with_names(path) if not inside(name, allowed)]
    assert not wrong, "\n".join(wrong)


def refused(module: str, name: str) -> bool:
    row = layer_of(module)
    return (
        row is None or inside(name, LAYERS[row].never) or (inside(name, PACKAGES) and not may_import(module, row, name))
    )


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("flows.rlhf", "engine.session"),
        ("flows.rlhf", "flows.sft"),
        ("tasks.registry", "tasks.train"),
        ("tasks.rollout", "engine.workers.policy"),
        ("engine.dataflows.grpo", "engine.controller.ray_group"),
        ("engine.workers.rollout", "engine.backends.vllm_rollout"),
        ("engine.backends.fsdp_train", "engine.backends.torch_train"),
        ("engine.backends.modelling", "engine.backends.torch_train"),
        ("engine.graph.logical", "engine.planner"),
        ("engine.graph.logical", "torch"),
        ("engine.algorithms.losses", "engine.config"),
        ("engine.session", "mlflow"),
        ("engine.anything", "engine.errors"),
    ],
)
def test_the_table_refuses(module: str, name: str):
    assert refused(module, name)


@pytest.mark.parametrize("library", HOMES)
def test_a_heavy_library_is_imported_only_at_home(library: str):
    wrong = [
        f"{place} imports {name}"
        for path in FILES
        if not inside(module_name(path), HOMES[library])
        for place, name in with_names(path)
        if inside(name, (library,))
    ]
    assert not wrong, "\n".join(wrong)


def test_product_code_never_imports_tests_or_benchmarks():
    wrong = [
        f"{place} imports {name}"
        for path in FILES
        for place, name in with_names(path)
        if inside(name, ("tests", "benchmarks"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "module",
    [
        "engine.config",
        "engine.loading",
        "engine.checks",
        "engine.cli",
        "engine.preflight",
        "engine.offline_preflight",
        "engine.resharding.plan",
    ],
)
def test_importing_a_light_module_loads_no_heavy_library(module: str):
    heavy = HEAVY + ORCHESTRATION
    program = (
        f"import importlib, pkgutil, sys\n"
        f"package = importlib.import_module({module!r})\n"
        f"for part in pkgutil.walk_packages(getattr(package, '__path__', ()), {module!r} + '.'):\n"
        f"    importlib.import_module(part.name)\n"
        f"print([name for name in {heavy!r} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS_FOR_ONE_IMPORT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", f"import {module} loads {done.stdout.strip()}"
