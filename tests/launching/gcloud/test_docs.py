"""The commands of docs/launch.md run against the stand-ins."""

import json
import re
import shlex

import pytest

from perex_t5x.errors import Reason
from tests.launching.gcloud.support import ROOT, Cloud, killed_workers, processes

PAGE = (ROOT / "docs/launch.md").read_text(encoding="utf-8")


@pytest.fixture
def cloud(tmp_path):
    yield Cloud(tmp_path)
    killed_workers(tmp_path)


@pytest.mark.slow
def test_commands_of_the_page(cloud):
    """Those with which a launch is looked at, stopped and deleted."""
    here = cloud.job("a", "import signal\nsignal.signal(15, lambda n, f: sys.exit(130))\nwhile True: time.sleep(0.1)")
    (cloud.folder / "work.json").write_text(json.dumps({"root": "gs://my-bucket/sweeps/sqrt", "jobs": [here]}))
    assert cloud.detach(name="sqrt-lr").status == 0
    cloud.wait_for(lambda: len(cloud.ran) == 2)
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("python launch/gcloud_tpu.py ")]
    commands = [shlex.split(line.replace("BUCKET", "my-bucket"), comments=True)[2:] for line in lines]
    order = ("list", "status", "collect", "stop", "follow", "delete", "delete_all")
    assert {words[0] for words in commands} == set(order)
    for words in sorted(commands, key=lambda words: order.index(words[0])):
        done = cloud.command(*words, *(["--yes"] if words[0] == "delete_all" else []))
        by_folder = any(word.startswith("--dir=") for word in words)
        expected = {Reason.STOPPED.exit_code} if words[0] == "follow" else {0}
        if not by_folder and words[0] in ("stop", "follow"):  # of the cloud, where it is gone once it has stopped
            expected |= {0, Reason.CONFIGURATION.exit_code}
        assert done.status in expected, (words, done.err)
    cloud.wait_for(lambda: not cloud.resources)
    cloud.wait_for(lambda: not processes(cloud.folder))
