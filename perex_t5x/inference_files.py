"""Inferences as files: one JSON object a line, written chunk by chunk, so that an inference that was killed resumes.

    OUT/<task>-<mode>.jsonl-00000-of-00001                        the results, once all are there
    OUT/<task>-<mode>.jsonl-00000-of-00001.COMPLETED              what they are of
    OUT/tmp-<task>-00000-of-00001/<the same name>-chunk00000      those so far, each with a .COMPLETED beside it
    OUT/tmp-<task>-00000-of-00001/plan.json                       what they are of

Names and lines are T5X's.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gin
import jax
import numpy as np
from etils import epath

from perex_t5x import files
from perex_t5x.errors import ConfigError

Inferences = tuple[Sequence[Any], Mapping[str, Any]]
WriteFn = Callable[[str, Inferences, Sequence[Mapping[str, Any]], str, Any], None]
MergeFn = Callable[[str, str, str, int | None], None]

TEXT = "_pretokenized"  # the end of the names of features that are a task's text
COMPLETED = ".COMPLETED"


def write_inferences_to_file(
    path: str,
    inferences: Inferences,
    examples: Sequence[Mapping[str, Any]],
    mode: str,
    vocabulary: Any = None,
    include_all_inputs: bool = False,
    input_fields_to_include: Sequence[str] | None = None,
    output_ids: bool = False,
) -> None:
    """Writes a chunk of results, each with its 'inputs', and by mode a 'prediction', a 'score', and 'aux'.

    Args:
      path: of the file.
      inferences: (results, aux): token ids, or scores, of each example; and name -> what else there is, of each example.
      examples: the task's, in the same order.
      mode: 'predict', 'score' or 'predict_with_aux'.
      vocabulary: decodes the ids.
      include_all_inputs: 'inputs' are all features of an example, and not only its texts (`..._pretokenized`).
      input_fields_to_include: only features of these names, with their texts.
      output_ids: 'prediction_tokens', too: the ids up to the padding.
    """
    if include_all_inputs and input_fields_to_include is not None:
        raise ConfigError(
            "write_inferences_to_file.include_all_inputs = True has all fields: leave input_fields_to_include out."
        )
    results, aux = inferences
    with files.atomic_writer(path) as f:
        for i, example in enumerate(examples):
            names = [name for name in example if name.endswith(TEXT)]
            if include_all_inputs:
                names = list(example)
            elif input_fields_to_include is not None:
                names = [name for name in example if name.removesuffix(TEXT) in input_fields_to_include]
            row: dict[str, Any] = {"inputs": {name: _plain(example[name]) for name in names}}
            if mode == "score":
                row["score"] = _plain(results[i])
            else:
                row["prediction"] = _decoded(results[i], vocabulary)
                if output_ids:
                    row["prediction_tokens"] = _without_padding(_plain(np.asarray(results[i])))
            if aux:
                row["aux"] = {name: _plain(values[i]) for name, values in aux.items()}
            f.write(json.dumps(row, ensure_ascii=False) + "\n")


def merge_chunks_to_file(output_dir: str, output_fname: str, tmp_dir: str, step: int | None) -> None:
    """Joins the chunks' files, in order, in `output_dir/output_fname`."""
    del step
    with files.atomic_writer(os.path.join(output_dir, output_fname)) as merged:
        for path in _chunks(tmp_dir, output_fname):
            merged.write(path.read_text())


