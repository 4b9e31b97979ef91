"""Starts real processes through the launcher, with the tests' fast compiles and compilation cache."""

import os
import subprocess
import sys
from pathlib import Path

import jax

from tests import tiny

ROOT = Path(__file__).resolve().parents[2]
FILES = ("--gin_file=models/tiny.gin", "--gin_file=runs/pretrain.gin")


def environment(**changes: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        **changes,
    }


def train_arguments(model_dir, *bindings: str) -> list[str]:
    """Of `perex_t5x.train`, for the tests' tiny model."""
    every = [*tiny.BINDINGS, f"MODEL_DIR = '{model_dir}'", *bindings]
    return [*FILES, *(f"--gin_bindings={b}" for b in every)]


def launch(*arguments: str, module="perex_t5x.train", processes=2, devices=4, timeout=120, grace=3, own=(), **env: str):
    """Starts the launcher; returns its process, whose output is a pipe."""
    own = [
        *own,
        "--processes",
        str(processes),
        "--devices",
        str(devices),
        "--timeout",
        str(timeout),
        "--grace",
        str(grace),
    ]
    command = [sys.executable, "-m", "perex_t5x.launching.local", *own, "--module", module, "--", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(**env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(*arguments: str, **options) -> tuple[int, str]:
    """Runs the launcher to its end; returns (status, output)."""
    process = launch(*arguments, **options)
    try:
        output, _ = process.communicate(timeout=options.get("timeout", 120) + 30)
    finally:
        process.kill()
    return process.returncode, output


def start_process(module: str, *arguments: str, devices=2, **env: str) -> subprocess.Popen:
    """One process by itself, with its own flags."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment(XLA_FLAGS=flags, **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
