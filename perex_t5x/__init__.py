"""Train transformers on TPU pods with optimizers that see every example's gradient."""

from perex_t5x.hardware.devices import reserve_threads

__version__ = "0.1.0"

reserve_threads()  # here, since it has to come before the first use of a device