@dataclass(frozen=True)
class Output:
    """Where the results of one task, or of its part `shard_id` of `num_shards`, are written.

    Attributes:
      plan: what decides the results, by name. Results of another plan are not continued.
    """

    output_dir: str
    task: str
    mode: str
    file_extension: str
    shard_id: int
    num_shards: int
    plan: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.task}-{self.mode}.{self.file_extension}-{self._part}"

    @property
    def path(self) -> str:
        return os.path.join(self.output_dir, self.name)

    @property
    def tmp_dir(self) -> str:
        return os.path.join(self.output_dir, f"tmp-{self.task}-{self._part}")

    @property
    def _part(self) -> str:
        return f"{self.shard_id:05}-of-{self.num_shards:05}"

    def is_complete(self) -> bool:
        """Whether all results are there. Raises `ConfigError` if they, or those so far, are of another inference."""
        self._check(self.path + COMPLETED, f"{self.path} has the results of another inference")
        self._check(os.path.join(self.tmp_dir, "plan.json"), f"{self.tmp_dir} has some results of another inference")
        return epath.Path(self.path + COMPLETED).exists()

    def chunks_done(self) -> int:
        """How many chunks are complete, from the first on."""
        numbers = itertools.count()
        return next(n for n in numbers if not epath.Path(self.chunk_path(n) + COMPLETED).exists())

    def begin(self) -> None:
        files.write_atomically(os.path.join(self.tmp_dir, "plan.json"), json.dumps(dict(self.plan), indent=1))

    def chunk_path(self, number: int) -> str:
        return os.path.join(self.tmp_dir, f"{self.name}-chunk{number:05}")

    def chunk_complete(self, number: int) -> None:
        files.write_atomically(self.chunk_path(number) + COMPLETED, "")

    def complete(self, merge_fn: MergeFn | None, step: int | None) -> None:
        """Marks the results as complete; merged, if that is asked for."""
        if merge_fn is not None:
            merge_fn(self.output_dir, self.name, self.tmp_dir, step)
        files.write_atomically(self.path + COMPLETED, json.dumps(dict(self.plan), indent=1))
        if merge_fn is not None:
            epath.Path(self.tmp_dir).rmtree(missing_ok=True)

    def _check(self, path: str, what: str) -> None:
        try:
            found = json.loads(epath.Path(path).read_text() or "null")
        except (FileNotFoundError, NotADirectoryError):
            return
        except ValueError:
            found = {"plan": "unreadable"}
        if not isinstance(found, dict):
            return  # T5X's own mark is empty
        for name in sorted({*found, *self.plan}):
            then, now = found.get(name), self.plan.get(name)
            if then != now:
                raise ConfigError(
                    f"INFER_OUTPUT_DIR = {self.output_dir!r}: {what}: {name} was {then}, and is {now}. Give another "
                    "folder, or remove these files."
                )


def decoding_bindings() -> str:
    """What Gin binds that decides how a model predicts."""
    lines = gin.config_str(max_line_length=10_000).splitlines()
    return "; ".join(line for line in lines if re.search(r"^[^#=]*(decod(?!er)|predict_batch)[^=]*=", line))


def by_name(aux: list[Any], as_numpy: bool) -> dict[str, list[Any]]:
    """{name: values of an example}, of each example, as {name: values of all}; lists unless they are to stay arrays."""
    if not aux or not aux[0]:
        return {}
    return {name: [row[name] if as_numpy else jax.tree.map(_plain, row[name]) for row in aux] for name in aux[0]}


def _chunks(tmp_dir: str, name: str) -> list[Any]:
    numbered = [(re.fullmatch(re.escape(name) + r"-chunk(\d+)", p.name), p) for p in epath.Path(tmp_dir).iterdir()]
    return [path for _, path in sorted((int(match[1]), path) for match, path in numbered if match)]


def _decoded(tokens: Any, vocabulary: Any) -> Any:
    """Text; of several decodes a list of them."""
    tokens = np.asarray(tokens)
    return [_decoded(row, vocabulary) for row in tokens] if tokens.ndim > 1 else vocabulary.decode(tokens.tolist())


def _without_padding(tokens: list[Any]) -> list[Any]:
    if tokens and isinstance(tokens[0], list):
        return [_without_padding(row) for row in tokens]
    return tokens[: tokens.index(0)] if 0 in tokens else tokens


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        if array.dtype.kind == "V" or array.dtype.name == "bfloat16":
            array = array.astype(np.float32)
        return _plain(array.tolist())
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
