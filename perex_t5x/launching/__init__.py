"""From one description to a running program on TPU VMs, on GKE, or through XManager."""
