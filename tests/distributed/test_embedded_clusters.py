"""Runs beside other Ray clusters of the machine: an embedded cluster is always a run's own."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import sys
import ray
from engine.controller.cluster import cluster

with cluster(sys.argv[1]):
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.readline()
"""
ORPHAN = """
import os, time

if os.fork():
    os._exit(0)
while os.getppid() != 1:
    time.sleep(0.01)

import psutil
from engine.controller.cluster import cluster

with cluster("orphan"):
    node = next(child for child in psutil.Process().children() if child.name() == "raylet")
    node.kill()
    node.wait()
print("lives on")
"""
ROOT = Path(__file__).parents[2]


def start(run_key: str, folder: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, run_key],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"RAY_TMPDIR": folder},
    )


def test_a_run_does_not_join_the_cluster_that_was_last_started_on_the_machine():
    """`ray start` leaves the address of its cluster in a file, which Ray takes for an invitation."""
    runs = []
    with tempfile.TemporaryDirectory(prefix="hf-") as folder:  # short: Ray makes sockets below it
        try:
            runs.append(start("first", folder))
            first = runs[0].stdout.readline().strip()
            assert first
            (Path(folder) / "ray" / "ray_current_cluster").write_text(first)
            runs.append(start("second", folder))
            second = runs[1].stdout.readline().strip()
            assert second and second != first
        finally:
            ends = [run.communicate("\n", timeout=120) and run.returncode for run in runs]
        assert ends == [0, 0]


@pytest.mark.skipif(
    psutil.Process().parents()[-1].pid != 1, reason="processes whose parent ended go elsewhere than to 1"
)
def test_a_driver_without_a_parent_outlives_its_node():
    """As after nohup, or started by the first process of a container; Ray would end it without a word."""
    with tempfile.TemporaryDirectory(prefix="hf-") as folder:
        command, environment = [sys.executable, "-c", ORPHAN], os.environ | {"RAY_TMPDIR": folder}
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=200, check=False
        )
    assert "lives on" in done.stdout, done.stderr
