"""What is called otherwise here than in T5X: modules, Gin files, configurables; and why some have no counterpart."""

from __future__ import annotations

import re

# T5X's module -> ours.
_SAME = "checkpoints eval gin_utils infer models optimizers partitioning train trainer utils"
MODULES = {
    **{f"t5x.{name}": f"perex_t5x.{name}" for name in _SAME.split()},
    "t5x.adafactor": "perex_t5x.optimizers.adafactor",
    "t5x.decoding": "perex_t5x.models.decoding",
    "t5x.losses": "perex_t5x.models.losses",
    "t5x.examples.t5.network": "perex_t5x.models.network",
    "t5x.examples.decoder_only.network": "perex_t5x.models.network",
    "t5x.examples.scalable_t5.network": "perex_t5x.models.scalable_network",
}

# What has none, and what to do instead.
NO_MODULE = {
    "t5x.export_lib": "there is no export to SavedModel; python -m perex_t5x.infer reads a checkpoint",
    "t5x.precompile": "python -m perex_t5x.preflight compiles a step for TPUs that are not there",
    "t5x.contrib": "what is in T5X's contrib folder has no counterpart",
    "t5x.examples": "this example of T5X's has no counterpart; models: docs/models.md",
}

# `import __main__ as train_script`: by what the file takes from it.
MAIN = {
    "train": "perex_t5x.train",
    "evaluate": "perex_t5x.eval",
    "infer": "perex_t5x.infer",
    "create_task_from_tfexample_file": "perex_t5x.infer",
}
NO_MAIN = {
    "precompile": NO_MODULE["t5x.precompile"],
    "save": NO_MODULE["t5x.export_lib"],
}

# Names that T5X's files use without importing them: another file has, before.
USUAL = {
    **{name: f"perex_t5x.{name}" for name in ("gin_utils", "models", "optimizers", "partitioning", "trainer", "utils")},
    "adafactor": "perex_t5x.optimizers.adafactor",
    "decoding": "perex_t5x.models.decoding",
    "network": "perex_t5x.models.network",
    "train_script": "perex_t5x.train",
    "eval_script": "perex_t5x.eval",
    "infer_script": "perex_t5x.infer",
    "seqio": "seqio",
    "optax": "optax",
}

# Our name for an object of another.
RENAMED = {"perex_t5x.optimizers.adam": "optax.adam"}

# Why a configurable, or an argument of one, is left out.
LEFT_OUT = {
    "perex_t5x.utils.get_training_eval_datasets": "evaluations read their examples in a fixed order",
    "perex_t5x.utils.get_dataset": "data come from SeqIO tasks alone; this is T5X's default",
    "perex_t5x.utils.TrainStateInitializer": "this is T5X's default, and there is one way to initialise here",
    "perex_t5x.utils.verify_matching_vocabs": "this is T5X's default, and ours",
    "perex_t5x.optimizers.dpsgd": "differential privacy is optimizers.dp around an optimizer here (docs/privacy.md)",
    "perex_t5x.optimizers.amos": "Amos is no optimizer of optax; give any function from a learning_rate to a transformation",
    "perex_t5x.eval.evaluate.train_eval_get_dataset_fn": "evaluations read their examples in a fixed order",
    "perex_t5x.checkpoints.CheckpointsV2": "checkpoints are Orbax's",
}

_RUNS = {
    "pretrain": "from_t5x/pretrain.gin",
    "pretrain_deterministic": "from_t5x/pretrain.gin",  # every run is deterministic here
    "finetune": "from_t5x/finetune.gin",
    "eval": "from_t5x/eval.gin",
    "infer": "from_t5x/infer.gin",
}
SIZES = {
    "t5_1_0": ("small", "base", "large", "3b", "11b"),
    "t5_1_1": ("small", "base", "large", "xl", "xxl"),
    "mt5": ("small", "base", "large", "xl", "xxl"),
    "byt5": ("small", "base", "large", "xl", "xxl"),
}
NO_FILE = {
    "export": NO_MODULE["t5x.export_lib"],
    "export_seqio": NO_MODULE["t5x.export_lib"],
    "precompile": NO_MODULE["t5x.precompile"],
}


def shipped_includes(path: str) -> list[str]:
    """The shipped files that stand for one of T5X's; [] for others.

    >>> shipped_includes("t5x/configs/runs/pretrain.gin")
    ['from_t5x/pretrain.gin']
    >>> shipped_includes("t5x/examples/t5/t5_1_0/11B.gin")
    ['models/t5_1_0_11b.gin', 'from_t5x/model_defaults.gin']
    >>> shipped_includes("my_project/pretrain.gin")
    []
    """
    if found := re.search(r"(?:^|/)t5x/configs/runs/(\w+)\.gin$", path):
        return [_RUNS[found[1]]] if found[1] in _RUNS else []
    if found := re.search(r"(?:^|/)t5x/examples/t5/(\w+)/(\w+)\.gin$", path):
        family, size = found[1], found[2].lower()
        return [f"models/{family}_{size}.gin", "from_t5x/model_defaults.gin"] if size in SIZES.get(family, ()) else []
    if found := re.search(r"(?:^|/)t5x/examples/decoder_only/models/(base|large|xl|xxl)\.gin$", path):
        return [f"models/t5_decoder_{found[1]}.gin", "from_t5x/model_defaults.gin"]
    return []


def own_name(path: str) -> str:
    """The name under which a file that is included is ported: folders become part of it.

    >>> own_name("t5x/examples/scalable_t5/mt5/base.gin")
    'scalable_t5_mt5_base.gin'
    """
    return re.sub(r"^(.*/)?t5x/(examples/|configs/)?", "", path).strip("/").replace("/", "_")
