"""Set before jax is imported: 8 fake CPU devices, a compilation cache, and no silent broadcasting of ranks."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile

_FAKE_DEVICES = "--xla_force_host_platform_device_count=8"
# Tests compile much and compute little: without these they take half as long again. (Two workers keep two cores busy, so
# that a program in 32 parts gains nothing.)
_FAST_COMPILES = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
if "jax" in sys.modules and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    raise RuntimeError("jax was imported before tests/conftest.py could ask for 8 CPU devices")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FAKE_DEVICES} {_FAST_COMPILES}".strip()
os.environ.setdefault("PJRT_NPROC", "16")  # threads for them: perex_t5x/hardware/devices.py says why
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

# One cache for a run and all its processes, and none from run to run: XLA's programs for several CPU devices, read back
# from it, may start collectives at once that were to follow each other, and then end the process ("Id can't be larger
# than the number of participating threads").
_CACHE = "PEREX_T5X_TEST_CACHE"
if _CACHE not in os.environ:
    os.environ[_CACHE] = tempfile.mkdtemp(prefix="perex_t5x_jax_cache_")
    atexit.register(shutil.rmtree, os.environ[_CACHE], ignore_errors=True)

# A job in the background ignores Ctrl-C, one under nohup SIGHUP, and so would the processes that the tests interrupt.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# Doctests would import them; one cannot be imported, one needs T5X.
collect_ignore = ["broken_import.py", "t5x_plugin/small_t5x.py"]

import gin  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", os.environ[_CACHE])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def pytest_collection_finish():
    """What the imports made, a million objects of TensorFlow's and others, is not looked through for garbage again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True)
def _fresh_gin():
    """Every test starts and ends without Gin bindings."""
    gin.clear_config(clear_constants=False)
    yield
    gin.config._CONFIG_IS_LOCKED = False
    gin.clear_config(clear_constants=False)


@pytest.fixture(scope="session")
def _cloud_storage_buckets():
    from tests.standins import cloud_storage

    with cloud_storage.running() as make_bucket:
        yield make_bucket


@pytest.fixture
def cloud_storage(_cloud_storage_buckets):
    """A bucket of its own in a stand-in for Cloud Storage: `tests/standins/cloud_storage.py`."""
    bucket = _cloud_storage_buckets()
    yield bucket
    bucket.faults()


@pytest.fixture
def cloud_storage_in_process(cloud_storage, monkeypatch):
    """`cloud_storage`, which also this process reaches as gs://."""
    for name, value in cloud_storage.environment.items():
        monkeypatch.setenv(name, value)
    return cloud_storage
