"""Finds and checks what a dataset configuration names, before anything slow begins."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from perex_t5x.errors import ConfigError, did_you_mean
from perex_t5x.files import is_remote


def get_mixture_or_task(name: str, module: str | None = None) -> Any:
    """Returns the SeqIO task or mixture `name`; `module` is imported first to register its tasks.

    The package's own tasks are always registered, with the arguments that Gin binds.
    """
    import gin
    import seqio

    with gin.unlock_config():  # the tasks' functions register with Gin when first imported
        from perex_t5x.data import tasks

    tasks.register_all()
    if module:
        try:
            importlib.import_module(module)
        except ImportError as e:
            raise ConfigError(
                f"MIXTURE_OR_TASK_MODULE (DatasetConfig.module) = {module!r} cannot be imported: "
                f"{e}. Give a module that is on the PYTHONPATH."
            ) from e
    tasks_and_mixtures = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
    if name in tasks_and_mixtures:
        return seqio.get_mixture_or_task(name)
    known = sorted(tasks_and_mixtures, key=lambda k: (-difflib.SequenceMatcher(None, k, str(name)).ratio(), k))
    raise ConfigError(
        f"MIXTURE_OR_TASK_NAME = {name!r} is not a registered task or mixture."
        f"{did_you_mean(str(name), known)} Known, nearest first: {', '.join(known)}. A task of "
        "your own is registered by naming its module in MIXTURE_OR_TASK_MODULE."
    )


def _splits(provider: Any) -> list[str]:
    import seqio

    for task in seqio.get_subtasks(provider):
        if not isinstance(task.source, seqio.TfdsDataSource):
            continue
        loader, reason = task.source.tfds_dataset, ""
        try:
            prepared = bool(task.source.splits)
        except Exception as e:
            prepared, reason = False, f" ({e})"
        if not prepared:
            raise ConfigError(
                f"Task {task.name!r} reads the TFDS dataset {loader.name!r}, which is not prepared "
                f"in {loader.data_dir or '~/tensorflow_datasets'}{reason}. Give its folder with "
                f"--tfds_data_dir, or prepare it there with `tfds build {loader.name}`."
            )
    return [str(s) for s in provider.splits]


def check_split(provider: Any, split: str) -> None:
    import seqio

    known = _splits(provider)
    # A TFDS source also takes slices ('train[:1%]'), which its list of splits does not name.
    is_tfds = all(isinstance(task.source, seqio.TfdsDataSource) for task in seqio.get_subtasks(provider))
    if (split.split("[")[0] if is_tfds else split) not in known:
        raise ConfigError(
            f"DatasetConfig.split = {split!r}: {provider.name!r} has the splits "
            f"{', '.join(sorted(known))}.{did_you_mean(split, known)}"
        )


def check_feature_lengths(provider: Any, lengths: Any, converter_cls: type) -> dict[str, int]:
    """Returns the lengths of exactly the features that the model's converter takes."""
    import seqio

    needed = list(converter_cls.TASK_FEATURES)
    if issubclass(converter_cls, seqio.DecoderFeatureConverter) and "inputs" in provider.output_features:
        needed.insert(0, "inputs")  # a prompt in front of the targets
    lacking = [f for f in needed if f not in provider.output_features]
    if lacking:
        raise ConfigError(
            f"{provider.name!r} has the features {sorted(provider.output_features)}, but the model "
            f"({converter_cls.__name__}) needs {needed}: {lacking} missing. A decoder-only model takes a task with "
            "targets, an encoder-decoder one with inputs and targets, such as 'python_stdlib_span_corruption'."
        )
    given = dict(lengths or {})
    missing = [f for f in needed if f not in given]
    unknown = [f for f in given if f not in needed]
    if missing or unknown:
        problems = []
        if missing:
            problems.append(f"no length for {', '.join(map(repr, missing))}")
        if unknown:
            problems.append(f"{', '.join(map(repr, unknown))} not a feature of the model")
        hint = did_you_mean(unknown[0], needed) if unknown else ""
        raise ConfigError(
            f"TASK_FEATURE_LENGTHS = {given}: {'; '.join(problems)}.{hint} The model ({converter_cls.__name__}) needs a "
            f"length for {', '.join(needed)}, for example TASK_FEATURE_LENGTHS = { ({f: 512 for f in needed}) }."
        )
    return {f: given[f] for f in needed}


def check_offline_cache(provider: Any, use_cached: bool) -> None:
    """Refuses `use_cached=True` for tasks that no offline cache is found for."""
    import seqio

    if not use_cached:
        return
    for task in seqio.get_subtasks(provider):
        if task.supports_caching and not task.cache_dir:
            looked = seqio.get_global_cache_dirs()
            raise ConfigError(
                f"USE_CACHED_TASKS = True, but task {task.name!r} has no offline cache: looked in "
                f"{looked if looked else 'no directories (none are given)'}. Set USE_CACHED_TASKS "
                "= False to preprocess on the fly, or make the cache with `seqio_cache_tasks "
                f"--tasks={task.name} --output_cache_dir=DIR --module_import=perex_t5x.data.tasks` "
                "and give --seqio_additional_cache_dirs=DIR."
            )


def check_evaluation(cfg: Any, converter_cls: type, binding: str) -> Any:
    """The task or mixture to predict or score, once everything that can be wrong with its configuration is not."""
    provider = get_mixture_or_task(cfg.mixture_or_task_name, cfg.module)
    check_split(provider, cfg.split)
    check_offline_cache(provider, cfg.use_cached)
    if cfg.pack:
        raise ConfigError(f"{binding}.pack = True: predictions and scores need rows of one example each.")
    if cfg.task_feature_lengths is not None:
        check_feature_lengths(provider, cfg.task_feature_lengths, converter_cls)
    return provider


