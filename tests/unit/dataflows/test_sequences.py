"""Fixed rows as a batch: masks come from the recorded lengths, never from ids."""

from engine.batch import response_ids
from engine.dataflows.sequences import sequence_batch

EOS = 2


def test_the_end_token_counts_where_it_is_also_the_padding() -> None:
    batch = sequence_batch([(5, 6, 7, 8, 9, EOS), (5, 6, 7, 8, 9, 8, 9, EOS)], [3, 3])
    assert batch.attention_mask[0].tolist() == [True] * 6 + [False] * 2
    assert batch.response_mask[0].tolist() == [True] * 3 + [False] * 2
    assert response_ids(batch)[0].tolist() == [8, 9, EOS, 0, 0]
