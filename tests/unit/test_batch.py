"""Batches: what is taken apart goes together again, and what does not fit is refused with the field's name."""

import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.batch import Batch, concat, micro_batches, response_ids, response_positions, restore
from engine.errors import ShapeError

lengths = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=8)


def make_batch(sizes: list[tuple[int, int]], *, spare: int = 0) -> Batch:
    """Samples of (prompt, response) tokens with distinct ids; spare: columns of padding that none needs."""
    prompts, responses = (torch.tensor(part) for part in zip(*sizes, strict=True))
    total, width = int((prompts + responses).max()) + spare, int(responses.max()) + spare
    real = torch.arange(total) < (prompts + responses)[:, None]
    mask = torch.arange(width) < responses[:, None]
    ids = 100 * torch.arange(1, len(sizes) + 1)[:, None] + torch.arange(total)
    return Batch(
        {
            "input_ids": torch.where(real, ids, 0),
            "attention_mask": real,
            "prompt_lengths": prompts,
            "response_lengths": responses,
            "response_mask": mask,
            "rollout_logprobs": torch.where(mask, -ids[:, :width].float(), 0.0),
            "scores": torch.arange(len(sizes)).float(),
        },
        {"text": [f"sample {number}" for number in range(len(sizes))]},
    )


def same(left: Batch, right: Batch) -> bool:
    return (
        left.fields.keys() == right.fields.keys()
        and left.columns == right.columns
        and all(torch.equal(tensor, right.fields[name]) for name, tensor in left.fields.items())
    )


@given(lengths, st.data())
def test_splitting_and_joining_gives_the_batch_back(sizes: list[tuple[int, int]], data: st.DataObject):
    batch = make_batch(sizes)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sizes)), max_size=4)))
    bounds = [0, *cuts, len(sizes)]
    parts = batch.split([stop - start for start, stop in pairwise(bounds)])
    assert same(concat(parts), batch)
    assert same(concat([part.trim() if len(part) else part for part in parts]), batch)


@given(lengths, st.integers(1, 40))
def test_micro_batches_cover_every_sample_once_and_can_be_put_back(sizes: list[tuple[int, int]], limit: int):
    batch = make_batch(sizes, spare=2)
    parts = list(micro_batches(batch, limit))
    assert sorted(row for rows, _ in parts for row in rows.tolist()) == list(range(len(sizes)))
    for rows, part in parts:
        assert len(part) == 1 or part.input_ids.numel() <= limit
        assert part.input_ids.shape[1] == int(part.lengths().max())
        assert torch.equal(part.scores, batch.scores[rows])
    wide = restore([(rows, part.rollout_logprobs) for rows, part in parts], tuple(batch.rollout_logprobs.shape))
    assert torch.equal(wide, batch.rollout_logprobs)
    assert torch.equal(restore([(rows, part.scores) for rows, part in parts], (len(sizes),)), batch.scores)


@given(lengths)
def test_trimming_loses_padding_only(sizes: list[tuple[int, int]]):
    assert same(make_batch(sizes, spare=3).trim(), make_batch(sizes).trim())


@given(lengths, st.data())
def test_indexing_reorders_fields_and_columns_alike(sizes: list[tuple[int, int]], data: st.DataObject):
    batch = make_batch(sizes)
    order = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=10))
    taken = batch.index(order)
    assert taken.scores.tolist() == [float(row) for row in order]
    assert taken.column("text") == tuple(f"sample {row}" for row in order)
    assert same(taken, batch.index(torch.tensor(order, dtype=torch.int64)))


def test_a_mask_is_no_list_of_positions():
    with pytest.raises(ShapeError, match="mask"):
        make_batch([(1, 1), (2, 2)]).index(torch.tensor([False, True]))


@given(lengths, st.integers(1, 4))
def test_repeating_keeps_samples_of_a_prompt_together_and_numbers_them(sizes: list[tuple[int, int]], times: int):
    repeated = make_batch(sizes).repeat(times)
    assert repeated.scores.tolist() == [float(row) for row in range(len(sizes)) for _ in range(times)]
    assert repeated.sample_ids.tolist() == list(range(times)) * len(sizes)
    assert repeated.column("text")[::times] == make_batch(sizes).column("text")


@given(lengths)
def test_response_ids_are_the_tokens_behind_the_prompt(sizes: list[tuple[int, int]]):
    batch = make_batch(sizes, spare=1)
    for row, (prompt, response) in enumerate(sizes):
        whole = batch.input_ids[row].tolist()
        assert response_ids(batch)[row].tolist()[:response] == whole[prompt : prompt + response]
        assert response_ids(batch)[row, response:].eq(0).all()
        predicting = response_positions(batch)[row, :response].tolist()
        assert predicting == list(range(prompt - 1, prompt + response - 1))


def test_a_batch_travels_between_processes():
    batch = make_batch([(2, 1), (1, 3)])
    assert same(pickle.loads(pickle.dumps(batch)), batch)  # noqa: S301 - of our own making


def test_merging_waits_for_results_and_refuses_to_overwrite():
    class Later:
        def result(self) -> Batch:
            return Batch({"values": torch.zeros(2, 3)})

    batch = make_batch([(2, 1), (1, 3)])
    assert "values" in batch.merge(Later())
    with pytest.raises(ShapeError, match="scores"):
        batch.merge(batch.select(["scores"]))


def test_changing_a_batch_leaves_the_first_one_alone():
    batch = make_batch([(2, 1)])
    batch.with_fields(scores=torch.tensor([9.0]))
    batch.fields["scores"] = torch.tensor([9.0])
    assert batch.scores.item() == 0.0


WRONG: dict[str, tuple[dict[str, Tensor], dict[str, list[str]], str]] = {
    "an undeclared name": ({"reward": torch.zeros(2)}, {}, "'reward' is not a declared"),
    "a wrong dtype": ({"scores": torch.zeros(2, dtype=torch.float64)}, {}, "'scores' must be"),
    "a wrong rank": ({"scores": torch.zeros(2, 1)}, {}, "'scores' must be"),
    "two batch sizes": ({"scores": torch.zeros(2), "costs": torch.zeros(3)}, {}, "axis B"),
    "two response widths": ({"values": torch.zeros(2, 3), "returns": torch.zeros(2, 4)}, {}, "axis R"),
    "a column of another size": ({"scores": torch.zeros(2)}, {"text": ["a"]}, "axis B"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str):
    fields, columns, message = WRONG[name]
    with pytest.raises(ShapeError, match=message):
        Batch(fields, columns)


def test_what_is_asked_for_and_missing_is_named():
    batch = make_batch([(1, 1)])
    with pytest.raises(AttributeError, match="valuez"):
        _ = batch.valuez
    with pytest.raises(ShapeError, match="answer"):
        batch.column("answer")
    with pytest.raises(ShapeError, match="nothing"):
        batch.select(["scores", "nothing"])
    with pytest.raises(ShapeError, match="add up to 2"):
        batch.split([1, 1])


def test_joining_different_fields_or_nothing_is_refused():
    batch = make_batch([(1, 1)])
    with pytest.raises(ShapeError, match="part 1"):
        concat([batch, batch.select(["scores", "text"])])
    with pytest.raises(ShapeError, match="no batches"):
        concat([])


def test_an_empty_batch_keeps_its_fields():
    empty = make_batch([(2, 3), (1, 1)]).index([])
    assert len(empty) == 0 and list(micro_batches(empty, 10)) == []
    assert empty.trim().input_ids.shape == (0, 0)
    assert same(concat([empty, make_batch([(2, 3), (1, 1)])]), make_batch([(2, 3), (1, 1)]))
