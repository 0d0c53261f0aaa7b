"""Penalties: rules without a right answer, 0 at best and -1 at worst; a positive weight punishes."""

from engine.reward.scorer import Sample, Score


def length_penalty(sample: Sample, *, max_tokens: int, buffer_tokens: int) -> Score:
    """0 up to max_tokens - buffer_tokens response tokens, then linear to -1 at max_tokens and beyond (DAPO, eq. 13).

    The end token counts as a token of the response.
    """
    over = sample.response_tokens - (max_tokens - buffer_tokens)
    return min(0.0, max(-over / buffer_tokens, -1.0))


def repetition_penalty(sample: Sample, *, ngram: int, unit: str) -> Score:
    """Minus the share of the response's n-grams that stood earlier in it; 0 for less than two n-grams.

    unit: "words" are separated by white space and compared without case; "characters" suits scripts without spaces.
    """
    text = sample.response.casefold()
    parts = tuple(text.split()) if unit == "words" else tuple(text)
    grams = [parts[start : start + ngram] for start in range(len(parts) - ngram + 1)]
    return (len(set(grams)) - len(grams)) / len(grams) if grams else 0.0
