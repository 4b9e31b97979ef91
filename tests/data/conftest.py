"""A small corpus and tasks over it, so that no test but one reads the standard library."""

import random

import jax
import pytest
import seqio

from perex_t5x.data import tasks
from perex_t5x.utils import DatasetConfig

DOCUMENTS = 40


def make_document(i: int) -> str:
    rng = random.Random(i)
    words = ["alpha", "beta", "gamma", "naïve", "δ", "x = 1", "return", "\n"]
    return " ".join(rng.choice(words) for _ in range(rng.choice([3, 20, 60, 150])))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder of text files."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(DOCUMENTS):
        (folder / f"doc{i:02}.txt").write_text(make_document(i))
    return folder


@pytest.fixture(scope="session")
def tiny_lm(corpus):
    """A registered language modelling task over `corpus`."""
    tasks.register_text_files(glob=f"{corpus}/*.txt", name="tiny_lm")
    return "tiny_lm"


@pytest.fixture(scope="session")
def converter():
    return seqio.DecoderFeatureConverter


@pytest.fixture(scope="session")
def config(tiny_lm):
    """Makes a DatasetConfig over the tiny task."""

    def make(**changes):
        values = dict(
            mixture_or_task_name=tiny_lm,
            task_feature_lengths={"targets": 32},
            split="train",
            batch_size=8,
            shuffle=True,
            seed=3,
            pack=True,
        )
        return DatasetConfig(**{**values, **changes})

    return make


@pytest.fixture
def shardings():
    """Makes shardings for a feed on a mesh (data, model) of the first data × model devices."""

    def make(feed, data, model=1):
        devices = jax.devices()[: data * model]
        mesh = jax.make_mesh((data, model), ("data", "model"), devices=devices)
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        return {name: sharding for name in feed.element_spec}

    return make
