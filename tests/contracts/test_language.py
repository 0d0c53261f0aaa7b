"""The repository speaks of the product alone and holds on any machine: no private paths, numbers or notes to self."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.contracts.sources import CODE, ROOT, relative

FOLDERS = (*CODE, "docs", "requirements", ".ci")
NOT_TEXT = {".png", ".jpg", ".svg", ".parquet", ".safetensors", ".gguf", ".pyc", ".gz"}
IMAGE_FILES = ("deployments/docker/", "deployments/kubernetes/", "deployments/compose/", "deployments/ray/")
PATH_OF_A_MACHINE = re.compile(r"(?<![\w.$}])/(work|opt|root|Users|home/\w+)(?![\w-])")
FORBIDDEN = {
    "note to self": re.compile(r"\b(TODO|FIXME|XXX)\b"),
    "number of a tracker": re.compile(r"(?i)\b(issue|ticket|pull request|PR) ?#?\d+\b|(?<!\S)#\d{2,}\b"),
    "id of a private case": re.compile(r"\bC\d{2}\b"),
    "talk about who wrote it": re.compile(
        r"(?i)\b(as an ai|ai assistant|language model assistant|co-authored-by|workplace)\b"
    ),
}
DOCUMENT = re.compile(r"\b(design|facts|cases|style|planner|algorithms)\.md\b")


@cache
def texts() -> dict[str, str]:
    """Content of every text file of the repository but this one, which has to name what it forbids."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    paths += [path for path in ROOT.iterdir() if path.name not in ("LICENSE", ".git")]  # .git: a file in a worktree
    wanted = [path for path in paths if path.is_file() and path.suffix not in NOT_TEXT and path != Path(__file__)]
    return {relative(path): path.read_text(encoding="utf-8") for path in wanted if "__pycache__" not in path.parts}


def hits(pattern: re.Pattern[str], skipping: tuple[str, ...] = ()) -> list[str]:
    return [
        f"{name}:{number} {match.group()}"
        for name, text in texts().items()
        if not name.startswith(skipping)
        for number, line in enumerate(text.splitlines(), start=1)
        for match in pattern.finditer(line)
    ]


def test_every_file_is_utf8_text_of_the_project():
    assert "README.md" in texts() and "engine/errors.py" in texts()


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds_a(what: str):
    assert not hits(FORBIDDEN[what]), "\n".join(hits(FORBIDDEN[what]))


def test_no_file_names_a_path_of_one_machine():
    """Paths inside an image are the product's own."""
    found = hits(PATH_OF_A_MACHINE, skipping=IMAGE_FILES)
    assert not found, "\n".join(found)


def test_a_document_that_is_named_is_there():
    documents = {Path(name).name for name in texts()}
    missing = [hit for hit in hits(DOCUMENT) if hit.split()[-1] not in documents]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("text", ["see /work/shared", "'/opt/wheels'", "cd /root", "file:///home/anna/x"])
def test_a_path_of_one_machine_is_recognised(text: str):
    assert PATH_OF_A_MACHINE.search(text)


@pytest.mark.parametrize(
    "text", ["runs/work/x", "https://host/opt/x", "$HOME/work", "{root}/root/", "/workers", "and/or"]
)
def test_other_paths_are_left_alone(text: str):
    assert not PATH_OF_A_MACHINE.search(text)
