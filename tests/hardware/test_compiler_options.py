"""Options of the compiler: ours are known to it, a user's win, and none that it does not know stops a run."""

import jax
import pytest

from perex_t5x.errors import ConfigError
from perex_t5x.hardware import compiler_options
from perex_t5x.hardware.chips import CHIPS
from perex_t5x.hardware.compiler_options import Option, check_options, default_options, options_for
from perex_t5x.hardware.devices import tpu_devices
from tests import tiny
from tests.preflight.support import needs_libtpu
from tests.trainer_support import make_trainer, specs

LIMIT = "xla_tpu_scoped_vmem_limit_kib"


@needs_libtpu
@pytest.mark.parametrize("name", CHIPS)
def test_the_compiler_takes_all_of_ours(name):
    device = tpu_devices(CHIPS[name].smallest_topology)[0]
    assert options_for(device) == default_options(name)


def test_every_option_has_a_reason_and_is_for_known_chips():
    for option in compiler_options.OPTIONS:
        assert len(option.reason) > 40 and set(option.values) <= set(CHIPS) and option.values, option.name


@needs_libtpu
def test_who_wins(monkeypatch):
    device = tpu_devices("v5e:1x1")[0]
    ours = (Option("xla_tpu_of_another_version", {"v5e": True}, ""), Option(LIMIT, {"v5e": 32768, "v5p": 1}, ""))
    monkeypatch.setattr(compiler_options, "OPTIONS", ours)
    assert options_for(device) == {LIMIT: 32768}  # the other is left out, with a warning
    own = {LIMIT: 65536, "xla_tpu_overlap_compute_collective_tc": True}
    assert options_for(device, own) == own
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{LIMIT}=16384")
    assert options_for(device) == {}
    assert options_for(device, {LIMIT: 65536}) == {LIMIT: 65536}
    with pytest.raises(
        ConfigError, match=f"Trainer.compiler_options: the compiler for TPU v5 lite.* {LIMIT} = 'a lot'"
    ):
        options_for(device, {LIMIT: "a lot"})


def test_a_users_options_reach_the_program():
    device = jax.devices("cpu")[0]
    assert options_for(device) == {}  # ours are for TPUs
    trainer = make_trainer(compiler_options={"xla_cpu_enable_fast_math": False})
    assert trainer.used_compiler_options() == {"xla_cpu_enable_fast_math": False}
    batch = specs(tiny.random_batch(16))
    wrong = make_trainer(compiler_options={"xla_tpu_of_another_version": 1})
    shapes, shardings, _ = wrong.abstract_state({k: v.shape for k, v in batch.items()})
    with pytest.raises(
        ConfigError, match="Trainer.compiler_options: the compiler for cpu .*xla_tpu_of_another_version"
    ):
        wrong.lowered_step(shapes, shardings, batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("xla_a=1", "Trainer.compiler_options = 'xla_a=1': give a dictionary"),
        ({"--xla_a": 1}, "'--xla_a' is not a name of an option"),
        ({"xla_a": [1]}, r"xla_a = \[1\] is neither text nor a number"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        check_options(options)
