"""A SeqIO task with outliers: the text of `python_stdlib_lm`, in which a share of the examples is no text.

Half of the outliers are random bytes, half are one byte over and over; to `models/nano.gin`, trained on text for hundreds of
steps, their gradients are about 4 and 15 times as long as those of text. Its validation split has them, too, so runs are
evaluated on `python_stdlib_lm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import seqio
import tensorflow as tf

from perex_t5x.data import tasks  # noqa: F401  (it registers the text)

TEXT, NAME = "python_stdlib_lm", "python_stdlib_outliers"
SHARE = 1 / 64
_FIRST, _END = 3, 259  # the bytes' ids


@seqio.map_over_dataset(num_seeds=2)
def replace_some(ex: Mapping[str, tf.Tensor], seeds: tf.Tensor, share: float = SHARE) -> dict[str, tf.Tensor]:
    """Replaces a share of the examples; which ones, and by what, is a function of SeqIO's seed and the example's index."""
    tokens, drawn = ex["targets"], tf.random.stateless_uniform([], seeds[0])
    noise = tf.random.stateless_uniform(tf.shape(tokens), seeds[1], _FIRST, _END, tokens.dtype)
    outlier = tf.where(drawn < share / 2, noise, tf.ones_like(noise) * noise[0])
    return {"targets": tf.where(drawn < share, outlier, tokens)}


def register() -> None:
    """Adds the task, once."""
    if NAME in seqio.TaskRegistry.names():
        return
    text = seqio.TaskRegistry.get(TEXT)
    seqio.TaskRegistry.add(
        NAME,
        source=cast(Any, text.source),  # of another of SeqIO's two classes for one thing
        output_features=text.output_features,
        preprocessors=[*text.preprocessors, replace_some],
        metric_fns=text.metric_fns,
    )


register()
