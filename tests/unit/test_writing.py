"""A full disk is named with the file, whatever the library calls it."""

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import StoreError
from engine.writing import writing


def test_a_device_without_room_is_named_with_the_file():
    full = Path("/dev/full")
    with pytest.raises(StoreError, match=r"full could not be written: .*space") as caught, writing(full):
        full.write_text("x")
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.ENOSPC
    assert caught.value.where == {"path": "/dev/full"}


def test_the_tensor_library_has_an_error_of_its_own(tmp_path: Path):
    file = tmp_path / "no such folder" / "model.safetensors"
    with pytest.raises(StoreError, match=r"model\.safetensors could not be written") as caught, writing(file):
        save_file({"a": torch.ones(2)}, file)
    assert not isinstance(caught.value.__cause__, OSError)


def test_other_faults_pass_through():
    with pytest.raises(ZeroDivisionError), writing(Path("anything")):
        1 / 0  # noqa: B018
