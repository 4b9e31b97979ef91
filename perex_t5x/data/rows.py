"""A task's examples as fixed-size records: read through SeqIO once, then addressed by number."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from perex_t5x.data import lookup
from perex_t5x.errors import ConfigError

# Stochastic preprocessing is drawn once for the whole copy; a constant makes the copy, and so its
# fingerprint, the same in every run. The order of the rows has its own seed.
PREPROCESSING_SEED = 42
_FORMAT = 1
_READ_AT_ONCE = 4096


def _smallest(limit: int) -> np.dtype:
    for dtype in (np.uint8, np.uint16):
        if limit <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    return np.dtype(np.int32)


def row_dtype(task: Any, spec: Mapping[str, Any]) -> np.dtype:
    """One row as a NumPy record, each feature in the smallest integers that hold its values.

    A packed row of 128 byte tokens takes 896 bytes instead of 2560.
    """
    vocab_size = max(f.vocabulary.vocab_size for f in task.output_features.values() if hasattr(f, "vocabulary"))
    fields = []
    for name, feature in sorted(spec.items()):
        length = feature.shape[1]
        if feature.dtype != np.int32:
            dtype = np.dtype(feature.dtype)
        elif name.endswith("_tokens"):
            dtype = _smallest(vocab_size - 1)
        elif name.endswith(("_segment_ids", "_positions")):
            dtype = _smallest(length)
        elif name.endswith("_loss_weights"):
            dtype = np.dtype(np.uint8)
        else:
            dtype = np.dtype(np.int32)
        fields.append((name, dtype, feature.shape[1:]))
    return np.dtype(fields)


def _fields(dtype: np.dtype) -> tuple[str, ...]:
    return dtype.names or ()


def raw_bytes(records: np.ndarray) -> memoryview:
    """The memory of one-dimensional records, for hashes; not copied where it is in order."""
    return np.ascontiguousarray(records).view(np.uint8).data


def to_records(features: Mapping[str, np.ndarray], dtype: np.dtype, task_name: str) -> np.ndarray:
    """Features [n, L] as n records; refuses values that the record's types cannot hold."""
    records = np.empty(len(next(iter(features.values()))), dtype)
    for name in _fields(dtype):
        kind = dtype[name].base
        if kind.kind == "u" and len(records):
            low, high = features[name].min(), features[name].max()
            if low < 0 or high > np.iinfo(kind).max:
                raise ConfigError(
                    f"Task {task_name!r} gives {name} values from {low} to {high}, outside its "
                    f"vocabulary or length (0 to {np.iinfo(kind).max} can be held). Check that the "
                    "task's vocabulary is the one its tokens were made with."
                )
        records[name] = features[name]
    return records


def from_records(
    records: np.ndarray, dtypes: Mapping[str, np.dtype], out_rows: int | None = None
) -> dict[str, np.ndarray]:
    """Records back to features [n, L] of the model's dtypes, with zero rows up to `out_rows`."""
    n = len(records)
    if out_rows is None or out_rows == n:
        return {name: records[name].astype(dtypes[name]) for name in _fields(records.dtype)}
    features = {}
    for name in _fields(records.dtype):
        shape = (out_rows, *records.dtype[name].shape)
        features[name] = np.zeros(shape, dtypes[name])
        features[name][:n] = records[name]
    return features


def _bounds_lengths(task: Any) -> bool:
    return any(getattr(p, "bounds_lengths", False) for p in task.preprocessors)


def _fast_converter(converter: Any, lengths: Mapping[str, int]) -> bool:
    """Whether `packing` does what this converter does. Exactly these classes: a subclass may convert differently."""
    import seqio

    if type(converter) is seqio.DecoderFeatureConverter:
        return set(lengths) == {"targets"}  # then it hands over to LMFeatureConverter
    return type(converter) in (seqio.LMFeatureConverter, seqio.EncDecFeatureConverter)


