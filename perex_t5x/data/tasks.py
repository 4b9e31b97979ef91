"""The SeqIO tasks of this package; importing this module registers them.

| task | features | text |
|---|---|---|
| `python_stdlib_lm` | targets | the running interpreter's standard library, no download |
| `python_stdlib_span_corruption` | inputs, targets | the same, T5's objective |
| `python_stdlib_continuation` | inputs, targets | the same; for `infer`: a file's beginning, to be continued |
| `text_files_lm` | targets | files of your own |
| `c4_en_lm` | targets | C4 (English) from TensorFlow Datasets |

From a Gin file (or `--gin.tasks.register_text_files.glob="'...'"` on the command line):

    from perex_t5x.data import tasks
    MIXTURE_OR_TASK_NAME = 'text_files_lm'
    tasks.register_text_files.glob = '/data/books/**/*.txt'
    tasks.register_all.vocabulary = '/data/sentencepiece.model'   # default: bytes

The byte vocabulary has 359 ids (3 special, 256 bytes, 100 sentinels): a model's `vocab_size` of
384 holds them and divides well.
"""

from __future__ import annotations

import functools
import glob as glob_lib
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

import gin
import seqio
import tensorflow as tf

from perex_t5x.data import metrics, preprocessors, text_source
from perex_t5x.errors import ConfigError
from perex_t5x.files import is_remote

EXTRA_IDS = 100
TEXT_FILES_VARIABLE = "PEREX_TEXT_FILES"

_arguments: dict[str, tuple] = {}  # of the tasks registered here, to know when they change
_default_vocabulary: seqio.Vocabulary | None = None  # register_all's
_configurable = cast(Any, gin.configurable)(module="perex_t5x.data.tasks")  # its types know no decorator with arguments


def get_vocabulary(vocabulary: str | seqio.Vocabulary | None = None) -> seqio.Vocabulary:
    """A vocabulary from None (bytes), a SentencePiece model's path, or itself.

    >>> get_vocabulary().vocab_size
    359
    """
    if vocabulary is None:
        return seqio.ByteVocabulary(extra_ids=EXTRA_IDS)
    if isinstance(vocabulary, seqio.Vocabulary):
        return vocabulary
    if not isinstance(vocabulary, (str, os.PathLike)):
        raise ConfigError(
            f"vocabulary = {vocabulary!r}: give None for bytes, the path of a SentencePiece model, "
            "or a seqio.Vocabulary."
        )
    if not is_remote(str(vocabulary)) and not os.path.exists(vocabulary):
        raise ConfigError(f"vocabulary = {str(vocabulary)!r}: there is no such file.")
    return seqio.SentencePieceVocabulary(str(vocabulary), extra_ids=EXTRA_IDS)


def _add(name: str, arguments: tuple, make_source, vocabulary, features, steps, **kwargs) -> None:
    """Registers a task, replacing one of other arguments; the same arguments change nothing."""
    arguments = (*arguments, vocabulary)
    if name in seqio.TaskRegistry.names():
        if _arguments.get(name) == arguments:
            return
        if name not in _arguments:
            raise ConfigError(f"A task named {name!r} is already registered by another module; choose another name.")
        for mixture in seqio.MixtureRegistry.names():
            # A mixture holds the task objects it was made of; it would silently keep the old one.
            if name in [t.name for t in seqio.MixtureRegistry.get(mixture).tasks]:
                raise ConfigError(
                    f"Task {name!r} is part of mixture {mixture!r} and cannot be registered again "
                    "with other arguments: make the mixture afterwards (put it into the module "
                    "named by MIXTURE_OR_TASK_MODULE, which is imported after the tasks)."
                )
        seqio.TaskRegistry.remove(name)
    feature = seqio.Feature(vocabulary=vocabulary, add_eos=seqio.preprocessors.append_eos in steps)
    seqio.TaskRegistry.add(
        name,
        source=make_source(),
        output_features={f: feature for f in features},
        preprocessors=[
            functools.partial(seqio.preprocessors.rekey, key_map={"targets": "text"}),
            functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
            # Offline caches hold whole tokenised documents: they serve every sequence length.
            seqio.CacheDatasetPlaceholder(required=False),
            *steps,
        ],
        postprocess_fn=metrics.text_and_tokens,
        **kwargs,
    )
    _arguments[name] = arguments


def _add_lm(name: str, arguments: tuple, make_source, vocabulary) -> None:
    steps = [seqio.preprocessors.append_eos, preprocessors.split_into_chunks]
    _add(name, arguments, make_source, vocabulary, ["targets"], steps, metric_fns=[metrics.log_likelihood])


def _stdlib_source() -> text_source.TextFilesSource:
    return text_source.TextFilesSource(
        lambda: text_source.split_by_name(text_source.list_stdlib_files()),
        description="the Python standard library",
        how_to_fix="This Python's library is too small to split.",
    )


