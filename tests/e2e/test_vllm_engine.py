"""The real vLLM engine on a tiny random model: seeds, weight sync, log-probabilities, ends of responses."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from engine.backends.engines import build_engine
from engine.backends.weight_sync import (
    LOGPROB_BOUNDS,
    WeightHandle,
    exchange_folder,
    probe_sequences,
    receive,
    retract,
    verify_served,
)
from engine.errors import ConfigError, DivergedError, ShapeError, StoreError, TransientError
from tests.helpers.engines import assert_ends_are_told, logprobs_of, rollout_spec, shared_vllm
from tests.helpers.tiny import BOS, EOS, VOCAB_SIZE, chain_weights, named_weights, tiny_folder, tiny_model

STEM = [BOS, *((7 * place) % 90 + 3 for place in range(160))]  # long enough to fill cached blocks and to be split
PROMPTS = [[BOS, 5, 6, 7], [BOS, 40, 41], [BOS, *range(10, 60)], [*STEM, 9], [*STEM, 8, 20]]


@pytest.fixture(scope="module")
def first():
    return tiny_model(1)


@pytest.fixture(scope="module")
def second():
    return tiny_model(2)


@pytest.fixture(scope="module")
def answers_of_first(first):
    return greedy_of(first)


@pytest.fixture(scope="module")
def answers_of_second(second):
    return greedy_of(second)


@pytest.fixture
def engine(first):
    shared = shared_vllm()
    shared.load_weights(named_weights(first).items(), version=1)
    return shared


@pytest.fixture(scope="module")
def narrow_engine(tmp_path_factory) -> Iterator:
    """An engine with a stop string and a narrow distribution."""
    folder = tiny_folder(tmp_path_factory.mktemp("narrow"))
    other = build_engine(rollout_spec(folder, stop=("bc",), top_k=5, top_p=0.8), "vllm")
    yield other
    other.close()


def test_a_model_that_the_engine_cannot_run_is_found_when_it_is_built(tmp_path):
    folder = tiny_folder(tmp_path / "odd", head_dim=20)
    with pytest.raises(RuntimeError, match="head_dim=20"):
        build_engine(rollout_spec(folder), "vllm")


def sample(engine, prompts, seeds, temperature=1.0, max_tokens=24):
    return engine.generate(prompts, seeds, temperature=temperature, max_tokens=max_tokens)


def greedy(engine):
    return [one.token_ids for one in sample(engine, PROMPTS, [0] * len(PROMPTS), temperature=0.0, max_tokens=10)]


def greedy_of(model) -> list[tuple[int, ...]]:
    """The likeliest continuations of the prompts by one whole forward pass for each token."""
    answers = []
    for prompt in PROMPTS:
        ids = list(prompt)
        while len(ids) < len(prompt) + 10 and ids[-1] != EOS:
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(tuple(ids[len(prompt) :]))
    return answers


def test_the_same_seed_gives_the_same_bytes_and_another_seed_another_response(engine):
    prompts = [PROMPTS[0]] * 4
    once = sample(engine, prompts, [7, 8, 9, 10])
    assert once == sample(engine, prompts, [7, 8, 9, 10])
    assert len({one.token_ids for one in once}) == 4
    assert once != sample(engine, prompts, [11, 12, 13, 14])


def test_a_response_is_told_as_soon_as_it_has_ended(engine):
    told = []
    responses = engine.generate(
        PROMPTS * 8,
        list(range(8 * len(PROMPTS))),
        temperature=1.0,
        max_tokens=24,
        finished=lambda row, one: told.append((row, one)),
    )
    assert [one for _, one in sorted(told)] == responses
    lengths = [len(one.token_ids) for _, one in told]
    assert lengths == sorted(lengths) and len(set(lengths)) > 1, "all began together, so the shorter ended first"


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def test_a_sample_depends_neither_on_its_neighbours_nor_on_their_order(engine, two_threads):
    """Equal to the last bit, with prompts that share cached blocks, and more other prompt tokens than one step holds."""
    unlike = [[BOS, 3 + row, *STEM[2:]] for row in range(55)]
    assert sum(map(len, unlike)) > 8192
    prompts = PROMPTS * 6 + unlike + [STEM] * 8
    seeds = list(range(100, 100 + len(prompts)))
    together = sample(engine, prompts, seeds)
    assert sample(engine, prompts[::-1], seeds[::-1])[::-1] == together
    assert sample(engine, prompts[::9], seeds[::9]) == together[::9]
    assert [sample(engine, [prompts[row]], [seeds[row]])[0] for row in (2, 3, 4)] == together[2:5]


def test_greedy_responses_are_those_of_the_model(engine, answers_of_first):
    assert greedy(engine) == answers_of_first


def test_greedy_responses_have_finite_logprobs_of_the_model_itself(engine, first):
    for prompt, one in zip(PROMPTS, sample(engine, PROMPTS, [0] * 5, temperature=0.0), strict=True):
        torch.testing.assert_close(
            torch.tensor(one.logprobs), logprobs_of(first, prompt, one.token_ids), atol=1e-4, rtol=0
        )


def test_both_engines_agree_on_greedy_responses_and_scores(engine, first, tmp_path):
    plain = build_engine(rollout_spec(tiny_folder(tmp_path)), "hf")
    plain.load_weights(named_weights(first).items(), version=1)
    assert greedy(engine) == greedy(plain)
    for ours, theirs in zip(engine.score(PROMPTS), plain.score(PROMPTS), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_new_weights_answer_the_same_prompts_as_a_fresh_engine_would(
    engine, second, answers_of_first, answers_of_second
):
    """The prompts' keys and values are cached from the old weights when the new ones arrive."""
    assert greedy(engine) == answers_of_first != answers_of_second
    engine.load_weights(named_weights(second).items(), version=2)
    assert greedy(engine) == answers_of_second