def read_rows(
    task: Any, converter: Any, split: str, lengths: Mapping[str, int], cfg: Any, dtype: np.dtype
) -> Iterator[np.ndarray]:
    """Yields the task's converted rows, in SeqIO's unshuffled order, as arrays of records."""
    import tensorflow as tf

    fast = _fast_converter(converter, lengths)
    ds = task.get_dataset(
        lengths,
        split=split,
        use_cached=cfg.use_cached,
        shuffle=False,
        seed=PREPROCESSING_SEED,
        num_epochs=1,
        trim_output_features=cfg.trim_output_features and not (fast and _bounds_lengths(task)),
        try_in_mem_cache=False,
    )
    if not fast:
        ds = converter(ds, lengths).batch(_READ_AT_ONCE).prefetch(tf.data.AUTOTUNE)
        for features in ds.as_numpy_iterator():
            yield to_records(features, dtype, task.name)
        return
    if set(ds.element_spec) != set(lengths):
        ds = ds.map(lambda ex: {name: ex[name] for name in lengths})
    # A whole number of SeqIO's packing groups, so that groups fall where SeqIO's do.
    group = max(lengths.values())
    at_once = max(_READ_AT_ONCE // group, 1) * group
    ds = ds.padded_batch(at_once, {name: [length] for name, length in lengths.items()})
    convert = pack if converter.pack else pad
    try:
        for examples in ds.prefetch(2).as_numpy_iterator():
            features = model_features(convert(examples, lengths), converter.bos_id)
            yield to_records(features, dtype, task.name)
    except (tf.errors.DataLossError, tf.errors.InvalidArgumentError) as e:
        if "larger than the padded shape" not in str(e) and "Attempted to pad" not in str(e):
            raise
        raise ConfigError(
            f"Task {task.name!r} gives examples longer than TASK_FEATURE_LENGTHS = {dict(lengths)}"
            f" allows; set DatasetConfig.trim_output_features = True to cut them. ({e})"
        ) from e


def vocabulary_key(vocabulary: Any) -> list:
    key = [type(vocabulary).__name__, vocabulary.vocab_size, vocabulary.extra_ids]
    model = getattr(vocabulary, "sentencepiece_model_file", None)
    if model:
        import tensorflow as tf

        with tf.io.gfile.GFile(model, "rb") as f:
            key.append(hashlib.sha256(f.read()).hexdigest())
    return key


def _source_key(task: Any, split: str, use_cached: bool) -> list:
    import tensorflow as tf

    if use_cached and task.supports_caching:
        files = tf.io.gfile.glob(f"{task.cache_dir}/*")
        return sorted([f, tf.io.gfile.stat(f).length] for f in files)
    if hasattr(task.source, "digest"):
        return [task.source.digest(split)]
    shards = list(task.source.list_shards(split))
    if tfds_bytes := lookup.tfds_split_bytes(task.source, split):
        return [task.source.tfds_dataset.name, tfds_bytes, shards]
    lengths = [tf.io.gfile.stat(f).length if tf.io.gfile.exists(f) else None for f in shards]
    return [repr(task.source), shards, lengths]


def _preprocessor_key(fn: Any) -> str:
    inner = getattr(fn, "func", fn)
    name = getattr(inner, "__qualname__", type(inner).__name__)
    return f"{name}{sorted(getattr(fn, 'keywords', {}).items(), key=str)}"


def copy_key(task: Any, converter: Any, split: str, lengths: Mapping[str, int], cfg: Any, dtype: np.dtype) -> str:
    """Names a copy by everything that decides its content, without reading the content.

    The body of a preprocessor is not part of it, only its name and arguments.
    """
    key = {
        "format": _FORMAT,
        "task": task.name,
        "split": split,
        "lengths": dict(sorted(lengths.items())),
        "converter": type(converter).__qualname__,
        "pack": converter.pack,
        "trim": cfg.trim_output_features,
        "preprocessors": [_preprocessor_key(p) for p in task.preprocessors],
        "vocabularies": {
            name: vocabulary_key(f.vocabulary)
            for name, f in sorted(task.output_features.items())
            if hasattr(f, "vocabulary")
        },
        "source": _source_key(task, split, cfg.use_cached),
        "dtype": str(dtype),
    }
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def next_fit(lengths_NxF: np.ndarray, capacity_F: np.ndarray, group: int):
    """Places N examples of F features into rows: (row, offsets, number of rows).

    An example goes behind its predecessor if every feature still fits, else into a new row; every
    `group` examples a new row begins, as in SeqIO, which packs batch by batch.
    """
    rows, offsets = [], []
    row, used, empty = -1, [], [0] * len(capacity_F)
    capacity = capacity_F.tolist()
    for i, lengths in enumerate(lengths_NxF.tolist()):
        if i % group == 0 or any(u + n > c for u, n, c in zip(used, lengths, capacity, strict=True)):
            row, used = row + 1, empty
        rows.append(row)
        offsets.append(used)
        used = [u + n for u, n in zip(used, lengths, strict=True)]
    return np.array(rows), np.array(offsets), row + 1


def pack(examples: Mapping[str, np.ndarray], lengths: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Packs zero-padded examples [N, L'] into rows [M, L] with segment ids and positions.

    >>> examples = {"targets": np.array([[3, 9, 1], [4, 1, 0]])}
    >>> for name, row in pack(examples, {"targets": 6}).items():
    ...     print(name, row.tolist())
    targets [[3, 9, 1, 4, 1, 0]]
    targets_positions [[0, 1, 2, 0, 1, 0]]
    targets_segment_ids [[1, 1, 1, 2, 2, 0]]
    """
    names = list(lengths)
    length_NxF = np.stack([np.count_nonzero(examples[f], axis=1) for f in names], axis=1)
    capacity_F = np.array([lengths[f] for f in names])
    row_N, offset_NxF, num_rows = next_fit(length_NxF, capacity_F, int(capacity_F.max()))
    packed = {}
    for f, name in enumerate(names):
        tokens_NxL, length_N, capacity = examples[name], length_NxF[:, f], lengths[name]
        position_NxL = np.broadcast_to(np.arange(tokens_NxL.shape[1]), tokens_NxL.shape)
        taken_NxL = position_NxL < length_N[:, None]
        position = position_NxL[taken_NxL]
        start_N = row_N * capacity + offset_NxF[:, f]
        place = np.repeat(start_N, length_N) + position
        tokens = np.zeros((num_rows, capacity), np.int32)
        positions = np.zeros_like(tokens)
        tokens.reshape(-1)[place] = tokens_NxL[taken_NxL]
        positions.reshape(-1)[place] = position
        packed[name] = tokens
        packed[f"{name}_positions"] = positions
        packed[f"{name}_segment_ids"] = np.cumsum(positions == 0, axis=1, dtype=np.int32) * (tokens != 0)
    return packed


def pad(examples: Mapping[str, np.ndarray], lengths: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Pads or trims examples to rows of the given lengths."""
    rows = {}
    for name, length in lengths.items():
        tokens = examples[name][:, :length]
        rows[name] = np.zeros((len(tokens), length), np.int32)
        rows[name][:, : tokens.shape[1]] = tokens
    return rows


def _decoder_inputs(targets: np.ndarray, segment_ids: np.ndarray | None, bos_id: int) -> np.ndarray:
    """Targets shifted right by one, each segment beginning with `bos_id`."""
    inputs = np.empty_like(targets)
    inputs[:, 0], inputs[:, 1:] = bos_id, targets[:, :-1]
    if segment_ids is not None:
        before = np.zeros_like(segment_ids)
        before[:, 1:] = segment_ids[:, :-1]
        inputs = np.where(segment_ids == before, inputs, np.int32(bos_id))
    return inputs


def model_features(rows: Mapping[str, np.ndarray], bos_id: int = 0) -> dict[str, np.ndarray]:
    """What SeqIO's LM and encoder-decoder converters make of packed or padded rows."""
    targets = rows["targets"]
    segment_ids = rows.get("targets_segment_ids")
    features = {
        "decoder_target_tokens": targets,
        "decoder_input_tokens": _decoder_inputs(targets, segment_ids, bos_id),
        "decoder_loss_weights": (targets != 0).astype(np.int32),
    }
    if "inputs" in rows:
        features["encoder_input_tokens"] = rows["inputs"]
    for side, name in (("decoder", "targets"), ("encoder", "inputs")):
        for kind in ("segment_ids", "positions"):
            if f"{name}_{kind}" in rows:
                features[f"{side}_{kind}"] = rows[f"{name}_{kind}"]
    return features
