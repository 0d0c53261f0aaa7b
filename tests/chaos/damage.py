"""Damage to the files of a run, drawn from a seed."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

SPARED = {"OWNER", ".OWNER.lock"}  # of a living process


def _truncate(file: Path, others: list[Path], draw: random.Random) -> str:
    size = draw.randrange(file.stat().st_size + 1)
    with file.open("r+b") as stream:
        stream.truncate(size)
    return f"cut to {size} bytes"


def _flip(file: Path, others: list[Path], draw: random.Random) -> str:
    content = bytearray(file.read_bytes())
    if not content:
        return "is empty, left alone"
    places = [draw.randrange(len(content)) for _ in range(draw.choice((1, 8)))]
    for place in places:
        content[place] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    return f"bits flipped at {places}"


def _delete(file: Path, others: list[Path], draw: random.Random) -> str:
    file.unlink()
    return "deleted"


def _delete_folder(file: Path, others: list[Path], draw: random.Random) -> str:
    shutil.rmtree(file.parent)
    return f"deleted with all of {file.parent.name}/"


def _swap(file: Path, others: list[Path], draw: random.Random) -> str:
    other = draw.choice(others)
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)
    return f"swapped with {other.parent.name}/{other.name}"


def _overwrite(file: Path, others: list[Path], draw: random.Random) -> str:
    file.write_bytes(draw.randbytes(draw.randrange(64)))
    return "overwritten with noise"


DAMAGES: tuple[Callable[[Path, list[Path], random.Random], str], ...] = (
    _truncate,
    _flip,
    _delete,
    _delete_folder,
    _swap,
    _overwrite,
)


def damage(folder: Path, draw: random.Random) -> str:
    """Do something bad to one file or step below the run folder; what was done."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name not in SPARED)
    deep = [file for file in files if file.parent != folder]
    file = draw.choice(files)
    kinds = DAMAGES if file.parent != folder else tuple(kind for kind in DAMAGES if kind is not _delete_folder)
    return f"{file.relative_to(folder)}: {draw.choice(kinds)(file, deep, draw)}"
