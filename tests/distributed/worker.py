"""One of several processes that only add numbers: what happens to one of them is told by TROUBLE, as in `trouble.py`.

Much faster to start than a training, and watched in the same way.
"""

import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np

from perex_t5x import cli, distributed


def main() -> None:
    seconds = int(os.environ.get("INITIALIZATION_TIMEOUT", "60"))
    distributed.connect(initialization_timeout=seconds, heartbeat_timeout=3, phase_timeout=60)
    group = distributed.group()
    kind, _, where, _, step = os.environ.get("TROUBLE", "none in 0 at 0").split()
    steps = int(os.environ.get("STEPS", "100000"))
    mesh = jax.make_mesh((len(jax.devices()),), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.make_array_from_callback((8,), sharding, lambda index: np.arange(8.0)[index])
    add = jax.jit(lambda x: x / jnp.sum(x))
    for number in range(1, steps + 1):
        distributed.doing(f"reading the batch of step {number}")
        if group.index == int(where) and number == int(step):
            print(f"TROUBLE {kind}", flush=True)
            trouble(kind)
        distributed.doing(f"making step {number}")
        x = jax.block_until_ready(add(x))
        if not group.stopping.passes():
            break
    if group.index == 0:
        print("DONE", flush=True)
    distributed.finish()


def trouble(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "suspend":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "hang":
        threading.Event().wait()
    if kind == "error":
        raise OSError("the disk of the data is gone")


if __name__ == "__main__":
    cli.run(lambda args: main(), __doc__)
