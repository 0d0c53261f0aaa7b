"""The README's commands are run as they stand, with the smoke run in place of the quickstart."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import ROOT, environment, hybridflow

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


def block(language: str, word: str) -> str:
    """The README's one code block of this language that contains the word."""
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL) if word in text]
    return str(found)


def test_the_python_of_the_readme_answers_without_a_network(smoke_result: dict[str, Any], smoke_folder: Path) -> None:
    code = block("python", "mlflow").replace("quickstart", "smoke")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=smoke_folder,
        timeout=300,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() and "12+34=" not in done.stdout


def test_the_run_of_ones_own_passes_the_dry_run(tmp_path: Path) -> None:
    row, options = block("json", '"prompt"'), block("yaml", "name: mine")
    rows = [row.replace("12+34", f"1{n}+34").replace('"46"', f'"{44 + n}"') for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    file = tmp_path / "mine.yaml"
    file.write_text(options.replace("../deployments", f"{ROOT}/deployments"))
    assert "iterations" in hybridflow("run", str(file), "--dry-run", cwd=tmp_path)
    assert "10" in hybridflow("data", "check", str(tmp_path / "rows.jsonl"), cwd=tmp_path)


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
