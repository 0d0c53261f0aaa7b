"""One file decides between GPU and CPU; everything else asks it."""

import re

from tests.contracts.sources import ROOT, python_files, relative

HOME = "engine/backends/device.py"
BY_NAME = "engine/backends/transfer_broadcast.py"  # names vLLM's engine for it, and decides nothing
DECISIONS = re.compile(r"torch\.cuda|nccl|flash_attention|[\"']cuda[\"':]")


def test_only_the_device_file_speaks_of_cuda_nccl_and_flash_attention():
    found = [
        f"{relative(path)}:{number} {line.strip()}"
        for path in python_files("engine", "tasks", "flows")
        if relative(path) not in (HOME, BY_NAME)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if DECISIONS.search(line)
    ]
    assert not found, f"ask {HOME}:\n" + "\n".join(found)


def test_the_device_file_is_found():
    assert DECISIONS.search((ROOT / HOME).read_text())
