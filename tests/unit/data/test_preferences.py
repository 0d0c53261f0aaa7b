"""Rows of pairs in the shapes of TRL, OpenRLHF, verl and PKU-SafeRLHF mean the same pair; labels are checked."""

from typing import Any

import pytest

from engine.data.preferences import HARM, HELPFULNESS, MARGINS, is_pair
from engine.data.schema import BadRow
from engine.offlineconfig import PreferenceSource

SOURCE = PreferenceSource(path="memory")
USER, GOOD, BAD = (
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
    {"role": "assistant", "content": "5"},
)
PKU = {
    "prompt": "2+2=",
    "response_0": "5",
    "response_1": "4",
    "is_response_0_safe": False,
    "is_response_1_safe": True,
    "better_response_id": 1,
    "safer_response_id": 1,
}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2=", "chosen": "4", "rejected": "5"},  # TRL, OpenRLHF
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},  # TRL, conversational
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},  # TRL, implicit prompt
        {"data_source": "sums", "prompt": [USER], "chosen": "4", "rejected": "5", "extra_info": {"index": 3}},  # verl
        PKU,
    ],
    ids=["plain", "messages", "implicit", "verl", "pku"],
)
def test_all_shapes_give_the_same_pair(row: dict[str, Any]) -> None:
    assert is_pair(row.keys()) and HELPFULNESS.missing(row.keys(), SOURCE) == {}
    content = HELPFULNESS.parse(row, SOURCE)
    assert content.completions == ("4", "5")
    assert content.prompt in ("2+2=", [USER])


def test_columns_may_have_any_name() -> None:
    source = PreferenceSource(path="memory", input_key="question", chosen_key="good", rejected_key="bad")
    row = {"question": "2+2=", "good": "4", "bad": "5", "chosen": "no", "rejected": "neither"}
    assert HELPFULNESS.missing(row.keys(), source) == {}
    assert HELPFULNESS.parse(row, source).completions == ("4", "5")
    assert HELPFULNESS.missing({"question", "good", "rejected"}, source) == {"rejected_key": "no column `bad`"}


def test_the_safer_response_need_not_be_the_better_one() -> None:
    row = PKU | {"better_response_id": 0}
    assert HELPFULNESS.parse(row, SOURCE).completions == ("5", "4")
    content = HARM.parse(row, SOURCE)
    assert content.completions == ("4", "5")
    assert content.extra == {"is_chosen_safe": True, "is_rejected_safe": False}


def test_labels_of_safety_are_taken_from_their_own_columns() -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "is_chosen_safe": False, "is_rejected_safe": False}
    assert HARM.parse(row, SOURCE).extra == {"is_chosen_safe": False, "is_rejected_safe": False}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"safer_response_id": 2}, "must be 0 or 1"),
        ({"safer_response_id": True}, "must be 0 or 1"),
        ({"safer_response_id": 0}, "labelled unsafe and the more harmful one safe"),
        ({"is_response_0_safe": None}, "must be true or false"),
        ({"response_0": "4"}, "are equal"),
    ],
)
def test_labels_that_cannot_be_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRow, match=said):
        HARM.parse(PKU | changed, SOURCE)


@pytest.mark.parametrize("margin", [None, -0.5, "1", True])
def test_a_margin_is_a_number_of_at_least_0(margin: Any) -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "margin": margin}
    with pytest.raises(BadRow, match="margin"):
        MARGINS.parse(row, SOURCE)
    assert MARGINS.parse(row | {"margin": 2}, SOURCE).extra == {"margin": 2.0}


@pytest.mark.parametrize(
    ("shape", "columns", "said"),
    [
        (HELPFULNESS, {"prompt", "chosen"}, "`rejected`"),
        (HELPFULNESS, {"prompt", "response_0", "response_1"}, "`better_response_id`"),
        (MARGINS, {"prompt", "chosen", "rejected"}, "`margin`"),
        (HARM, {"prompt", "chosen", "rejected", "is_chosen_safe"}, "`is_rejected_safe`"),
        (HARM, {"prompt", "response_0", "response_1", "safer_response_id"}, "`is_response_0_safe`"),
    ],
)
def test_a_file_without_a_needed_column_is_told_so(shape: Any, columns: set[str], said: str) -> None:
    assert said in shape.missing(columns, SOURCE)["path"]
