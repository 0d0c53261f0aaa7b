"""Transfer protocols: what every rank is sent, and that collecting undoes spreading for every mesh and batch size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.algorithms.losses import loss_denominator, policy_loss
from engine.batch import Batch
from engine.controller.dispatch import (
    ALL_TO_ALL,
    DP,
    ONE_TO_ALL,
    ONE_TO_FIRST,
    ROWS,
    ROWS_TO_FIRST,
    THREE_D,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PP_ONLY,
    Padded,
    Transfer,
    deal_padded,
    dispatch,
    join,
    mini_batch_rows,
    perform,
    shares,
)
from engine.controller.mesh import Mesh
from engine.errors import ShapeError
from engine.metrics import Metric, Metrics, from_pairs, merge
from tests.unit.controller.test_mesh import meshes

SPLITTING = {"DP": DP, "3D": THREE_D, "3D_ALL_MICRO_DP": THREE_D_ALL_MICRO_DP}
BROADCASTING = {"ONE_TO_ALL": ONE_TO_ALL, "3D_PP_ONLY": THREE_D_PP_ONLY}


def batch_of(size: int, mini_batches: int = 0) -> Batch:
    fields = {"group_ids": torch.arange(size)}
    if mini_batches:
        fields["mini_batch"] = torch.arange(size) % mini_batches
    return Batch(fields, {"prompt": [f"p{i}" for i in range(size)]})


def returned(transfer: Transfer, argument: object, mesh: Mesh) -> object:
    """What a call of a method that returns its argument gives."""
    results = [perform(lambda own: own, (part,)) for part in transfer.spread(argument, mesh)]
    return transfer.collect([results[rank] for rank in transfer.sources(mesh)])


def rows_of(part: object) -> list[int]:
    return (part.batch if isinstance(part, Padded) else part).group_ids.tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", SPLITTING)
@settings(max_examples=60)
@given(mesh=meshes, size=st.integers(0, 17), mini_batches=st.integers(0, 4))
def test_collecting_undoes_splitting(name: str, mesh: Mesh, size: int, mini_batches: int):
    batch = batch_of(size, mini_batches)
    together = returned(SPLITTING[name], batch, mesh)
    assert isinstance(together, Batch)
    assert together.fields.keys() == batch.fields.keys()
    assert together.group_ids.tolist() == list(range(size))
    assert together.column("prompt") == batch.column("prompt")


@pytest.mark.parametrize("name", BROADCASTING)
@given(mesh=meshes)
def test_collecting_a_broadcast_gives_one_copy_from_every_rank_that_answers(name: str, mesh: Mesh):
    batch = batch_of(3)
    count = mesh.size if name == "ONE_TO_ALL" else mesh.pipeline
    assert returned(BROADCASTING[name], batch, mesh) == [batch] * count


@given(mesh=meshes)
def test_what_each_rank_is_given_by_hand_comes_back_in_that_order(mesh: Mesh):
    given_by_hand = [f"for rank {rank}" for rank in range(mesh.size)]
    assert returned(ALL_TO_ALL, given_by_hand, mesh) == given_by_hand


class TestTheTableOfThePaper:
    """p = 2 stages, t = 2 tensor ranks, d = 2 DP groups of 2 replicas; 8 rows. Rank = 4 data + 2 stage + tensor."""

    MESH = Mesh(pipeline=2, tensor=2, data=2, micro_data=2)

    def sent(self, transfer: Transfer) -> list[list[int]]:
        return [rows_of(part) for part in transfer.spread(batch_of(8), self.MESH)]

    def test_one_to_all_broadcasts_and_hears_every_rank(self):
        assert self.sent(ONE_TO_ALL) == [[*range(8)]] * 8
        assert list(ONE_TO_ALL.sources(self.MESH)) == [*range(8)]

    def test_dp_scatters_and_hears_every_rank(self):
        assert self.sent(DP) == [[row] for row in range(8)]
        assert list(DP.sources(self.MESH)) == [*range(8)]

    def test_3d_splits_over_dp_groups_and_hears_the_last_stage_of_each(self):
        assert self.sent(THREE_D) == [[0, 2, 4, 6]] * 4 + [[1, 3, 5, 7]] * 4
        assert list(THREE_D.sources(self.MESH)) == [2, 6]

    def test_3d_all_micro_dp_splits_over_replicas_and_hears_the_first_rank_of_each(self):
        assert self.sent(THREE_D_ALL_MICRO_DP) == [[0, 4], [1, 5], [0, 4], [1, 5], [2, 6], [3, 7], [2, 6], [3, 7]]
        assert list(THREE_D_ALL_MICRO_DP.sources(self.MESH)) == [0, 1, 4, 5]

    def test_3d_pp_only_broadcasts_and_hears_each_stage_once(self):
        assert self.sent(THREE_D_PP_ONLY) == [[*range(8)]] * 8
        assert list(THREE_D_PP_ONLY.sources(self.MESH)) == [0, 2]

    def test_all_to_all_sends_each_rank_its_own(self):
        assert list(ALL_TO_ALL.spread([*"abcdefgh"], self.MESH)) == [*"abcdefgh"]
        assert list(ALL_TO_ALL.sources(self.MESH)) == [*range(8)]
        with pytest.raises(ShapeError, match="one entry for each rank"):
            ALL_TO_ALL.spread(5, self.MESH)

    def test_ranks_of_one_group_are_sent_the_same_object_which_travels_once(self):
        parts = THREE_D.spread(batch_of(8), self.MESH)
        assert len({id(part) for part in parts}) == 2
        assert len({id(part) for part in THREE_D_ALL_MICRO_DP.spread(batch_of(8), self.MESH)}) == 4


class TestPadding:
    @given(mesh=meshes, size=st.integers(0, 17))
    def test_ranks_of_a_3d_layout_hold_equally_many_rows(self, mesh: Mesh, size: int):
        for transfer, groups in ((THREE_D, mesh.data), (THREE_D_ALL_MICRO_DP, mesh.replicas)):
            parts = transfer.spread(batch_of(size), mesh)
            assert {len(part.batch) for part in parts} == {-(-size // groups)}

    def test_padding_copies_a_row_and_silences_its_response(self):
        batch = Batch(
            {
                "prompt_lengths": torch.tensor([2, 3]),
                "response_lengths": torch.tensor([1, 2]),
                "response_mask": torch.tensor([[True, False], [True, True]]),
                "scores": torch.tensor([0.5, 1.0]),
            },
            {"prompt": ["a", "b"]},
        )
        padding = deal_padded(batch, 3)[2].batch
        assert padding.prompt_lengths.tolist() == [2] and padding.column("prompt") == ("a",)
        assert padding.response_lengths.tolist() == [0] and not padding.response_mask.any()
        assert padding.scores.isnan().all()
        assert batch.scores.tolist() == [0.5, 1.0]  # the caller's rows are untouched

    @pytest.mark.parametrize("mode", ["token-mean", "sequence-mean", "fixed"])
    @pytest.mark.parametrize(("size", "groups"), [(5, 3), (2, 4)])
    def test_loss_gradient_and_metrics_do_not_count_padding(self, mode: str, size: int, groups: int):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(1, 5, (size,), generator=generator)
        mask = torch.arange(4) < lengths[:, None]
        batch = Batch(
            {
                "group_ids": torch.arange(size),
                "response_lengths": lengths,
                "response_mask": mask,
                "old_logprobs": torch.randn(size, 4, generator=generator) * mask,
                "advantages": torch.randn(size, 4, generator=generator) * mask,
            }
        )
        weight = torch.randn(size, 4, generator=generator, requires_grad=True)
        denominator = float(loss_denominator(mask, mode, max_tokens=4))

        def learn(part: Batch) -> tuple[torch.Tensor, Metrics]:
            logprobs = torch.where(part.response_mask, part.old_logprobs + weight[part.group_ids], 0.0)
            output = policy_loss(
                logprobs,
                part.old_logprobs,
                part.advantages,
                part.response_mask,
                aggregation=mode,
                normalizer=denominator,
            )
            return output.loss, from_pairs(output.metrics)

        loss, metrics = learn(batch)
        (gradient,) = torch.autograd.grad(loss, weight)
        parts = [learn(part.batch) for part in deal_padded(batch, groups)]
        padded_loss = torch.stack([part for part, _ in parts]).sum()
        (padded_gradient,) = torch.autograd.grad(padded_loss, weight)
        torch.testing.assert_close(padded_loss, loss)
        torch.testing.assert_close(padded_gradient, gradient)
        assert merge(part for _, part in parts).values() == pytest.approx(metrics.values(), nan_ok=True)

    def test_a_method_that_loses_rows_is_told_so(self):
        (part,) = deal_padded(batch_of(3), 1)
        with pytest.raises(ShapeError, match="returned 1 rows for the 3"):
            perform(lambda batch: batch.index([0]), (part,))

    def test_other_results_of_a_padded_share_pass(self):
        (part,) = deal_padded(batch_of(3), 1)
        assert perform(lambda batch, text: (len(batch), text), (part, "x")) == (3, "x")


@settings(max_examples=80)
@given(size=st.integers(1, 40), ranks=st.integers(1, 6), mini_batches=st.integers(1, 4))
def test_every_rank_gets_its_share_of_every_mini_batch(size: int, ranks: int, mini_batches: int):
    batch = batch_of(size, mini_batches)
    rows = mini_batch_rows(batch, ranks)
    assert sorted(torch.cat(rows).tolist()) == list(range(size))
    sizes = [len(own) for own in rows]
    assert max(sizes) - min(sizes) <= 1
    parts = ROWS_TO_FIRST.spread(batch, Mesh(data=ranks))
    assert [rows_of(part) for part in parts] == [own.tolist() for own in rows]


@given(size=st.integers(0, 9), tensor=st.integers(1, 3), data=st.integers(1, 3))
def test_the_ranks_of_one_copy_of_a_model_get_the_same_rows_and_one_of_them_answers(size: int, tensor: int, data: int):
    mesh, batch = Mesh(tensor=tensor, data=data), batch_of(size)
    parts = ROWS.spread(batch, mesh)
    assert [rows_of(part) for part in parts] == [list(range(size))[rank // tensor :: data] for rank in range(mesh.size)]
    answers = [parts[rank] for rank in ROWS.sources(mesh)]
    assert rows_of(ROWS.collect(answers)) == list(range(size))
    steps = ROWS_TO_FIRST.spread(batch, mesh)
    assert [rows_of(part) for part in steps] == [rows_of(part) for part in parts]


def test_plain_arguments_go_to_every_rank():
    for transfer in (DP, ROWS_TO_FIRST, THREE_D, THREE_D_ALL_MICRO_DP, ONE_TO_ALL, ONE_TO_FIRST, THREE_D_PP_ONLY):
        assert list(transfer.spread("same", Mesh(data=2))) == ["same", "same"]


def test_results_come_back_by_protocol():
    assert ONE_TO_ALL.collect([1, 2]) == [1, 2]
    assert list(ONE_TO_FIRST.sources(Mesh(data=2))) == [0] and ONE_TO_FIRST.collect([1]) == 1
    assert list(ROWS_TO_FIRST.sources(Mesh(data=2))) == [0] and ROWS_TO_FIRST.collect(["combined"]) == "combined"
    merged = DP.collect([Metrics({"a/b": Metric(1.0, "mean", 1)}), Metrics({"a/b": Metric(4.0, "mean", 2)})])
    assert merged["a/b"] == pytest.approx(3.0)
    with pytest.raises(ShapeError, match=r"returned \[1, 2\] rows; dealt out were \[2, 1\]"):
        DP.collect([batch_of(1), batch_of(2)])


def test_a_method_is_sent_only_what_it_reads():
    @dispatch(DP, reads=("group_ids",))
    def method(self: object, batch: Batch) -> None: ...

    (sent,) = shares(method, batch_of(2, 1), Mesh())
    assert sorted(sent.fields) == ["group_ids"]
    assert sent.columns == {}
    with pytest.raises(ShapeError, match="group_ids"):
        shares(method, Batch({"scores": torch.zeros(2)}), Mesh())


def test_a_protocol_of_ones_own_is_a_pair_of_functions():
    """Longest rows first to the first rank, the rest to the last; only these two answer."""

    def spread(batch: Batch, mesh: Mesh) -> list[Batch]:
        cut = len(batch) // 3
        parts = batch.split([cut, len(batch) - cut])
        return [parts[0], *[parts[1].index([])] * (mesh.size - 2), parts[1]]

    ends = Transfer(
        "ENDS", spread, lambda results: [rows_of(part) for part in results], lambda mesh: (0, mesh.size - 1)
    )
    assert returned(ends, batch_of(6), Mesh(data=4)) == [[0, 1], [2, 3, 4, 5]]

    @dispatch(Transfer("SHORT", lambda batch, mesh: [batch], join))
    def method(self: object, batch: Batch) -> None: ...

    with pytest.raises(ShapeError, match="SHORT gave 1 shares of an argument for the 2 ranks"):
        shares(method, batch_of(6), Mesh(data=2))
