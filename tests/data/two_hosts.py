"""One of two processes of `test_two_hosts.py`: prints as JSON what it saw."""

import hashlib
import json
import os
import sys

import jax
import numpy as np


def main(port: str, index: str, glob: str, folder: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(index))

    import seqio

    from perex_t5x.data import make_feed, tasks
    from perex_t5x.utils import DatasetConfig

    tasks.register_text_files(glob=glob, name="hosts_lm")
    mesh = jax.make_mesh((len(jax.devices()),), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

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

    def local(feed, step):
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
    print("SEEN " + json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
