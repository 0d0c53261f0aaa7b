"""Content hashes change with content and with nothing else."""

import pytest

from engine.data.fingerprint import row_digest, rows_fingerprint, tokenizer_fingerprint
from tests.helpers.tokenizers import TURNS, TURNS_WITH_BOS, char_tokenizer, merging_tokenizer, save_tokenizer


def test_the_order_of_keys_does_not_count_and_types_do():
    assert row_digest({"a": 1, "b": [1.5]}) == row_digest({"b": [1.5], "a": 1})
    assert len({row_digest({"a": value}) for value in (1, "1", 1.0, True, None, [1], {"a": 1})}) == 7


def test_the_order_and_number_of_rows_count():
    one, two = row_digest({"a": 1}), row_digest({"a": 2})
    assert len({rows_fingerprint(rows) for rows in ([], [one], [one, two], [two, one], [one, one])}) == 5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", b"bytes"])
def test_what_json_cannot_hold_is_refused(value):
    with pytest.raises((ValueError, TypeError)):
        row_digest({"a": value})


def test_tokenizers_that_give_other_ids_differ():
    others = [
        char_tokenizer(),
        char_tokenizer(bos=False),
        char_tokenizer(adds_bos=True),
        char_tokenizer(template=TURNS),
        char_tokenizer(template=TURNS_WITH_BOS),
        merging_tokenizer(),
    ]
    assert len({tokenizer_fingerprint(tokenizer) for tokenizer in others}) == len(others)


def test_calls_with_padding_and_truncation_change_nothing():
    tokenizer = char_tokenizer()
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "bcd"], padding="max_length", truncation=True, max_length=2)
    assert tokenizer.backend_tokenizer.truncation is not None
    assert tokenizer_fingerprint(tokenizer) == before


def test_the_folder_does_not_count_and_another_tokenizer_in_it_does(tmp_path):
    from engine.data.templating import load_tokenizer

    def loaded(tokenizer, name):
        return tokenizer_fingerprint(load_tokenizer(str(save_tokenizer(tokenizer, tmp_path / name)), None))

    first = loaded(char_tokenizer(), "model")
    assert loaded(char_tokenizer(), "copy") == first
    assert loaded(merging_tokenizer(), "model") != first
