"""Names, slices, and what crosses a shell."""

import subprocess
import sys

import pytest

from perex_t5x.errors import ConfigError
from perex_t5x.hardware.slices import Slice
from perex_t5x.launching import names

HOSTILE = [
    "a b",
    "it's",
    '"a"',
    "$(touch x)",
    "`touch x`",
    "a;rm -rf",
    "a\nb",
    "",
    "-a",
    "a-",
    "A",
    "a" * 41,
    "ä",
    "../a",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_are_refused(text):
    for check in (names.check_name, names.check_zone, names.check_project, names.check_bucket_path):
        with pytest.raises(ConfigError):
            check(text)
    with pytest.raises(ConfigError):
        names.check_bucket_path(f"gs://bucket/{text}" if text not in ("", "-a", "a-", "A", "a" * 41) else "gs://b")


def test_a_suggestion_is_shown_and_would_be_taken():
    with pytest.raises(ConfigError, match="such as --name=my-run-1"):
        names.check_name("My run_1")
    for text in HOSTILE:
        if cleaned := names.suggestion(text):
            assert names.check_name(cleaned) == cleaned


@pytest.mark.parametrize("text", [*HOSTILE, "gs://bucket/a", "v5e:16x16"])
def test_labels_are_safe_and_distinct(text):
    value = names.label_value(text)
    assert len(value) <= 63
    assert names.label_value(value) == value
    assert value != names.label_value(text + "x")


@pytest.mark.parametrize(
    "name,chips,hosts,accelerator,machine",
    [
        ("v5e-1", 1, 1, "v5litepod-1", "ct5lp-hightpu-1t"),
        ("v5litepod-8", 8, 1, "v5litepod-8", "ct5lp-hightpu-8t"),
        ("v5e:4x4", 16, 4, "v5litepod-16", "ct5lp-hightpu-4t"),
        ("v6e-256", 256, 64, "v6e-256", "ct6e-standard-4t"),
        ("v5p-8", 4, 1, "v5p-8", "ct5p-hightpu-4t"),
        ("v4-128", 64, 16, "v4-128", "ct4p-hightpu-4t"),
    ],
)
def test_slices(name, chips, hosts, accelerator, machine):
    found = Slice.of(name)
    assert (found.chips, found.hosts, found.accelerator_type, found.machine_type) == (
        chips,
        hosts,
        accelerator,
        machine,
    )
    assert found.gcloud_flags() == [f"--accelerator-type={accelerator}"]
    assert found.hosts * found.chips_per_host == found.chips


def test_unknown_chips():
    with pytest.raises(ConfigError, match="known are v4, v5e, v5p, v6e"):
        Slice.of("v3-8")
    with pytest.raises(ConfigError, match="v6e: 1x1"):
        Slice.of("v9-8")


def test_importing_launchers_is_light():
    names = ("gcloud.command", "gke.command", "request", "shell", "worker", "xm.command")
    code = "import sys, perex_t5x.cli; " + "".join(f"import perex_t5x.launching.{name}; " for name in names)
    code += "print([m for m in ('jax', 'tensorflow') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
