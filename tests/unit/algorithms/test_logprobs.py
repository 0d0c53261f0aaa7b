"""Token log-probs: temperature, dtypes, masked vocabulary, micro-batches, the memory that slicing saves."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.algorithms.logprobs import token_logprobs, token_logprobs_and_entropy
from engine.algorithms.losses import policy_loss
from engine.errors import ShapeError

LOGITS = torch.randn(4, 6, 50, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(1))


def test_the_temperature_of_the_sampler_counts():
    logits, target = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    assert token_logprobs(logits, target, temperature=0.5).item() == pytest.approx(-0.018150, abs=1e-6)
    assert token_logprobs(logits, target, temperature=1.0).item() == pytest.approx(-0.126928, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature must be positive"):
        token_logprobs(LOGITS, TARGETS, temperature=temperature)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_scored_in_float32(dtype):
    """Only the logits are rounded: the result is theirs in float32; the gradient keeps their dtype."""
    logits = (LOGITS * 4).to(dtype).requires_grad_()
    logprobs, entropy = token_logprobs_and_entropy(logits, TARGETS, temperature=0.7)
    exact = token_logprobs(logits.detach().float(), TARGETS, temperature=0.7)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, exact, rtol=0, atol=1e-5)
    (logprobs.sum() + entropy.sum()).backward()
    assert logits.grad.dtype == dtype


def test_a_masked_vocabulary_entry_has_no_probability_and_no_entropy():
    logits = torch.tensor([[1.0, -math.inf, 2.0]], requires_grad=True)
    logprobs, entropy = token_logprobs_and_entropy(logits, torch.tensor([2]), temperature=1.0)
    (logprobs.sum() + entropy.sum()).backward()
    two = token_logprobs_and_entropy(torch.tensor([[1.0, 2.0]]), torch.tensor([1]), temperature=1.0)
    assert (logprobs.item(), entropy.item()) == (pytest.approx(two[0].item()), pytest.approx(two[1].item()))
    assert logits.grad.isfinite().all() and logits.grad[0, 1].item() == 0


def test_huge_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    logprobs, entropy = token_logprobs_and_entropy(logits, torch.tensor([1]), temperature=0.1)
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.item() == -2e5 and entropy.item() == 0
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 6), (4, 0), (0,)], ids=str)
def test_empty_batches(shape):
    logits = torch.zeros(*shape, 50, requires_grad=True)
    targets = torch.zeros(shape, dtype=torch.int64)
    logprobs, entropy = token_logprobs_and_entropy(logits, targets, temperature=1.0)
    (logprobs.sum() + entropy.sum() + token_logprobs(logits, targets, temperature=1.0).sum()).backward()
    assert logprobs.shape == entropy.shape == shape
    assert logits.grad.shape == logits.shape


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match=r"\(4, 6, 50\).*\(4, 5\)"):
        token_logprobs(LOGITS, TARGETS[:, :5], temperature=1.0)


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dropout, self.head = nn.Embedding(50, 16), nn.Dropout(0.1), nn.Linear(16, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.embed(ids)))


def test_scoring_twice_in_other_micro_batches_gives_ratio_one():
    torch.manual_seed(0)
    model = TinyModel().eval()
    ids = torch.randint(50, (4, 6))
    old = torch.cat(
        [token_logprobs(model(ids[row : row + 1]), TARGETS[row : row + 1], temperature=0.8) for row in range(4)]
    )
    new = token_logprobs(model(ids), TARGETS, temperature=0.8, slice_elements=7 * 50)
    metrics = policy_loss(new, old.detach(), torch.randn(4, 6), torch.ones(4, 6, dtype=torch.bool)).metrics
    assert (new - old).abs().max() <= 1e-5
    assert metrics["policy/approx_kl"][0].item() <= 1e-8
    assert metrics["policy/clip_frac"][0].item() == 0


class LargestFloat32(TorchDispatchMode):
    """Remembers the size of the largest float32 tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("score", [token_logprobs, token_logprobs_and_entropy])
def test_no_float32_tensor_is_larger_than_a_slice(score):
    logits = LOGITS.bfloat16().requires_grad_()
    with LargestFloat32() as seen:
        found = score(logits, TARGETS, temperature=1.0, slice_elements=5 * 50)
        torch.stack(found if isinstance(found, tuple) else (found,)).sum().backward()
    assert seen.elements == 5 * 50
    assert logits.grad is not None


def test_what_the_graph_keeps_is_the_logits_themselves():
    kept = []
    logits = LOGITS.bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        token_logprobs(logits, TARGETS, temperature=1.0, slice_elements=5 * 50)
    assert {x.dtype for x in kept} == {torch.bfloat16, torch.int64}
    assert max(x.numel() for x in kept) == logits.numel()
