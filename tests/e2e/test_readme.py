"""The README's commands are run as they stand, with the smoke run in place of the quickstart."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import ROOT, hybridflow

pytestmark = pytest.mark.timeout(900)
README = (ROOT / "README.md").read_text()
PROGRAM = ".venv/bin/hybridflow "


def commands(start: str) -> list[str]:
    """Lines of the README's bash blocks that begin with this word, without their comments."""
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith(start)]


def arguments(command: str) -> list[str]:
    """What the README says, about the smoke run, with paths that hold anywhere."""
    text = command.removeprefix(PROGRAM).replace("quickstart", "smoke").replace("RUN_KEY", "smoke-1")
    return shlex.split(text.replace("deployments/", f"{ROOT}/deployments/").replace("--version 3", "--version 1"))


def test_the_readme_names_every_make_target_that_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = {command.split()[1] for command in commands("make ")}
    assert named == {"quickstart", "test"}
    assert all(f"\n{target}: $(READY)" in makefile for target in named)


@pytest.mark.parametrize("command", [c for c in commands(PROGRAM) if " rollback " not in c and "SOURCE" not in c])
def test_a_command_of_the_readme_works(command: str, smoke_result: dict[str, Any], smoke_folder: Path) -> None:
    assert hybridflow(*arguments(command), cwd=smoke_folder).strip()


def test_rollback_without_a_previous_champion_says_so(smoke_result: dict[str, Any], smoke_folder: Path) -> None:
    (command,) = [c for c in commands(PROGRAM) if " rollback " in c]
    hybridflow(*arguments(command), cwd=smoke_folder, code=2)
    assert "previous" in (smoke_folder / "command.err").read_text()


def test_every_file_that_the_readme_links_to_is_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if not link.startswith("http")]
    missing = [link for link in links if not (ROOT / link).exists()]
    assert links and not missing


def test_every_folder_of_the_map_is_there() -> None:
    named = re.findall(r"`((?:engine|flows|tasks|deployments)/[\w./]*)`", README)
    missing = [name for name in named if not (ROOT / name).exists()]
    assert named and not missing, Path(*missing)
