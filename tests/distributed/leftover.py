"""Process 0 of an attempt that does not become a run: MODE says how it ends.

wait          listens for the others, which do not come
met           ends as soon as all have met
connected     ends as soon as JAX has connected all
"""

import os
import signal

import jax

from perex_t5x.distributed import process_info, rendezvous


def main() -> None:
    info = process_info.find(detection="off")
    rendezvous.meet(info, 600)
    if os.environ["MODE"] == "connected":
        jax.distributed.initialize(info.address, info.count, info.index, cluster_detection_method="deactivate")
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
