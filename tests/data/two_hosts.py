"""One of two processes of `test_two_hosts.py`: prints as JSON what it saw."""

import hashlib
import json
import os
import sys

import jax
import numpy as np


def main(port: str, index: str, glob: str, folder: str, bucket: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(index))

    import seqio

    from perex_t5x.data import bucket_rows, make_feed, tasks
    from perex_t5x.errors import ConfigError
    from perex_t5x.utils import DatasetConfig

    tasks.register_text_files(glob=glob, name="hosts_lm")

    def on(devices):
        mesh = jax.sharding.Mesh(np.array(devices), ("data",))
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    straight = on(jax.devices())
    # The second process's rows lie between the two parts of the first's, as where hosts are blocks of a torus.
    interleaved = on([jax.devices()[i] for i in (0, 2, 3, 1)])

    def make(**changes):
        values = dict(
            mixture_or_task_name="hosts_lm",
            task_feature_lengths={"targets": 32},
            split="train",
            batch_size=8,
            shuffle=True,
            seed=3,
        )
        return make_feed(DatasetConfig(**{**values, **changes}), seqio.LMFeatureConverter)

    def local(feed, step, sharding=straight):
        """This process's rows of a global batch, by their number in it."""
        batch = feed.batch(step, {name: sharding for name in feed.element_spec})
        shards = batch["decoder_target_tokens"].addressable_shards
        return {s.index[0].start: hashlib.sha256(np.asarray(s.data)).hexdigest() for s in shards}

    copies = os.path.join(folder, "rows")
    state = os.path.join(folder, "state")
    stream = make(feed="streaming")
    seen = {
        "cached": local(make(cache_dir=copies), 5),
        "drawn_seed": make(seed=None, cache_dir=copies).position(0)["seed"],
        "streamed": [local(stream, step) for step in range(3)],
    }
    stream.save_state(state, 1)
    resumed = make(feed="streaming")
    resumed.restore(state)
    seen["resumed"] = [local(resumed, step) for step in (1, 2)]

    stream = make(feed="streaming")
    seen["interleaved"] = [local(stream, step, interleaved) for step in range(3)]
    stream.save_state(os.path.join(folder, "interleaved"), 1)
    resumed.restore(os.path.join(folder, "interleaved"))
    try:
        local(resumed, 1, straight)
    except ConfigError as e:
        seen["refused"] = str(e)
    resumed = make(feed="streaming")
    resumed.restore(os.path.join(folder, "interleaved"))
    seen["interleaved_resumed"] = [local(resumed, step, interleaved) for step in (1, 2)]

    cached, seen["reads"] = make(cache_dir=copies), []
    read = cached._read
    cached._read = lambda a, b: [seen["reads"].append((a - 40, b - 40)), read(a, b)][1]
    seen["cached_interleaved"] = local(cached, 5, interleaved)

    bucket_rows._BLOCK_BYTES = 1  # one row a block
    bucket_rows._PART_BYTES = 64
    os.environ["XDG_CACHE_HOME"] = os.path.join(folder, f"disk_{index}")  # of a host of its own
    seen["bucket"] = local(make(cache_dir=f"{bucket}/copies"), 5, interleaved)
    print("SEEN " + json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
