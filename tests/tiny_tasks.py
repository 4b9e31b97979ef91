"""Registers the SeqIO task of `tests.tiny`; named as MIXTURE_OR_TASK_MODULE, as a user's own module would be."""

import functools

import numpy as np
import seqio
import tensorflow as tf

from perex_t5x.data import metrics, preprocessors
from tests.tiny import PAIRS_TASK, PREDICTED_TASK, TASK


def _documents(split: str) -> list[str]:
    rng = np.random.default_rng({"train": 0, "validation": 1}[split])
    words = ["def", "return", "for", "in", "if", "self", "None", "x", "y", "=="]
    return [" ".join(rng.choice(words, rng.integers(2, 12))) for _ in range(60)]


def _dataset(split: str, shuffle_files: bool = False, seed: int | None = None) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices({"text": _documents(split)})


if TASK not in seqio.TaskRegistry.names():
    seqio.TaskRegistry.add(
        TASK,
        source=seqio.FunctionDataSource(
            _dataset, splits=("train", "validation"), num_input_examples={"train": 60, "validation": 60}
        ),
        preprocessors=[
            functools.partial(seqio.preprocessors.rekey, key_map={"targets": "text"}),
            seqio.preprocessors.tokenize,
            seqio.preprocessors.append_eos,
            preprocessors.split_into_chunks,
        ],
        output_features={"targets": seqio.Feature(seqio.ByteVocabulary(), add_eos=True)},
        postprocess_fn=metrics.text_and_tokens,
        metric_fns=[metrics.log_likelihood],
    )

for _name, _metric in (
    (PAIRS_TASK, metrics.log_likelihood),
    (PREDICTED_TASK, metrics.exact_match_and_token_accuracy(seqio.ByteVocabulary())),
):
    if _name not in seqio.TaskRegistry.names():
        feature = seqio.Feature(seqio.ByteVocabulary(), add_eos=True)
        seqio.TaskRegistry.add(
            _name,
            source=seqio.FunctionDataSource(
                _dataset, splits=("train", "validation"), num_input_examples={"train": 60, "validation": 60}
            ),
            preprocessors=[
                functools.partial(seqio.preprocessors.rekey, key_map={"inputs": "text", "targets": "text"}),
                seqio.preprocessors.tokenize,
                seqio.preprocessors.append_eos,
            ],
            output_features={"inputs": feature, "targets": feature},
            postprocess_fn=metrics.text_and_tokens,
            metric_fns=[_metric],
        )
