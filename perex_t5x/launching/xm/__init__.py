"""Runs and sweeps through XManager: `xmanager launch launch/xm_launch.py -- --gin_file=... --executor=local`."""
