"""Options of `reward`: one section per kind of scorer."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from engine.trainconfig import Coefficient, NonNegativeInt, PositiveFloat, PositiveInt, Real, Section

Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]  # of an environment variable


class ExactMatchReward(Section):
    """1 where the stripped response equals the answer, else 0."""

    kind: Literal["exact_match"] = "exact_match"
    weight: Real = 1.0
    ignore_case: bool = False


class NumberReward(Section):
    """1 where the last number of the response equals the answer within `tolerance`, else 0."""

    kind: Literal["number"] = "number"
    weight: Real = 1.0
    tolerance: Coefficient = 0.0


class MathReward(Section):
    """1 where math-verify finds response and answer equal, else 0."""

    kind: Literal["math"] = "math"
    weight: Real = 1.0
    timeout_s: PositiveFloat = 5.0


class RegexReward(Section):
    """1 where the pattern is found in the response, else 0."""

    kind: Literal["regex"] = "regex"
    weight: Real = 1.0
    pattern: str
    timeout_s: PositiveFloat = 5.0


class ChoiceReward(Section):
    """1 where the choice that the response states last is the answer's letter, else 0."""

    kind: Literal["choice"] = "choice"
    weight: Real = 1.0
    choices: Annotated[str, Field(pattern=r"^[A-Z]{2,26}$")] = "ABCD"


class FormatReward(Section):
    """1 where the response consists of these tagged parts, each once and in this order, else 0."""

    kind: Literal["format"] = "format"
    weight: Real = 1.0
    tags: Annotated[tuple[Annotated[str, Field(pattern=r"^[\w-]+$")], ...], Field(min_length=1)] = ("think", "answer")


class JsonSchemaReward(Section):
    """1 where the response is JSON that the schema accepts, else 0. Given is either `definition` or `path`."""

    kind: Literal["json_schema"] = "json_schema"
    weight: Real = 1.0
    definition: dict[str, Any] = Field(default_factory=dict)  # the schema itself
    path: str | None = None  # of a JSON file; its content becomes the definition when the configuration is loaded
    fenced: bool = False  # in a response with a ```json block, the last such block counts
    timeout_s: PositiveFloat = 5.0


class LengthPenaltyReward(Section):
    """0 up to max_tokens - buffer_tokens response tokens, then falling in a line to -1 at max_tokens (DAPO, eq. 13)."""

    kind: Literal["length_penalty"] = "length_penalty"
    weight: Real = 1.0
    max_tokens: PositiveInt
    buffer_tokens: PositiveInt


class RepetitionPenaltyReward(Section):
    """Minus the share of n-grams that repeat an earlier one: 0 where none does, towards -1 where all do."""

    kind: Literal["repetition_penalty"] = "repetition_penalty"
    weight: Real = 1.0
    ngram: PositiveInt = 3
    unit: Literal["words", "characters"] = "words"


class ReasoningGymReward(Section):
    """Score of a reasoning-gym verifier; the row's `extra` carries the entry that the data set made."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    weight: Real = 1.0
    dataset: str
    timeout_s: PositiveFloat = 5.0


class PythonReward(Section):
    """A function `score(prompt, response, answer, extra) -> float | None`, by import path `package.module:function`."""

    kind: Literal["python"] = "python"
    weight: Real = 1.0
    function: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    needs_answer: bool = True
    timeout_s: PositiveFloat = 10.0
    workers: PositiveInt = 1  # killable scorer processes


class ServiceReward(Section):
    """What all scorers behind HTTP share. A failed call is repeated `retries` times, with growing pauses."""

    weight: Real = 1.0
    token_env: Name | None = None  # environment variable whose value is sent as bearer token; never stored
    concurrency: PositiveInt = 8  # calls under way at once, of each reward rank
    timeout_s: PositiveFloat = 60.0  # of one call, reading its reply included
    retries: NonNegativeInt = 4  # after lost connections, timeouts, 408, 425, 429 and 5xx
    backoff_s: PositiveFloat = 0.5  # pause before the first repetition, doubled each time; Retry-After is respected


class HttpReward(ServiceReward):
    """A service: POST {"samples": [{"prompt", "response", "answer", "extra"}]} gives {"scores": [number or null]}."""

    kind: Literal["http"] = "http"
    url: str
    batch_size: PositiveInt = 32  # samples of one call
    needs_answer: bool = True


class JudgeReward(ServiceReward):
    """A language model behind an OpenAI-compatible endpoint, asked at temperature 0; low..high becomes 0..1."""

    kind: Literal["judge"] = "judge"
    base_url: str  # up to and without /chat/completions
    model: str
    template: str  # text with {response}, and {prompt} and {answer} where wanted; other braces stay as they are
    pattern: str = r"(?i)score\W{0,8}(-?\d+(?:\.\d+)?)"  # its last match in the reply; the group is the number
    low: Real = 0.0
    high: Real = 10.0
    max_tokens: PositiveInt = 1024  # of the reply


class ModelReward(Section):
    """Score of a reward model, read at the last token of prompt and response; its tokenizer is the policy's."""

    kind: Literal["model"] = "model"
    weight: Real = 1.0
    source: str  # local folder, models:/NAME@ALIAS, models:/NAME/VERSION, runs:KEY[/STEP] or Hub id


RewardConfig = Annotated[
    ExactMatchReward
    | NumberReward
    | MathReward
    | ChoiceReward
    | RegexReward
    | FormatReward
    | JsonSchemaReward
    | LengthPenaltyReward
    | RepetitionPenaltyReward
    | ReasoningGymReward
    | PythonReward
    | HttpReward
    | JudgeReward
    | ModelReward,
    Field(discriminator="kind"),
]


def needs_answer(reward: Section) -> bool:
    """Whether this reward compares the response with a reference answer that every row must carry."""
    match reward:
        case PythonReward() | HttpReward():
            return reward.needs_answer
        case JudgeReward():
            return "{answer}" in reward.template
        case _:
            return isinstance(reward, ExactMatchReward | NumberReward | MathReward | ChoiceReward)


def component_names(rewards: Sequence[RewardConfig]) -> list[str]:
    """What each entry is called in metrics and reports: its kind, numbered from the second use on (regex, regex_2)."""
    kinds = [reward.kind for reward in rewards]
    earlier = [kinds[:position].count(kind) for position, kind in enumerate(kinds)]
    return [f"{kind}_{count + 1}" if count else kind for kind, count in zip(kinds, earlier, strict=True)]
