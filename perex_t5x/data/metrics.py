"""Metric functions of the tasks, for `seqio.Evaluator`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np


def text_and_tokens(output: Any, example: Mapping[str, Any] = MappingProxyType({}), is_target: bool = False):
    """Postprocessor: a target becomes {'text', 'tokens'}; a prediction stays as it is."""
    if not is_target:
        return output
    return {"text": output, "tokens": np.asarray(example["targets"])}


def log_likelihood(
    targets: Sequence[Mapping[str, Any]], scores: Sequence[float] | tuple[Sequence[float], Any]
) -> dict[str, float]:
    """Mean log likelihood of a sequence and of a token, and bits per byte of the text.

    bits_per_byte = −Σ log p / (ln 2 · Σ bytes): comparable between vocabularies. The bytes are
    those of the decoded text; a character cut by the end of a chunk is not counted.
    """
    per_sequence = scores[0] if isinstance(scores, tuple) else scores  # (scores, intermediates) of some score functions
    total = float(np.sum(np.asarray(per_sequence, np.float64)))
    tokens = sum(int(np.count_nonzero(t["tokens"])) for t in targets)
    num_bytes = sum(len(t["text"].encode("utf-8", errors="replace")) for t in targets)
    return {
        "log_likelihood_per_sequence": total / max(len(targets), 1),
        "log_likelihood_per_token": total / max(tokens, 1),
        "bits_per_byte": -total / (math.log(2) * max(num_bytes, 1)),
    }


def exact_match_and_token_accuracy(vocabulary: Any) -> Callable[..., dict]:
    """Metric: percent of predictions equal to the target, and of tokens right in their place.

    Sentinels decode to nothing, so both measure the text of the spans alone. Where lengths differ,
    the longer one counts.
    """

    def metric(targets: Sequence[Mapping[str, Any]], predictions: Sequence[str]) -> dict:
        texts = [t["text"] for t in targets]
        exact = sum(t == p for t, p in zip(texts, predictions, strict=True))
        right = total = 0
        for text, prediction in zip(texts, predictions, strict=True):
            a, b = vocabulary.encode(text), vocabulary.encode(prediction)
            right += sum(x == y for x, y in zip(a, b, strict=False))
            total += max(len(a), len(b))
        return {"exact_match": 100.0 * exact / max(len(texts), 1), "token_accuracy": 100.0 * right / max(total, 1)}

    return metric
