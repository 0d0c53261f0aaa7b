"""Generation with transformers on a tiny random model."""

import copy
import math

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from engine.backends.engines import build_engine
from engine.backends.hf_rollout import _choose, _cut, _uniform
from engine.errors import ShapeError, StoreError, TransientError
from tests.helpers.engines import assert_ends_are_told, logprobs_of, rollout_spec
from tests.helpers.tiny import BOS, EOS, VOCAB_SIZE, chain_weights, named_weights, tiny_folder, tiny_model

PROMPTS = [[BOS, 5, 6, 7], [BOS, 40, 41], [BOS, *range(10, 60)], [BOS]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model():
    return tiny_model(1)


@pytest.fixture(scope="module")
def engine(folder, model):
    built = build_engine(rollout_spec(folder), "hf")
    built.load_weights(named_weights(model).items(), version=1)
    return built


def engine_with(folder, weights, **options):
    built = build_engine(rollout_spec(folder, **options), "hf")
    built.load_weights(weights.items(), version=1)
    return built


def sample(engine, prompts, seeds, temperature=1.0, max_tokens=12):
    return engine.generate(prompts, seeds, temperature=temperature, max_tokens=max_tokens)


def test_greedy_responses_are_those_of_transformers_own_generation(engine, model):
    for prompt, one in zip(PROMPTS, sample(engine, PROMPTS, [0] * 4, temperature=0.0), strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        assert one.token_ids == tuple(expected[0, len(prompt) :].tolist())


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_logprobs_are_those_at_the_sampling_temperature(engine, model, temperature):
    exact = copy.deepcopy(model).double()  # so that only the engine's own rounding counts
    for prompt, one in zip(PROMPTS, sample(engine, PROMPTS, range(4), temperature), strict=True):
        expected = logprobs_of(exact, prompt, one.token_ids, temperature or 1.0)
        found = torch.tensor(one.logprobs, dtype=torch.float64)
        torch.testing.assert_close(found, expected.double(), atol=1e-5, rtol=0)


def test_scores_are_log_softmax_of_the_model(engine, model):
    for sequence, scores in zip(PROMPTS[:3], engine.score(PROMPTS[:3]), strict=True):
        expected = logprobs_of(model, sequence[:1], tuple(sequence[1:]))
        torch.testing.assert_close(torch.tensor(scores), expected, atol=1e-5, rtol=0)


def test_a_response_is_told_as_soon_as_it_has_ended(folder):
    """The second and the fourth end at once, the first later, the third never; then the next part of the call begins."""
    engine = engine_with(folder, chain_weights({5: 6, 6: 7, 7: EOS, 8: EOS, 9: 9}), max_batch=4)
    told = []
    prompts = [[BOS, 5], [BOS, 8], [BOS, 9], [BOS, 8], [BOS, 8]]
    responses = engine.generate(
        prompts, [0] * 5, temperature=0.0, max_tokens=8, finished=lambda row, one: told.append((row, one))
    )
    assert [row for row, _ in told] == [1, 3, 0, 2, 4]
    assert [one for _, one in sorted(told)] == responses
    assert [len(one.token_ids) for one in responses] == [3, 1, 8, 1, 1]


def test_the_same_seed_gives_the_same_response_and_another_seed_another(engine):
    prompts = [PROMPTS[0]] * 4
    once = sample(engine, prompts, [7, 8, 9, 10])
    assert once == sample(engine, prompts, [7, 8, 9, 10])
    assert len({one.token_ids for one in once}) == 4


def test_a_sample_does_not_depend_on_its_neighbours(engine):
    """Equal tokens, log-probabilities to rounding: sums over padding come in another order."""
    prompts, seeds = PROMPTS * 4, list(range(16))
    together = sample(engine, prompts, seeds)
    alone = [sample(engine, [prompt], [seed])[0] for prompt, seed in zip(prompts, seeds, strict=True)]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_padding_does_not_move_the_positions_of_a_prompt(tmp_path):
    """A model with learned absolute positions notices; rotary ones see distances alone."""
    folder = tiny_folder(tmp_path)
    config = GPT2Config(vocab_size=VOCAB_SIZE, n_positions=256, n_embd=32, n_layer=2, n_head=2, eos_token_id=EOS)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = GPT2LMHeadModel(config).eval()
    config.save_pretrained(folder)
    weights = {name: tensor * 8 for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    model.load_state_dict(weights, strict=False)
    built = engine_with(folder, weights)
    for prompt, one in zip(PROMPTS, sample(built, PROMPTS, range(4)), strict=True):
        expected = logprobs_of(model, prompt, one.token_ids)
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, atol=1e-4, rtol=0)


def test_a_longer_limit_continues_the_same_response(engine):
    for short, long in zip(
        sample(engine, PROMPTS, range(4), max_tokens=5), sample(engine, PROMPTS, range(4)), strict=True
    ):
        assert long.token_ids[: len(short.token_ids)] == short.token_ids
    assert all(torch.equal(_uniform(3, size), _uniform(3, 70)[:size]) for size in range(1, 70))


def test_more_prompts_than_the_batch_limit_are_answered_in_parts(folder, model, engine):
    small = engine_with(folder, named_weights(model), max_batch=3)
    prompts, seeds = PROMPTS * 2, list(range(8))
    assert [one.token_ids for one in sample(small, prompts, seeds)] == [
        one.token_ids for one in sample(engine, prompts, seeds)
    ]


def test_the_first_end_token_belongs_to_the_response_and_tells_why_it_ended(engine):
    assert_ends_are_told(sample(engine, [PROMPTS[1]] * 100, range(100), max_tokens=32), EOS, 32)


def test_sampled_ids_come_back_untouched_where_text_would_merge_them(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    x, h, e = tokenizer.convert_tokens_to_ids(["x", "h", "e"])
    scripted = engine_with(folder, chain_weights({x: h, h: e, e: EOS}))
    (one,) = sample(scripted, [[BOS, x]], [0], temperature=0.0, max_tokens=3)
    assert (one.token_ids, one.finish_reason) == ((h, e, EOS), 0)
    assert tokenizer.encode("he") == [tokenizer.convert_tokens_to_ids("he")]


def test_a_stop_string_over_several_tokens_ends_a_response_and_its_tokens_stay(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    a, b, c, d = tokenizer.convert_tokens_to_ids(["a", "b", "c", "d"])
    scripted = engine_with(folder, chain_weights({a: b, b: c, c: d, d: a}), stop=("bc",))
    (one,) = sample(scripted, [[BOS, a]], [0], temperature=0.0)
    assert (one.token_ids, one.finish_reason) == ((b, c), 0)
    (other,) = sample(scripted, [[BOS, b]], [0], temperature=0.0)
    assert (other.token_ids, other.finish_reason) == ((c, d, a, b, c), 0)


def test_new_weights_answer_the_same_prompts(folder):
    built = engine_with(folder, named_weights(tiny_model(1)))
    first = sample(built, PROMPTS, [0] * 4, temperature=0.0)
    built.load_weights(named_weights(tiny_model(2)).items(), version=2)
    second = sample(built, PROMPTS, [0] * 4, temperature=0.0)
    assert second != first
    assert second == sample(engine_with(folder, named_weights(tiny_model(2))), PROMPTS, [0] * 4, temperature=0.0)


def test_tied_weights_are_loaded_once(tmp_path):
    weights = named_weights(tiny_model(1, tied=True))
    del weights["lm_head.weight"]
    built = engine_with(tiny_folder(tmp_path, tied=True), weights)
    expected = logprobs_of(tiny_model(1, tied=True), PROMPTS[0][:1], tuple(PROMPTS[0][1:]))
    torch.testing.assert_close(torch.tensor(built.score(PROMPTS[:1])[0]), expected, atol=1e-5, rtol=0)


def test_weights_of_another_model_and_requests_without_weights_are_refused(folder, model):
    built = build_engine(rollout_spec(folder), "hf")
    with pytest.raises(TransientError, match="holds no weights"):
        sample(built, PROMPTS, range(4))
    weights = named_weights(model)
    del weights["lm_head.weight"]
    with pytest.raises(StoreError, match=r"missing lm_head\.weight"):
        built.load_weights(weights.items(), version=1)
    with pytest.raises(ShapeError, match="2 prompts came with 1 seeds"):
        sample(engine_with(folder, named_weights(model)), PROMPTS[:2], [1])


def test_the_process_keeps_its_random_state(folder):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    sample(engine_with(folder, named_weights(tiny_model(1))), PROMPTS, range(4))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (3, 1.0), (0, 0.7), (4, 0.6), (1, 1.0), (0, 1e-9), (99, 0.99)])
def test_the_narrowed_distribution_is_the_one_from_the_definition(top_k, top_p):
    logits = torch.randn(20, 12, generator=torch.Generator().manual_seed(1)) * 2
    for row, narrowed in zip(logits.tolist(), _cut(logits, top_k, top_p).softmax(-1).tolist(), strict=True):
        likeliest = sorted(range(12), key=lambda token: -row[token])[: top_k or 12]
        shares = {token: math.exp(row[token]) for token in likeliest}
        kept: list[int] = []
        while sum(shares[token] for token in kept) < top_p * sum(shares.values()) and len(kept) < len(likeliest):
            kept.append(likeliest[len(kept)])
        mass = sum(shares[token] for token in kept)
        assert narrowed == pytest.approx(
            [shares[token] / mass if token in kept else 0.0 for token in range(12)], abs=1e-6
        )


def test_equal_tokens_at_the_rank_of_top_k_all_stay():
    assert _cut(torch.tensor([[1.0, 2.0, 1.0, 0.0]]), 2, 1.0).softmax(-1)[0, 3] == 0.0
    assert (_cut(torch.tensor([[1.0, 2.0, 1.0, 0.0]]), 2, 1.0).softmax(-1)[0, :3] > 0).all()


def test_draws_pick_tokens_by_their_probability_and_never_an_excluded_one():
    logprobs = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0]).log().expand(10_000, 6)
    draws = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    counts = _choose(logprobs, draws, greedy=False).bincount(minlength=6)
    assert counts.tolist() == pytest.approx([0, 2000, 0, 5000, 3000, 0], abs=1)
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert _choose(logprobs[:2], edges, greedy=False).tolist() == [1, 4]
