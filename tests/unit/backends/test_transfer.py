"""Weights between GPUs, as far as they are plain data: what is announced, in which order, and what is found to be altered."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from engine.backends.transfer import Manifest, Recorder, checksum, describe, require_arrived, require_finite
from engine.backends.transfer_broadcast import Endpoint, first_rank
from engine.backends.transfer_ipc import Exported, merged
from engine.errors import DivergedError, TransientError


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "z.weight": torch.randn(5, 4, generator=generator),
        "a.weight": torch.randn(3, 2, generator=generator).bfloat16(),
        "scale": torch.tensor(3.0),
    }


def test_a_manifest_keeps_the_order_of_the_stream_and_travels_as_plain_values():
    manifest = describe(tensors().items(), version=4)
    assert list(manifest.shapes) == ["z.weight", "a.weight", "scale"]
    assert manifest.update_info() == {
        "names": ["z.weight", "a.weight", "scale"],
        "shapes": [[5, 4], [3, 2], []],
        "dtype_names": ["float32", "bfloat16", "float32"],
    }
    again = json.loads(json.dumps(asdict(manifest)))
    assert again["checksums"] == manifest.checksums and again["version"] == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int64])
def test_a_checksum_tells_values_and_their_places(dtype):
    tensor = torch.arange(1000).to(dtype).reshape(10, 100)
    changed, swapped = tensor.clone(), tensor.clone()
    changed[7, 3] = 100
    swapped[0, 1], swapped[0, 2] = tensor[0, 2], tensor[0, 1]
    assert checksum(tensor) == checksum(tensor.clone())
    assert len({checksum(tensor), checksum(changed), checksum(swapped)}) == 3


def test_a_checksum_is_of_what_a_slice_shows_and_does_not_depend_on_pieces(monkeypatch):
    tensor = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    whole = checksum(tensor[:, 1:])
    assert whole == checksum(tensor[:, 1:].contiguous())
    monkeypatch.setattr("engine.backends.transfer._PIECE", 7)
    assert checksum(tensor[:, 1:]) == whole


def test_what_passes_the_recorder_is_loaded_and_told():
    loaded = []

    class Model:
        def load_weights(self, weights):
            loaded.extend(weights)
            return {"names"}

    recorder = Recorder(Model())
    sent = tensors()
    assert recorder.load_weights(iter(list(sent.items())[:2])) == {"names"}
    recorder.load_weights([("scale", torch.tensor(float("nan")))])
    assert [name for name, _ in loaded] == list(sent)
    wanted = describe(sent.items(), 1).checksums
    assert {name: recorder.checksums[name] for name in ("z.weight", "a.weight")} == {
        name: wanted[name] for name in ("z.weight", "a.weight")
    }
    assert recorder.not_finite == ["scale"]


def test_an_engine_that_was_given_other_bytes_is_found():
    manifest = describe(tensors().items(), version=4)
    require_arrived(manifest, [manifest.checksums, dict(manifest.checksums)])
    altered = {**manifest.checksums, "scale": 1}
    with pytest.raises(TransientError, match=r"version 4 .*engine 1 was given another scale \(1 of 3 tensors\)"):
        require_arrived(manifest, [manifest.checksums, altered])
    with pytest.raises(TransientError, match="3 of 3"):
        require_arrived(manifest, [{}])


def test_what_is_not_finite_is_not_served():
    require_finite([], 3)
    with pytest.raises(DivergedError, match="scale of version 3"):
        require_finite(["scale"], 3)


def exported(gpu: str, manifest: Manifest) -> Exported:
    return Exported(manifest, {gpu: [(gpu, name) for name in manifest.shapes]})


def test_every_gpu_finds_its_own_handle_of_every_tensor():
    manifest = describe(tensors().items(), version=4)
    update = merged([exported("g0", manifest), exported("g1", manifest)]).update_info()
    assert update["names"] == ["z.weight", "a.weight", "scale"]
    assert update["ipc_handles"][1] == {"g0": ("g0", "a.weight"), "g1": ("g1", "a.weight")}


def test_ranks_that_hold_different_weights_are_named():
    manifest = describe(tensors().items(), version=4)
    other = replace(manifest, checksums={**manifest.checksums, "scale": 1})
    with pytest.raises(TransientError, match="ranks 0 and 1 of the policy"):
        merged([exported("g0", manifest), exported("g1", other)])


def test_engines_follow_the_sender_with_all_their_devices():
    assert [first_rank(engine, 2) for engine in range(3)] == [1, 3, 5]
    assert Endpoint("10.0.0.1", 4711, 7).init_info(3) == {
        "master_address": "10.0.0.1",
        "master_port": 4711,
        "rank_offset": 3,
        "world_size": 7,
        "packed": True,
    }
