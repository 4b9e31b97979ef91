"""TPU VMs through queued resources: `launch/gcloud_tpu.py`."""
