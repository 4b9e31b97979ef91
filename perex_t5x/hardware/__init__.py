"""Facts about TPUs, and devices to compile for without having them. Below every other package: standard library and JAX."""
