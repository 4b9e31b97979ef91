"""A process that saves, restores and writes in a bucket when told to, so that a test can set faults in between.

    python -m tests.bucket_writer gs://BUCKET/FOLDER

Reads JSON from standard input, a line for each command: ["save", STEP], ["restore"] or ["write", NAME, TEXT]; answers each
with a line: {"value": ...} or {"error": message, "reason": errors.Reason, "retryable": ...}.
"""

import contextlib
import json
import sys

from perex_t5x import buckets, files

buckets.set_library_options()


def main(folder: str) -> None:
    import jax
    import jax.numpy as jnp

    from perex_t5x import checkpoints
    from perex_t5x.train_state import TrainState
    from perex_t5x.utils import SaveCheckpointConfig

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def state(step: int) -> TrainState:
        params = {"w": jnp.full((300, 100), step, jnp.float32), "b": jnp.full((7,), -step, jnp.float32)}
        return TrainState(jnp.int32(step), params, {"w": params["w"] + 1}, jax.random.key_data(jax.random.key(step)))

    checkpointer = None

    def save(step: int) -> int:
        nonlocal checkpointer
        if checkpointer is None:
            checkpointer = checkpoints.Checkpointer(folder, SaveCheckpointConfig(period=1, keep=2))
        try:
            checkpointer.save(state(step), {"step": step})
            checkpointer.wait()
        except Exception:
            with contextlib.suppress(Exception):
                checkpointer.close()
            checkpointer = None  # as a process that starts again
            raise
        return checkpointer.latest_step()

    def restore() -> int:
        path = checkpoints.newest(folder)
        step = checkpoints.step_of(path)
        expected = state(step)
        shapes = jax.eval_shape(lambda: expected)
        restored = checkpoints.restore(path, shapes, jax.tree.map(lambda _: sharding, shapes))
        found = checkpoints.merge(shapes, restored)
        assert jnp.array_equal(found.params["w"], expected.params["w"]), path
        assert jnp.array_equal(found.opt_state["w"], expected.opt_state["w"]), path
        assert checkpoints.read_run(path) == {"step": step}, path
        return step

    def write(name: str, text: str) -> None:
        files.write_atomically(f"{folder}/{name}", text)

    commands = {"save": save, "restore": restore, "write": write}
    print(json.dumps({"value": "ready"}), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"value": commands[name](*arguments)}
        except Exception as e:
            reason = getattr(e, "reason", None)
            answer = {"error": f"{type(e).__name__}: {e}", "reason": reason, "retryable": reason and reason.retryable}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
