"""A run whose folder is in a bucket, in a process where nothing can be imported but what hosts have.

    python -m tests.on_bucket gs://BUCKET/FOLDER LOCAL_FOLDER BLOCKED.json

Trains until a SIGTERM at step 3, resumes to step 6 with a profile, evaluates and infers, and trains the same without a stop
on the local disk. Prints one line of JSON.
"""

import json
import os
import signal
import sys


class _Blocker:
    """Modules that are on this machine, but would not be on a host."""

    def __init__(self, names: list[str]):
        self._names = frozenset(names)

    def find_spec(self, name: str, path=None, target=None) -> None:
        parts = name.split(".")
        if any(".".join(parts[: i + 1]) in self._names for i in range(len(parts))):
            raise ModuleNotFoundError(f"No module named {name!r} (hosts do not have it)", name=name)


RUN = (
    "TRAIN_STEPS = 6",
    "EVAL_PERIOD = 3",
    "train_script.train.stats_period = 1",
    "utils.SaveCheckpointConfig.period = 2",
    "utils.SaveCheckpointConfig.keep = 1",
    "train_script.train.infer_eval_dataset_cfg = @infer_eval/utils.DatasetConfig()",
    "infer_eval/utils.DatasetConfig.mixture_or_task_name = %MIXTURE_OR_TASK_NAME",
    "infer_eval/utils.DatasetConfig.task_feature_lengths = %TASK_FEATURE_LENGTHS",
    "infer_eval/utils.DatasetConfig.split = 'validation'",
    "infer_eval/utils.DatasetConfig.batch_size = 16",
    "infer_eval/utils.DatasetConfig.shuffle = False",
    "infer_eval/utils.DatasetConfig.seed = 42",
    "infer_eval/utils.DatasetConfig.pack = False",
    "infer_eval/utils.DatasetConfig.module = %MIXTURE_OR_TASK_MODULE",
)


def main(remote: str, local: str) -> dict:
    from perex_t5x import buckets

    buckets.set_library_options()
    import gin
    from etils import epath

    from perex_t5x import checkpoints, gin_utils, infer
    from perex_t5x import eval as eval_script
    from perex_t5x.cli import status
    from tests import tiny

    result = {}
    at_step = status.at_step

    def interrupting(step: int) -> None:
        at_step(step)
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    status.at_step = interrupting
    try:
        tiny.train(remote, *RUN)
    except KeyboardInterrupt as e:
        result["farewell"] = str(e)
    status.at_step = at_step
    result["saved"] = [p.name for p in epath.Path(remote).glob("checkpoint_*")]

    # What a process leaves that dies while it saves: everything but the marker of the commit; or next to nothing.
    name, _, folder = remote.removeprefix("gs://").partition("/")
    bucket = buckets.client().bucket(name)
    for blob in list(bucket.list_blobs(prefix=f"{folder}/checkpoint_3/")):
        if blob.name != f"{folder}/checkpoint_3/commit_success.txt":
            bucket.copy_blob(blob, bucket, blob.name.replace("checkpoint_3", "checkpoint_5"))
    (epath.Path(remote) / "checkpoint_6" / "state").mkdir(parents=True)
    result["newest"] = checkpoints.newest(remote)

    shown = ("train_script.train.profile_steps = (5, 5)", "train_script.train.dump_hlo = True")
    result["last"], _ = tiny.train(remote, *RUN, *shown)
    result["kept"] = [p.name for p in epath.Path(remote).glob("checkpoint_*")]
    tiny.train(local, *RUN)
    result["losses"] = [losses(remote), losses(local)]

    def configured(file: str, function, *bindings: str):
        gin.config._CONFIG_IS_LOCKED = False
        gin.clear_config(clear_constants=False)
        sizes = [b for b in tiny.BINDINGS if b.startswith(("models.", "MIXTURE", "TASK_FEATURE"))]
        common = ("BATCH_SIZE = 16", f"CHECKPOINT_PATH = '{remote}'")
        gin_utils.parse_gin_flags([], ["models/tiny.gin", file], [*sizes, *common, *bindings])
        return gin.get_configurable(function)()

    output = f"EVAL_OUTPUT_DIR = '{remote}/eval'"
    result["eval"] = configured(
        "runs/eval.gin", eval_script.evaluate, output, "utils.RestoreCheckpointConfig.mode = 'all'"
    )
    output = f"INFER_OUTPUT_DIR = '{remote}/infer'"
    few = ("NUM_EXAMPLES = 20", "infer_script.infer.mode = 'score'")
    (path,) = configured("runs/infer.gin", infer.infer, output, *few)
    result["infer"] = epath.Path(path).read_text()
    return result


def losses(folder: str) -> dict[int, float]:
    from perex_t5x.metrics import read_rows

    return {row["step"]: row["loss"] for row in read_rows(folder) if row["name"] == "train" and "loss" in row}


if __name__ == "__main__":
    with open(sys.argv[3], encoding="utf-8") as f:
        sys.meta_path.insert(0, _Blocker(json.load(f)))
    print(json.dumps(main(sys.argv[1], sys.argv[2])))
