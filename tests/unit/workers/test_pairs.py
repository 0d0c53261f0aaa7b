"""Pairs stay together: whatever the micro-batches and the ranks, and the score is read at the last real token."""

import pytest
import torch

from engine.batch import Batch, concat
from engine.controller.mesh import Mesh
from engine.data.completions import Preference
from engine.dataflows.offline_roles import pair_batch
from engine.errors import ShapeError
from engine.workers.pairs import PAIRS_TO_FIRST, chosen_and_rejected, last_tokens, pair_parts


def batch_of(count: int) -> Batch:
    """Pairs of growing length; the first id of a completion tells the pair, the second its side."""
    pairs = [Preference((1,) * (1 + i % 3), (10 + i, 3, *range(3, 3 + i)), (10 + i, 4)) for i in range(count)]
    return pair_batch(pairs)


def sides(batch: Batch) -> set[tuple[int, int, int]]:
    """(pair, pair, ...) of every two neighbouring rows with their sides: what must never be torn."""
    found = set()
    for row in range(0, len(batch), 2):
        ids = [batch.input_ids[row + side, int(batch.prompt_lengths[row + side]) :] for side in (0, 1)]
        assert [int(own[1]) for own in ids] == [3, 4]
        found.add((int(ids[0][0]), int(ids[1][0]), int(batch.group_ids[row])))
    return found


@pytest.mark.parametrize("max_tokens", [1, 9, 24, 10_000])
def test_micro_batches_hold_whole_pairs_within_the_budget(max_tokens: int) -> None:
    batch = batch_of(7)
    parts = list(pair_parts(batch, max_tokens))
    assert sorted(one for part in parts for one in sides(part)) == sorted(sides(batch))
    assert all(part.input_ids.numel() <= max_tokens or len(part) == 2 for part in parts)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(data=2), Mesh(data=3), Mesh(tensor=2, data=2), Mesh(data=9)], ids=str)
def test_ranks_are_dealt_whole_pairs_each_once(mesh: Mesh) -> None:
    batch = batch_of(7)
    shares = PAIRS_TO_FIRST.spread(batch, mesh)
    assert len(shares) == mesh.size
    one_of_each = [shares[rank] for rank in range(mesh.size) if rank % mesh.tensor == 0]
    assert sorted(one for share in one_of_each for one in sides(share)) == sorted(sides(batch))
    assert max(len(share) for share in shares) - min(len(share) for share in shares) <= 2
    assert all(len(list(pair_parts(share, 10_000))) == (len(share) > 0) for share in shares)


def test_half_a_pair_is_refused() -> None:
    with pytest.raises(ShapeError, match="13 rows"):
        PAIRS_TO_FIRST.spread(batch_of(7).index(torch.arange(13)), Mesh(data=2))


def test_the_first_of_two_rows_is_the_chosen_one() -> None:
    chosen, rejected = chosen_and_rejected(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert chosen.tolist() == [1.0, 3.0] and rejected.tolist() == [2.0, 4.0]


def test_the_score_is_read_at_the_last_real_token_even_if_that_is_the_padding_token() -> None:
    """Padding and end token are both 2, and one also ends a turn inside the prompt."""
    output = torch.arange(12.0).view(2, 6)
    part = Batch(
        {
            "input_ids": torch.tensor([[5, 2, 6, 2, 2, 2], [5, 2, 6, 7, 8, 2]]),
            "attention_mask": torch.tensor([[True] * 4 + [False] * 2, [True] * 6]),
            "prompt_lengths": torch.tensor([3, 3]),
            "response_lengths": torch.tensor([1, 3]),
        }
    )
    assert last_tokens(output, part).tolist() == [3.0, 11.0]
    assert concat([part, part]).lengths().tolist() == [4, 6, 4, 6]