def _expand(patterns: str | Sequence[str]) -> list[tuple[str, str]]:
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    paths = {
        os.path.abspath(path)
        for pattern in patterns
        for path in glob_lib.glob(os.path.expanduser(pattern), recursive=True)
        if os.path.isfile(path)
    }
    for path in paths:
        if not path.isprintable() and path.encode(errors="replace").decode() != path:  # TensorFlow takes UTF-8 alone
            raise ConfigError(
                f"tasks.register_text_files.glob: the name of {os.fsencode(path)!r} is not UTF-8: rename it."
            )
    root = os.path.commonpath([os.path.dirname(p) for p in paths]) if paths else ""
    return [(os.path.relpath(p, root).replace(os.sep, "/"), p) for p in sorted(paths)]


def _list_text_files(glob, validation_glob) -> text_source.FilesBySplit:
    if not glob:
        raise ConfigError(
            "Task 'text_files_lm' has no files: set tasks.register_text_files.glob = '/path/**/*.txt' in Gin (after "
            f"`from perex_t5x.data import tasks`), or the environment variable {TEXT_FILES_VARIABLE}."
        )
    files = _expand(glob)
    if not files:
        raise ConfigError(
            f"No file matches tasks.register_text_files.glob = {glob!r} (looked from "
            f"{os.getcwd()}; `**` goes into subfolders)."
        )
    if validation_glob:
        return {"train": files, "validation": _expand(validation_glob)}
    return text_source.split_by_name(files)


@_configurable
def register_text_files(
    glob: str | Sequence[str] | None = None,
    validation_glob: str | Sequence[str] | None = None,
    name: str = "text_files_lm",
    vocabulary: str | seqio.Vocabulary | None = None,
) -> None:
    """Registers a language modelling task over text files, one document per file.

    Args:
      glob: pattern(s) of the files, `**` for any folders. Default: the environment variable PEREX_TEXT_FILES.
      validation_glob: the validation files. Default: about 5 % of `glob`, by a hash of their names.
      name: the task's name.
      vocabulary: see `get_vocabulary`. Default: that of `register_all`.
    """
    glob = glob or os.environ.get(TEXT_FILES_VARIABLE) or None

    def make_source():
        return text_source.TextFilesSource(
            lambda: _list_text_files(glob, validation_glob),
            description=f"the files of {glob!r}",
            how_to_fix="Give more files, or tasks.register_text_files.validation_glob.",
        )

    arguments = tuple(tuple(g) if isinstance(g, (list, tuple)) else g for g in (glob, validation_glob))
    _add_lm(name, arguments, make_source, get_vocabulary(vocabulary or _default_vocabulary))


def register_tfexamples(
    paths: Sequence[str],
    inputs_key: str,
    targets_key: str | None,
    features: Mapping[str, seqio.utils.Feature],
    task_id: str | None = None,
) -> str:
    """Registers a task of TFRecord files with TFExamples; see `perex_t5x.infer.create_task_from_tfexample_file`."""
    found = sorted(tf.io.gfile.glob(list(paths)))
    if not found:
        raise ConfigError(f"create_task_from_tfexample_file.paths = {paths!r}: there is no such file.")
    keys = [key for key in (inputs_key, targets_key) if key]
    name = f"infer_{task_id or hashlib.md5(':'.join([*paths, *keys]).encode()).hexdigest()[:10]}"
    if name not in seqio.TaskRegistry.names():
        text = tf.io.FixedLenFeature([], tf.string)
        source = seqio.TFExampleDataSource({"infer": found}, feature_description=dict.fromkeys(keys, text))
        seqio.TaskRegistry.add(
            name,
            source=cast(Any, source),  # of another of SeqIO's two classes for one thing
            preprocessors=[
                functools.partial(seqio.preprocessors.rekey, key_map={"inputs": inputs_key, "targets": targets_key}),
                seqio.preprocessors.tokenize_and_append_eos,
            ],
            output_features=dict(features),
        )
    return name


@_configurable
def register_all(vocabulary: str | seqio.Vocabulary | None = None, c4_name: str = "c4/en:3.1.0") -> None:
    """Registers all tasks of this module, or registers them again after the arguments changed.

    Args:
      vocabulary: of every task; see `get_vocabulary`.
      c4_name: the TFDS dataset (with a `text` feature) behind `c4_en_lm`.
    """
    vocabulary = get_vocabulary(vocabulary)
    _add_lm("python_stdlib_lm", (), _stdlib_source, vocabulary)
    corrupt = [preprocessors.chunks_for_span_corruption, preprocessors.span_corruption, seqio.preprocessors.append_eos]
    steps_of = {
        "python_stdlib_span_corruption": corrupt,
        "python_stdlib_continuation": [preprocessors.split_off_prompt],
    }
    for name, steps in steps_of.items():
        metric_fns = [metrics.exact_match_and_token_accuracy(vocabulary)]
        _add(name, (), _stdlib_source, vocabulary, ["inputs", "targets"], steps, metric_fns=metric_fns)
    _add_lm("c4_en_lm", (c4_name,), lambda: seqio.TfdsDataSource(tfds_name=c4_name), vocabulary)
    global _default_vocabulary
    _default_vocabulary = vocabulary
    register_text_files()


register_all()
