"""Weights through shared memory: bit for bit, whole or not at all, one version at a time; and the check of what is served."""

import dataclasses
import json
import shutil
from collections import namedtuple

import pytest
import torch
from safetensors.torch import save_file

from engine.backends.weight_sync import (
    LOGPROB_BOUNDS,
    WeightHandle,
    carry,
    exchange_folder,
    is_here,
    landed,
    probe_sequences,
    publish,
    receive,
    retract,
    verify_served,
)
from engine.errors import ConfigError, DivergedError, ShapeError, TransientError


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(5, 4, generator=generator),
        "layer.weight": torch.randn(4, 4, generator=generator).bfloat16(),
        "scale": torch.tensor(3.0),
    }


def test_tensors_arrive_bit_for_bit_with_a_handle_of_plain_values(weights, tmp_path):
    handle = publish(weights, tmp_path, version=4)
    handle = WeightHandle(**json.loads(json.dumps(dataclasses.asdict(handle))))
    received = dict(receive(handle))
    assert received.keys() == weights.keys()
    assert all(torch.equal(received[name], weights[name]) for name in weights)
    assert all(received[name].dtype == weights[name].dtype for name in weights)
    assert (handle.version, handle.size) == (4, 5 * 4 * 4 + 4 * 4 * 2 + 4)
    assert handle.checksums.keys() == weights.keys()


def test_tensors_outlive_their_file(weights, tmp_path):
    """An engine may still read while the trainer gives the memory back."""
    handle = publish(weights, tmp_path, version=1)
    received = dict(receive(handle))
    retract(handle)
    assert torch.equal(received["embed.weight"], weights["embed.weight"])


def test_a_slice_is_published_as_what_it_shows(weights, tmp_path):
    columns = weights["embed.weight"][:, 1:3]
    assert torch.equal(dict(receive(publish({"a": columns}, tmp_path, 1)))["a"], columns)


def test_tied_weights_are_written_once(weights, tmp_path):
    shared = {"embed.weight": weights["embed.weight"], "lm_head.weight": weights["embed.weight"]}
    assert list(dict(receive(publish(shared, tmp_path, 1)))) == ["embed.weight"]


def test_only_the_latest_version_stays(weights, tmp_path):
    old = publish(weights, tmp_path, version=1)
    new = publish({**weights, "scale": torch.tensor(4.0)}, tmp_path, version=2)
    assert [str(path) for path in tmp_path.iterdir()] == [new.path]
    with pytest.raises(TransientError, match="weights of version 1 cannot be read"):
        receive(old)


def test_one_version_published_twice_is_told_apart(weights, tmp_path):
    """As after a replay from another start: the older handle no longer leads anywhere."""
    old = publish(weights, tmp_path, version=1)
    new = publish({**weights, "scale": torch.tensor(4.0)}, tmp_path, version=1)
    assert old.path != new.path
    with pytest.raises(TransientError):
        receive(old)
    assert dict(receive(new))["scale"] == 4.0


def test_a_tensor_that_is_not_what_was_published_is_refused_by_name(weights, tmp_path):
    handle = publish(weights, tmp_path, version=1)
    save_file({**weights, "scale": torch.tensor(3.5)}, handle.path)
    with pytest.raises(TransientError, match=r"version 1 changed after they were published: .*holds another scale"):
        dict(receive(handle))


def test_a_file_of_other_tensors_is_refused(weights, tmp_path):
    handle = publish(weights, tmp_path, version=1)
    save_file({"scale": weights["scale"]}, handle.path)
    with pytest.raises(TransientError, match="holds other names"):
        receive(handle)


def test_a_file_cut_off_is_refused(weights, tmp_path):
    handle = publish(weights, tmp_path, version=1)
    with open(handle.path, "r+b") as file:
        file.truncate(200)
    with pytest.raises(TransientError, match="cannot be read"):
        receive(handle)


def test_what_a_killed_publisher_left_is_cleaned_away(weights, tmp_path):
    (tmp_path / "1-abc.partial").write_bytes(b"half")
    handle = publish(weights, tmp_path, version=2)
    assert [str(path) for path in tmp_path.iterdir()] == [handle.path]


def test_too_little_room_names_what_is_needed_and_what_is_free(weights, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**30, 2**30 - 10, 10))
    tensor = torch.zeros(2**20)
    with pytest.raises(ConfigError, match=r"needs 4.2 MB; 0.0 MB are free") as caught:
        publish({"a": tensor}, tmp_path, version=1)
    assert "--shm-size" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_what_is_carried_to_another_host_is_the_same_and_leaves_nothing_there(weights, tmp_path):
    handle = publish(weights, tmp_path / "here", version=4)
    content = carry(handle)
    retract(handle)
    assert not is_here(handle)
    with landed(handle, content, tmp_path / "there") as own:
        assert is_here(own)
        received = dict(receive(own))
    assert all(torch.equal(received[name], weights[name]) for name in weights)
    assert not (tmp_path / "there").exists()


def test_a_copy_that_changed_on_its_way_is_refused(weights, tmp_path):
    handle = publish(weights, tmp_path / "here", version=4)
    content = carry(handle)
    content[-1] ^= 1
    with pytest.raises(TransientError, match="changed"), landed(handle, content, tmp_path / "there") as own:
        dict(receive(own))
    assert not (tmp_path / "there").exists()


def test_retracting_twice_is_harmless_and_leaves_no_folder(weights, tmp_path):
    folder = tmp_path / "exchange"
    handle = publish(weights, folder, version=1)
    retract(handle)
    retract(handle)
    assert not folder.exists()


def test_every_run_has_its_own_folder():
    assert exchange_folder("a") != exchange_folder("b")
    assert exchange_folder("a").parent.is_dir()


def test_probes_are_fixed_by_their_seed():
    probes = probe_sequences(100, seed=5)
    assert probes == probe_sequences(100, seed=5) != probe_sequences(100, seed=6)
    assert [len(probe) for probe in probes] == [12] * 4
    assert all(0 <= token < 100 for probe in probes for token in probe)


LIMITS = {"bound": 0.1, "served_version": 3, "trained_version": 4}


def test_the_gap_is_the_mean_difference():
    assert verify_served([[-1.0, -2.0], [-3.0]], [[-1.0, -2.06], [-3.06]], **LIMITS) == pytest.approx(0.04, abs=1e-6)


@pytest.mark.parametrize("value", [-3.4, float("nan"), float("-inf")])
def test_other_weights_are_found(value):
    with pytest.raises(DivergedError, match=r"serves version 3 and the trainer holds version 4.*0\.1 is allowed"):
        verify_served([[-1.0, -2.0], [value]], [[-1.0, -2.0], [-3.0]], **LIMITS)


def test_probes_of_different_length_are_not_compared():
    with pytest.raises(ShapeError, match="different probe sequences"):
        verify_served([[-1.0, -2.0]], [[-1.0], [-2.0]], **LIMITS)


def test_every_dtype_of_a_model_has_its_bound():
    assert LOGPROB_BOUNDS.keys() == {"float32", "bfloat16"}
