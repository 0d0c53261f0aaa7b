"""What engines read from a model folder, and what they refuse."""

import json
import math

import pytest

from engine.backends.modelling import load_config
from engine.backends.serving import check_lengths, check_request, check_served, completion, end_token_ids
from engine.errors import ConfigError, DivergedError, ShapeError, TransientError
from tests.helpers.engines import rollout_spec
from tests.helpers.tiny import EOS, VOCAB_SIZE, tiny_folder


@pytest.fixture
def folder(tmp_path):
    return tiny_folder(tmp_path)


def rewrite(path, **changes):
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**content, **changes}))


def test_the_model_config_tells_the_end_token_where_there_is_no_generation_config(folder):
    assert end_token_ids(folder) == (EOS,)
    rewrite(folder / "config.json", eos_token_id=[7, 9])
    assert end_token_ids(folder) == (EOS, 7, 9)


def test_the_generation_config_goes_before_the_model_config(folder):
    rewrite(folder / "generation_config.json", eos_token_id=[11, 5])
    assert end_token_ids(folder) == (EOS, 5, 11)


def test_the_tokenizers_end_token_counts_even_if_the_configs_name_another(folder):
    """Supervised rows end with it, so the model learns to emit it."""
    rewrite(folder / "generation_config.json", eos_token_id=8)
    assert end_token_ids(folder) == (EOS, 8)


def test_a_model_that_could_never_stop_is_refused(folder):
    rewrite(folder / "config.json", eos_token_id=None)
    rewrite(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ConfigError, match="no end token"):
        end_token_ids(folder)


def test_samples_longer_than_the_models_positions_are_refused(folder):
    check_lengths(rollout_spec(folder, max_prompt_tokens=200, max_response_tokens=56), load_config(folder))
    with pytest.raises(ConfigError, match="A sample of 257 tokens") as caught:
        check_lengths(rollout_spec(folder, max_prompt_tokens=200, max_response_tokens=57), load_config(folder))
    assert "256 positions" in str(caught.value)


@pytest.mark.parametrize(
    "prompts, seeds, max_tokens, message",
    [
        ([[1], [2]], [3], 4, "2 prompts came with 1 seeds"),
        ([[1], []], [3, 4], 4, "prompt 1 has 0 tokens"),
        ([[1] * 201], [3], 4, "prompt 0 has 201 tokens; the engine was built for 1 to 200"),
        ([[1, VOCAB_SIZE]], [3], 4, f"prompt 0 holds ids 1 to {VOCAB_SIZE}; there are {VOCAB_SIZE} ids"),
        ([[-1, 3]], [3], 4, "prompt 0 holds ids -1 to 3"),
        ([[1]], [-1], 4, "seed -1"),
        ([[1]], [2**63], 4, "seed 9223372036854775808"),
        ([[1]], [3], 0, "max_tokens is 0"),
        ([[1]], [3], 33, "max_tokens is 33; the engine was built for 1 to 32"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(tmp_path, prompts, seeds, max_tokens, message):
    with pytest.raises(ShapeError, match=message.replace("(", r"\(")):
        check_request(rollout_spec(tmp_path), VOCAB_SIZE, prompts, seeds, max_tokens)


def test_the_largest_request_fits(tmp_path):
    check_request(rollout_spec(tmp_path), VOCAB_SIZE, [[VOCAB_SIZE - 1] * 200], [2**63 - 1], 32)


def test_every_token_needs_its_logprob():
    with pytest.raises(ShapeError, match="sampled 2 tokens and reported 1"):
        completion([4, 5], [-1.0], 0, version=3)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_logprobs_that_are_not_finite_are_an_error(value):
    with pytest.raises(DivergedError, match="version 3"):
        completion([4, 5], [-1.0, value], 0, version=3)


def test_an_engine_without_weights_serves_nothing():
    assert check_served(0) == 0
    with pytest.raises(TransientError, match="holds no weights"):
        check_served(None)