def test_a_cache_that_cannot_be_reset_stops_the_sync(engine, second, answers_of_second):
    """vLLM refuses the reset while a request is running; nothing is served until a sync succeeds."""
    from vllm import SamplingParams

    core = engine._llm.llm_engine
    core.add_request("running", {"prompt_token_ids": STEM}, SamplingParams(max_tokens=8, detokenize=False))
    core.step()
    with pytest.raises(TransientError, match="prefix cache for version 2"):
        engine.load_weights(named_weights(second).items(), version=2)
    with pytest.raises(TransientError, match="holds no weights"):
        greedy(engine)
    while core.has_unfinished_requests():
        core.step()
    engine.load_weights(named_weights(second).items(), version=2)
    assert greedy(engine) == answers_of_second


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_those_at_the_sampling_temperature(engine, first, temperature):
    for prompt, one in zip(PROMPTS, sample(engine, PROMPTS, range(5), temperature), strict=True):
        expected = logprobs_of(first, prompt, one.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, atol=1e-4, rtol=0)


def test_scores_are_log_softmax_of_the_model(engine, first):
    sequences = [*probe_sequences(VOCAB_SIZE, seed=3), PROMPTS[2], [BOS, 5]]
    for sequence, scores in zip(sequences, engine.score(sequences), strict=True):
        expected = logprobs_of(first, sequence[:1], tuple(sequence[1:]))
        torch.testing.assert_close(torch.tensor(scores), expected, atol=1e-4, rtol=0)


def test_the_first_end_token_belongs_to_the_response_and_tells_why_it_ended(engine):
    assert_ends_are_told(sample(engine, [PROMPTS[1]] * 100, range(100), max_tokens=32), EOS, 32)