def _same_vocabulary(a: Any, b: Any) -> bool:
    """By kind and file; without reading files, which may be far away."""
    path = "sentencepiece_model_file"
    return type(a) is type(b) and getattr(a, path, None) == getattr(b, path, None)


def _shown(vocabulary: Any) -> str:
    """By kind and file: SeqIO's own text would read the file, which may be out of reach."""
    path = getattr(vocabulary, "sentencepiece_model_file", None)
    return f"{type(vocabulary).__name__}({path or ''})"


def _check_file(vocabulary: Any) -> None:
    """Of a vocabulary that has one, on this machine: SeqIO reads it only with the first example."""
    path = getattr(vocabulary, "sentencepiece_model_file", None)
    if isinstance(path, str) and not is_remote(path) and not os.path.isfile(path):
        raise ConfigError(f"the vocabulary's sentencepiece_model_file = {path!r}: there is no such file.")


def verify_matching_vocabs(cfg: Any, model: Any) -> None:
    """`check_vocabulary` of a dataset configuration's task, as T5X names it."""
    get_mixture_or_task(cfg.mixture_or_task_name, cfg.module)
    check_vocabulary(cfg.mixture_or_task_name, model)


def check_vocabulary(name: str, model: Any) -> None:
    """Raises if a task's ids are not the model's; they would be looked up or decoded wrongly without a word."""
    import seqio

    if not hasattr(model, "output_vocabulary"):
        return
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)  # of a model of one's own: unknown
    _check_file(model.output_vocabulary)
    models = {"targets": model.output_vocabulary, "inputs": getattr(model, "input_vocabulary", model.output_vocabulary)}
    for task in seqio.get_subtasks(seqio.get_mixture_or_task(name)):
        for feature, spec in task.output_features.items():
            vocabulary = getattr(spec, "vocabulary", None)
            own = models.get(feature)
            known = (seqio.ByteVocabulary, seqio.SentencePieceVocabulary)
            if isinstance(vocabulary, known) and isinstance(own, known) and not _same_vocabulary(vocabulary, own):
                raise ConfigError(
                    f"Feature {feature!r} of task {task.name!r} is encoded with {_shown(vocabulary)}, but the model's "
                    f"VOCABULARY is {_shown(own)}. Give the tasks the model's, tasks.register_all.vocabulary = "
                    "%VOCABULARY (or a path), or bind VOCABULARY to the task's."
                )
            size = 0 if isinstance(vocabulary, seqio.SentencePieceVocabulary) else getattr(vocabulary, "vocab_size", 0)
            if vocab_size is not None and size > vocab_size:
                raise ConfigError(
                    f"Feature {feature!r} of task {task.name!r} has a vocabulary of {size}, but the model's vocab_size "
                    f"is {vocab_size}. Set T5Config.vocab_size to at least {size} (a multiple of 128 suits "
                    "accelerators), or give the task the model's vocabulary (tasks.register_all.vocabulary)."
                )


def tfds_split_bytes(source: Any, split: str) -> int | None:
    """The size that TFDS's metadata give: asking a thousand remote files instead takes minutes."""
    import seqio

    if not isinstance(source, seqio.TfdsDataSource) or source.tfds_dataset.name is None:
        return None
    splits = source.tfds_dataset.info.splits
    return int(splits[split].num_bytes) or None if split in splits else None


def files_fingerprint(provider: Any, split: str, use_cached: bool) -> str | None:
    """Of the files that a task or mixture is read from: their names and sizes, and the first 64 KiB of up to 256 of each
    task's. None where a source does not say what its files are.

    The same files in another folder, or with other times, have the same fingerprint.
    """
    import seqio

    sha, is_known = hashlib.sha256(), False
    for task in seqio.get_subtasks(provider):
        if split.split("[")[0] not in [str(s) for s in task.splits]:
            continue
        described = _described_files(task, split, use_cached)
        is_known = is_known or described is not None
        sha.update(json.dumps([task.name, described]).encode())
    return sha.hexdigest() if is_known else None


def _described_files(task: Any, split: str, use_cached: bool) -> Any:
    import seqio
    import tensorflow as tf

    if use_cached and task.supports_caching:
        paths = tf.io.gfile.glob(f"{seqio.utils.get_cached_tfrecord_prefix(task.cache_dir, split)}*")
        named = [(os.path.basename(path), path) for path in paths]
    elif isinstance(task.source, seqio.TfdsDataSource):  # whose metadata say it: a thousand remote files take minutes
        if task.source.tfds_dataset.name is None:
            return None
        info = task.source.tfds_dataset.info
        sizes = (
            [int(info.splits[split].num_bytes), int(info.splits[split].num_examples)] if split in info.splits else []
        )
        return [info.full_name, sizes]
    elif hasattr(task.source, "files"):  # `text_source.TextFilesSource`, whose names are relative
        named = list(task.source.files(split))
    else:
        named = [(os.path.basename(str(path)), str(path)) for path in task.source.list_shards(split)]
        if not named or not tf.io.gfile.exists(named[0][1]):  # of a function: not the names of files
            return None

    def described(numbered: tuple[int, tuple[str, str]]) -> list[Any]:
        number, (name, path) = numbered
        head = b""
        if number < 256:
            with tf.io.gfile.GFile(path, "rb") as f:
                head = f.read(1 << 16)
        return [name, tf.io.gfile.stat(path).length, hashlib.sha256(head).hexdigest()]

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(described, enumerate(sorted(named))))
