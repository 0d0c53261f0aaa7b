"""Content hashes: the same rows give the same hash whatever file, line ending or byte order mark carried them."""

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def row_digest(values: dict[str, Any]) -> str:
    """sha256 of one row. Raises ValueError or TypeError for what JSON in UTF-8 cannot hold (NaN, lone surrogates)."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def rows_fingerprint(digests: Iterable[str]) -> str:
    """sha256 over the digests of rows, in order."""
    total = hashlib.sha256()
    for digest in digests:
        total.update(digest.encode("ascii"))
    return total.hexdigest()


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """sha256 over all that decides ids: the tokenizer's rules and vocabulary, its special tokens, its chat template."""
    content = {
        "rules": _rules(tokenizer),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": tokenizer.chat_template,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()


def _rules(tokenizer: "PreTrainedTokenizerBase") -> Any:
    if not tokenizer.is_fast:
        return {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    # Earlier calls leave their padding and truncation in the tokenizer; they are not part of what it is.
    del rules["padding"], rules["truncation"]
    return rules