def test_sampled_ids_come_back_untouched_where_text_would_merge_them(engine):
    """The tokenizer has one id for "he", the model samples two; at the limit an end token is still a stop."""
    tokenizer = AutoTokenizer.from_pretrained(engine._spec.source)
    x, h, e = tokenizer.convert_tokens_to_ids(["x", "h", "e"])
    engine.load_weights(chain_weights({x: h, h: e, e: EOS}).items(), version=3)
    (one,) = sample(engine, [[BOS, x]], [0], temperature=0.0, max_tokens=3)
    assert (one.token_ids, one.finish_reason) == ((h, e, EOS), 0)
    assert tokenizer.encode("he") == [tokenizer.convert_tokens_to_ids("he")]
    (cut,) = sample(engine, [[BOS, x]], [0], temperature=0.0, max_tokens=2)
    assert (cut.token_ids, cut.finish_reason) == ((h, e), 1)


def test_a_stop_string_over_several_tokens_ends_a_response_and_its_tokens_stay(narrow_engine):
    tokenizer = AutoTokenizer.from_pretrained(narrow_engine._spec.source)
    a, b, c, d = tokenizer.convert_tokens_to_ids(["a", "b", "c", "d"])
    narrow_engine.load_weights(chain_weights({a: b, b: c, c: d, d: a}).items(), version=1)
    one, other = sample(narrow_engine, [[BOS, a], [BOS, b]], [3, 4], temperature=0.0)
    assert (one.token_ids, one.finish_reason) == ((b, c), 0)
    assert (other.token_ids, other.finish_reason) == ((c, d, a, b, c), 0)


def test_tied_weights_are_served_anew_after_every_sync(tmp_path):
    tied = build_engine(rollout_spec(tiny_folder(tmp_path, tied=True)), "vllm")
    sequences = probe_sequences(VOCAB_SIZE, seed=3)
    for seed in (1, 2):
        model = tiny_model(seed, tied=True)
        weights = named_weights(model)
        del weights["lm_head.weight"]
        tied.load_weights(weights.items(), version=seed)
        for sequence, scores in zip(sequences, tied.score(sequences), strict=True):
            expected = logprobs_of(model, sequence[:1], tuple(sequence[1:]))
            torch.testing.assert_close(torch.tensor(scores), expected, atol=1e-4, rtol=0)
    tied.close()


def test_logprobs_are_those_of_the_narrowed_distribution(narrow_engine, first):
    """Reference by lists: the five likeliest, of those the fewest that hold 0.8 of their mass, renormalised."""
    narrow_engine.load_weights(named_weights(first).items(), version=1)
    (one,) = sample(narrow_engine, [PROMPTS[0]], [5])
    for place, (token, logprob) in enumerate(zip(one.token_ids, one.logprobs, strict=True)):
        with torch.no_grad():
            ids = torch.tensor([[*PROMPTS[0], *one.token_ids[:place]]])
            probabilities = first(ids).logits[0, -1].softmax(-1).tolist()
        likeliest = sorted(range(VOCAB_SIZE), key=lambda token: -probabilities[token])[:5]
        mass, kept = sum(probabilities[token] for token in likeliest), []
        while sum(probabilities[token] for token in kept) < 0.8 * mass:
            kept.append(likeliest[len(kept)])
        expected = probabilities[token] / sum(probabilities[token] for token in kept)
        assert token in kept
        assert logprob == pytest.approx(torch.tensor(expected).log().item(), abs=1e-4)


PUBLISH = """
import dataclasses, json, sys
from safetensors.torch import load_file
from engine.backends.weight_sync import exchange_folder, publish
handle = publish(load_file(sys.argv[1]), exchange_folder(sys.argv[2]), 2)
print(json.dumps(dataclasses.asdict(handle)))
"""


