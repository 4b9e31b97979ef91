"""T5X's own checkpointers read what we write, and we what they write: needs T5X, which is in no package registry."""

import os

import jax
import numpy as np
import pytest
from flax import traverse_util

from perex_t5x.checkpoint_formats import convert as convert_lib
from perex_t5x.checkpoint_formats import open_checkpoint
from perex_t5x.checkpoint_formats.plan import Options, make_plan
from tests.checkpoint_formats import support

t5x = pytest.importorskip("t5x", reason="needs T5X: git clone https://github.com/google-research/t5x, on PYTHONPATH")


@pytest.fixture(autouse=True)
def _as_t5x_expects():
    with jax.numpy_rank_promotion("allow"):
        yield


SIZES = {"emb_dim": 8, "num_heads": 8, "head_dim": 2, "mlp_dim": 16, "num_encoder_layers": 3, "num_decoder_layers": 3}


def model_of(kind: str):
    """One of T5X's examples, with an optimizer."""
    import optax
    import seqio
    from t5x import adafactor, models, optimizers
    from t5x.examples.scalable_t5 import network as scalable
    from t5x.examples.t5 import network

    if kind.endswith("adamw"):
        optimizer = optimizers.wrap_optax_optimizer(optax.adamw)(learning_rate=1e-3)
    else:
        rules = adafactor.standard_logical_factor_rules()
        beta1 = 0.9 if "momentum" in kind else None
        optimizer = adafactor.Adafactor(1e-3, beta1=beta1, min_dim_size_to_factor=4, logical_factor_rules=rules)
    module = scalable if kind.startswith("scalable") else network
    config = module.T5Config(vocab_size=128, mlp_activations=("gelu", "linear"), dropout_rate=0.0, **SIZES)
    vocabulary = seqio.ByteVocabulary()
    return models.EncoderDecoderModel(module.Transformer(config), vocabulary, vocabulary, optimizer_def=optimizer)


def checkpointer_of(kind: str, folder, seed: int = 0):
    """T5X's checkpointer of a format, and a state of random numbers that it knows the shapes of."""
    from t5x import checkpoints, partitioning, utils

    fmt, model = kind.split(" ", 1)
    partitioner = partitioning.PjitPartitioner(num_partitions=4)
    shapes = {"encoder_input_tokens": (8, 8), "decoder_input_tokens": (8, 8)}
    made = model_of(model)
    initializer = utils.TrainStateInitializer(made.optimizer_def, made.get_initial_variables, shapes, partitioner)
    state = initializer.from_scratch(jax.random.key(0))
    flat = traverse_util.flatten_dict(state.state_dict(), sep="/")
    rng = np.random.default_rng(seed)
    filled = {
        name: np.array(rng.normal(size=x.shape), x.dtype) if x.ndim else np.array(7 + seed, x.dtype)
        for name, x in flat.items()
    }
    state = state.restore_state(traverse_util.unflatten_dict(filled, sep="/"))
    if fmt == "legacy":
        return checkpoints.Checkpointer(state, partitioner, os.fspath(folder)), state, filled
    os.makedirs(folder, exist_ok=True)
    return checkpoints.OrbaxCheckpointManagerInterface(os.fspath(folder), state, partitioner), state, filled


def assert_state(state, filled) -> None:
    read = traverse_util.flatten_dict(state.state_dict(), sep="/")
    assert set(read) == set(filled)
    for name, array in filled.items():
        assert np.asarray(read[name]).tobytes() == array.tobytes(), name


MODELS = ["t5 adafactor", "t5 momentum", "t5 adamw", "scalable adafactor", "scalable adamw"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("fmt", ["legacy", "orbax"])
def test_there_and_back(tmp_path, fmt, model):
    """T5X -> ours (Orbax) -> T5X, and through safetensors where layers and architecture allow it."""
    checkpointer, state, filled = checkpointer_of(f"{fmt} {model}", tmp_path / "t5x")
    checkpointer.save(state)
    if fmt == "orbax":
        checkpointer.wait_until_finished()
    (path,) = (tmp_path / "t5x").glob("checkpoint_*")
    contents = open_checkpoint(str(path))
    assert contents.format == fmt
    support.assert_same(contents, filled)
    for to in ("orbax", "legacy", "safetensors"):
        target = tmp_path / to / ("" if to == "safetensors" else path.name)
        convert_lib.convert(make_plan(contents, Options(to)), os.fspath(target).rstrip("/"))
    back = tmp_path / "back"
    for to in ("orbax", "legacy"):
        plan = make_plan(open_checkpoint(str(tmp_path / "safetensors")), Options(to))
        convert_lib.convert(plan, os.fspath(back / to / path.name))
    for folder in (tmp_path / "orbax", tmp_path / "legacy", back / "orbax", back / "legacy"):
        reader, _, _ = checkpointer_of(f"{folder.name} {model}", folder, seed=1)
        assert_state(reader.restore(step=7), filled)


@pytest.mark.parametrize("model", ["t5 adafactor", "t5 adamw"])
@pytest.mark.parametrize("fmt", ["legacy", "orbax"])
def test_states_of_ours_in_t5x(tmp_path, fmt, model):
    """A state as optax has it here, Adafactor's or Adam's behind another transformation, restored by T5X."""
    _, _, filled = checkpointer_of(f"{fmt} {model}", tmp_path / "none")
    ours = {name: array for name, array in filled.items() if "param_states" not in name}
    prefix = "state/param_states/"
    for name, array in filled.items():
        if not name.startswith(prefix):
            continue
        rest = name.removeprefix(prefix)
        if model.endswith("adamw"):
            ours[f"{prefix}1/{rest}"] = array
        elif not rest.endswith("/m"):
            parameter, slot = rest.rsplit("/", 1)
            ours[f"{prefix}0/{slot}/{parameter}"] = array
        else:
            array[:] = 0  # there is no momentum
    if model.endswith("adafactor"):
        ours[f"{prefix}0/count"] = filled["state/step"]
    path = support.write_orbax(tmp_path / "ours" / "checkpoint_7", ours | {"rng": np.array([1, 2], np.uint32)})
    target = tmp_path / "converted" / "checkpoint_7"
    convert_lib.convert(make_plan(open_checkpoint(path), Options(fmt, optimizer_state="t5x")), os.fspath(target))
    reader, _, _ = checkpointer_of(f"{fmt} {model}", tmp_path / "converted", seed=1)
    assert_state(reader.restore(step=7), filled)