def test_weights_of_another_process_are_served_and_stale_ones_are_found(engine, second, answers_of_second, tmp_path):
    key = f"test-{tmp_path.name}"
    save_file(named_weights(second), tmp_path / "trained.safetensors")
    run = [sys.executable, "-c", PUBLISH, str(tmp_path / "trained.safetensors"), key]
    output = subprocess.run(run, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
    handle = WeightHandle(**json.loads(output.splitlines()[-1]))
    probes = probe_sequences(VOCAB_SIZE, seed=7)
    trained = [logprobs_of(second, probe[:1], tuple(probe[1:])).tolist() for probe in probes]
    limits = {"bound": LOGPROB_BOUNDS["float32"], "trained_version": 2}
    with pytest.raises(DivergedError, match="serves version 1 and the trainer holds version 2"):
        verify_served(engine.score(probes), trained, served_version=1, **limits)
    engine.load_weights(receive(handle), version=handle.version)
    retract(handle)
    assert verify_served(engine.score(probes), trained, served_version=2, **limits) < 1e-5
    assert greedy(engine) == answers_of_second
    assert not exchange_folder(key).exists()


def test_weights_of_another_model_are_refused_and_the_engine_takes_the_right_ones(engine, first, answers_of_first):
    weights = named_weights(first)
    name = "model.layers.1.mlp.up_proj.weight"
    for wrong, message in (
        ({k: v for k, v in weights.items() if k != name}, f"weights of version 2: missing {name}"),
        ({**weights, name: weights[name][:, :-1]}, r"is \[128, 63\] instead of \[128, 64\]"),
        ({**weights, "extra": weights[name]}, "unknown extra"),
    ):
        with pytest.raises(StoreError, match=message):
            engine.load_weights(wrong.items(), version=2)
        with pytest.raises(TransientError, match="holds no weights"):
            greedy(engine)
    engine.load_weights(weights.items(), version=1)
    assert greedy(engine) == answers_of_first


def test_weights_that_are_not_finite_are_never_served(engine, first, answers_of_first):
    """They would poison the cache for all that come after them."""
    weights = named_weights(first)
    broken = {**weights, "lm_head.weight": weights["lm_head.weight"] / 0}
    with pytest.raises(DivergedError, match=r"lm_head.weight of version 9 holds values that are not finite"):
        engine.load_weights(broken.items(), version=9)
    engine.load_weights(weights.items(), version=1)
    assert greedy(engine) == answers_of_first


def test_requests_that_do_not_fit_are_refused(engine):
    with pytest.raises(ShapeError, match="prompt 1 has 201 tokens"):
        sample(engine, [[BOS], [BOS] * 201], [1, 2])
    with pytest.raises(ShapeError, match="2 prompts came with 1 seeds"):
        sample(engine, [[BOS], [BOS]], [1])
    with pytest.raises(ConfigError, match=r"rollout.temperature = 0.001"):
        sample(engine, [[BOS]], [1], temperature=0.001)
    with pytest.raises(ShapeError, match="sequence 0 has 1 tokens"):
        engine.score([[BOS]])
    assert sample(engine, [], []) == []


def test_engines_leave_the_process_as_it_was(engine, tmp_path):
    """Random state, thread count and process group belong to the trainer that may live in the same process."""
    before = sample(engine, PROMPTS, range(5))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    other = build_engine(rollout_spec(tiny_folder(tmp_path)), "vllm")
    sample(engine, PROMPTS, range(5))
    assert torch.equal(torch.rand(3), expected)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    other.close()
    assert torch.distributed.get_world_size() == 1
    assert sample(engine, PROMPTS, range(5)) == before


def test_an_engine_starts_in_a_process_that_has_imported_flask(tmp_path):
    """MLflow's server parts and functions of a user do; vLLM looks into all modules, and flask's proxies raise."""
    import flask

    assert sys.modules["flask"] is flask
    other = build_engine(rollout_spec(tiny_folder(tmp_path)), "vllm")
    other.close()
    assert sys.modules["flask"] is flask


def test_settings_that_vllm_cannot_run_are_configuration_errors(tmp_path):
    folder = tiny_folder(tmp_path)
    for options, message in (
        ({"tensor_parallel": 2}, "rollout.tensor_parallel = 2"),
        ({"max_batched_tokens": 64}, "rollout.max_batched_tokens = 64"),
        ({"max_prompt_tokens": 300}, "data.max_prompt_tokens = 300"),
        ({"kv_cache_gib": 100_000}, "vLLM refuses the rollout settings"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_engine(rollout_spec(folder, **options), "vllm")
