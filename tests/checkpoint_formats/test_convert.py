"""Conversions: there and back is the identity, leaf by leaf and bit by bit; what goes wrong leaves nothing behind."""

import json
import os
import shutil
import types

import numpy as np
import pytest

from perex_t5x import buckets, checkpoint_files, files
from perex_t5x.checkpoint_formats import convert as convert_lib
from perex_t5x.checkpoint_formats import layers, legacy, open_checkpoint
from perex_t5x.checkpoint_formats.plan import Options, make_plan
from perex_t5x.errors import ConfigError, NoSpaceError
from tests.checkpoint_formats import support

LLAMA = {"head_dim": support.HEAD, "mlp_activations": ("silu", "linear")}


def convert(source, target, to, **options):
    target = str(target)
    contents = open_checkpoint(str(source))
    settings = LLAMA if "target/encoder/encoder_norm/scale" not in contents.leaves else {}
    convert_lib.convert(make_plan(contents, Options(to, settings=settings, **options)), target)
    return target


def _mixed(params):
    """Parameters and state of several dtypes, NaNs with other bits among them."""
    leaves = support.state_dict(params, support.adam(params))
    leaves["state/param_states/0/mu/token_embedder/embedding"].view(np.uint8)[:] = 255
    leaves |= {"rng": np.array([3, 4], np.uint32), "flax_mutables/seen": np.array([True, False])}
    return leaves | {"state/param_states/1": {}, "state/param_states/2": None}


CASES = {
    "t5 in bfloat16": _mixed(support.t5_params(support.BF16)),
    "t5 tied": _mixed(support.t5_params(tied=True, gated=False)),
    "decoder": _mixed(support.decoder_params()),
    "decoder tied": _mixed(support.decoder_params(support.BF16, tied=True)),
    "adafactor": support.state_dict(support.t5_params(), support.adafactor(support.t5_params(), momentum=True)),
    "layers in axis 0": _mixed(support.scanned(support.t5_params(), 0)),
    "layers in axis 1": _mixed(support.scanned(support.decoder_params(support.BF16), 1)),
}


# By default those of which every other is a part.
_BY_DEFAULT = ("t5 in bfloat16", "decoder tied", "adafactor")


@pytest.mark.parametrize("case", [c if c in _BY_DEFAULT else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_there_and_back_is_the_identity(tmp_path, case):
    leaves = CASES[case]
    path = support.write_legacy(tmp_path / "checkpoint_7", leaves)
    ways = {
        "orbax": convert(path, tmp_path / "orbax" / "checkpoint_7", "orbax"),
        "safetensors": convert(path, tmp_path / "hugging_face", "safetensors"),
        "file": convert(path, tmp_path / "model.safetensors", "safetensors"),
        "names of T5X": convert(path, tmp_path / "t5x.safetensors", "safetensors", names="t5x"),
    }
    support.assert_same(open_checkpoint(ways["orbax"]), leaves)
    support.assert_same(open_checkpoint(ways["names of T5X"]), leaves)
    for name, way in ways.items():
        back = convert(way, tmp_path / f"back_{name}" / "checkpoint_7", "legacy")
        support.assert_same(open_checkpoint(back), leaves)
    through_all = convert(ways["safetensors"], tmp_path / "all" / "checkpoint_7", "orbax")
    support.assert_same(open_checkpoint(through_all), leaves)
    assert checkpoint_files.verify(through_all) == ("valid", "")


@pytest.mark.parametrize("layout", layers.LAYOUTS)
@pytest.mark.parametrize(
    "case",
    ["adafactor", *(pytest.param(c, marks=pytest.mark.slow) for c in CASES if c.startswith(("t5 in", "layers")))],
)
def test_layers_change_places_and_back(tmp_path, case, layout):
    leaves = CASES[case]
    path = support.write_legacy(tmp_path / "checkpoint_7", leaves)
    former = layers.layout_of(open_checkpoint(path).leaves)
    moved = convert(path, tmp_path / "moved" / "checkpoint_7", "orbax", layers=layout)
    assert layers.layout_of(open_checkpoint(moved).leaves) == layout
    back = convert(moved, tmp_path / "back" / "checkpoint_7", "legacy", layers=former)
    support.assert_same(open_checkpoint(back), leaves)


def _factored(params, axis):
    """Adafactor's state of layers in one array, by T5X's rules: v_row keeps 'embed', v_col the other axis."""
    state = {}
    for name, array in params.items():
        stack = name.split("/")[0]
        is_layer = name.startswith((f"{stack}/layers/", f"{stack}/{stack}/"))
        if not is_layer or array.ndim != 3:
            state |= {f"{name}/v": support.numbers(array.shape, len(state))}
            state |= {f"{name}/{slot}": np.zeros((1,), np.float32) for slot in ("v_row", "v_col", "m")}
            continue
        rest = [k for k in range(3) if k != axis]
        embed, other = reversed(rest) if name.endswith(("out/kernel", "wo/kernel")) else rest
        # Each value says what it is of: the layer, and the index along the axis that is kept.
        whole = np.moveaxis(np.indices(array.shape), 0, -1)
        for slot, lacking, kept in (("v_row", other, embed), ("v_col", embed, other)):
            at = np.take(whole, 0, lacking)
            state[f"{name}/{slot}"] = (100 * at[..., axis] + at[..., kept]).astype(np.float32)
        state |= {f"{name}/{slot}": np.zeros((1,), np.float32) for slot in ("v", "m")}
    return state


@pytest.mark.parametrize("square", [False, True])
def test_rows_and_columns_of_adafactor(tmp_path, square, monkeypatch):
    """Of square matrices, too, where shapes do not say which axis is missing."""
    if square:
        monkeypatch.setattr(support, "JOINED", support.D)
        monkeypatch.setattr(support, "F", support.D)
    by_axis = {}
    for axis in (0, 1):
        params = support.scanned(support.t5_params(), axis)
        by_axis[axis] = support.state_dict(params, _factored(params, axis))
    path = support.write_legacy(tmp_path / "checkpoint_7", by_axis[1])
    moved = convert(path, tmp_path / "axis0" / "checkpoint_7", "orbax", layers="axis0")
    state = {n: a for n, a in by_axis[0].items() if n.endswith(("v_row", "v_col"))}
    read = open_checkpoint(moved).leaves
    for name, array in state.items():
        np.testing.assert_array_equal(read[name].read(), array, err_msg=name)
    # By themselves, v_row is along the shorter axis, or of square matrices along the first.
    unrolled = open_checkpoint(convert(path, tmp_path / "unrolled" / "checkpoint_7", "orbax", layers="unrolled")).leaves
    for kernel, shape in (("mlp/wi_0", (support.D, support.F)), ("mlp/wo", (support.F, support.D))):
        name = f"state/param_states/decoder/layers_2/{kernel}/kernel"
        shorter, longer = (shape[k] for k in np.argsort(shape, kind="stable"))
        np.testing.assert_array_equal(unrolled[f"{name}/v_row"].read(), 200 + np.arange(shorter))
        np.testing.assert_array_equal(unrolled[f"{name}/v_col"].read(), 200 + np.arange(longer))
    back = convert(tmp_path / "unrolled" / "checkpoint_7", tmp_path / "back" / "checkpoint_7", "legacy", layers="axis1")
    support.assert_same(open_checkpoint(back), by_axis[1])


def test_states_for_t5x(tmp_path):
    """Ours by optax's Adafactor, as T5X's has it; Adam's behind another transformation, as optax.adamw has it."""
    params = support.t5_params()
    theirs = support.adafactor(params)
    ours = {f"0/{slot}/{name}": theirs[f"{name}/{slot}"] for name in params for slot in ("v_row", "v_col", "v")}
    ours["0/count"] = np.array(7, np.int32)
    path = support.write_orbax(tmp_path / "checkpoint_7", support.state_dict(params, ours))
    target = convert(path, tmp_path / "legacy" / "checkpoint_7", "legacy", optimizer_state="t5x")
    support.assert_same(open_checkpoint(target), support.state_dict(params, theirs))

    path = support.write_orbax(
        tmp_path / "adam" / "checkpoint_7", support.state_dict(params, support.adam(params, "1/0/"))
    )
    target = convert(path, tmp_path / "t5x" / "checkpoint_7", "legacy", optimizer_state="t5x")
    support.assert_same(open_checkpoint(target), support.state_dict(params, support.adam(params)))


def test_what_is_left_out(tmp_path):
    params = support.t5_params()
    path = support.write_legacy(tmp_path / "checkpoint_7", support.state_dict(params, support.adam(params)))
    dropped = convert(path, tmp_path / "a" / "checkpoint_7", "orbax", optimizer_state="drop")
    support.assert_same(open_checkpoint(dropped), support.state_dict(params))
    only = convert(path, tmp_path / "b" / "checkpoint_7", "legacy", params_only=True)
    support.assert_same(open_checkpoint(only), support.state_dict(params))
    folder = convert(path, tmp_path / "c", "safetensors", params_only=True)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    params = support.t5_params()
    path = tmp_path_factory.mktemp("written") / "checkpoint_7"
    return support.write_legacy(path, support.state_dict(params, support.adam(params)))


@pytest.fixture
def source(written, tmp_path):
    """A checkpoint that a test may damage."""
    return str(shutil.copytree(written, tmp_path / "source" / "checkpoint_7"))


@pytest.mark.parametrize("to", ["legacy", "orbax", "safetensors"])
def test_what_cannot_be_read_leaves_nothing(source, tmp_path, to):
    os.unlink(f"{source}/target.token_embedder.embedding/1.0")
    with pytest.raises(checkpoint_files.DamagedError, match="target/token_embedder/embedding: "):
        convert(source, tmp_path / "new" / "deep" / "checkpoint_7", to)
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), ValueError("RESOURCE: No space left on device")]
)
@pytest.mark.parametrize("to", ["legacy", "orbax", "safetensors"])
def test_a_full_disk_leaves_nothing(source, tmp_path, to, error, monkeypatch):
    def full(*args, **kwargs):
        raise error

    for last in ("flax.serialization.msgpack_serialize", "perex_t5x.checksums.write", "safetensors.numpy.save_file"):
        monkeypatch.setattr(last, full)
    with pytest.raises(NoSpaceError, match="cannot write .*No space left on device. Nothing is left of it."):
        convert(source, tmp_path / "new" / "checkpoint_7", to)
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("to", ["legacy", "orbax", "safetensors"])
def test_what_is_there_stays(source, tmp_path, to, monkeypatch):
    target = tmp_path / "there" / "checkpoint_7"
    os.makedirs(target)
    with pytest.raises(ConfigError, match="exists already. Name another target, or remove it first."):
        convert(source, target, to)
    os.rmdir(target)
    # Made by another process in the meantime.
    written = legacy.write
    monkeypatch.setattr(legacy, "write", lambda *args: (written(*args), os.makedirs(target)))
    if to == "legacy":
        with pytest.raises(ConfigError, match="exists by now"):
            convert(source, target, to)
        assert os.listdir(tmp_path / "there") == ["checkpoint_7"] and not os.listdir(target)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("harm", ["truncated", "missing", "empty", "other bytes"])
def test_damaged_safetensors(source, tmp_path, number, harm):
    plan = make_plan(open_checkpoint(source), Options("safetensors"))
    most = 10**9 if number == 1 else 10_000
    convert_lib.convert(plan, str(tmp_path / "hf"), max_shard_bytes=most)
    name = sorted(n for n in os.listdir(tmp_path / "hf") if n.startswith("model") and n.endswith("rs"))[number - 1]
    file = tmp_path / "hf" / name
    if harm == "missing":
        file.unlink()
    elif harm == "other bytes":
        file.write_bytes(b"no such file" * 100)
    else:
        os.truncate(file, file.stat().st_size // 2 if harm == "truncated" else 0)
    if harm == "missing" and most == 10**9:  # what is left has no parameters
        assert all(name.startswith("state/") for name in open_checkpoint(str(tmp_path / "hf")).leaves)
    else:
        with pytest.raises(checkpoint_files.DamagedError, match=f"hf cannot be read: {name}|{name} is missing"):
            open_checkpoint(str(tmp_path / "hf"))


def test_files_above_a_size_have_an_index(source, tmp_path):
    plan = make_plan(open_checkpoint(source), Options("safetensors"))
    convert_lib.convert(plan, str(tmp_path / "hf"), max_shard_bytes=10_000)
    index = json.loads(files.read_bytes(tmp_path / "hf" / "model.safetensors.index.json"))
    shards = sorted(n for n in os.listdir(tmp_path / "hf") if n.startswith("model-"))
    assert sorted(set(index["weight_map"].values())) == shards and len(shards) > 1
    back = convert(tmp_path / "hf", tmp_path / "checkpoint_7", "legacy")
    expected = {name: leaf.read() for name, leaf in open_checkpoint(source).leaves.items()}
    support.assert_same(open_checkpoint(back), expected)


# --- the command ------------------------------------------------------------------------------------------------------


DEFAULTS = {
    "json": False, "to": None, "dry_run": False, "names": "hugging_face", "layers": "keep", "heads": "keep",
    "optimizer_state": "keep",
    "params_only": False, "config_gin": None, "set": [], "ignore": [], "max_shard_size": "5GB",
}  # fmt: skip


@pytest.fixture
def run(capsys):
    """Runs the command in this process; returns its exit code and what it prints."""

    def call(*words, **flags):
        code = checkpoint_files.command(types.SimpleNamespace(**DEFAULTS | flags), [str(word) for word in words])
        return code, capsys.readouterr().out

    return call


def test_inspect(run, source, tmp_path):
    code, text = run("inspect", source)
    assert code == 0 and "T5X's legacy format (msgpack and zarr), version 3" in text
    assert "step 7; layers unrolled" in text
    (line,) = [line for line in text.splitlines() if " target/token_embedder/embedding " in line]
    assert line.split()[1:] == ["float32", "[24,", "8]", "768", "B", "zarr"]
    described = json.loads(run("inspect", source, json=True)[1])
    assert (described["format"], described["version"], described["step"]) == ("legacy", "3", 7)
    leaf = {"shape": [24, 8], "dtype": "float32", "bytes": 768, "stored": "zarr"}
    assert described["leaves"]["target/token_embedder/embedding"] == leaf
    assert len(run("inspect", os.path.dirname(source), json=True)[1].splitlines()) == 1
    orbax = convert(source, tmp_path / "run" / "checkpoint_7", "orbax")
    assert json.loads(run("inspect", orbax, json=True)[1])["format"] == "orbax"


def test_dry_run_lists_every_leaf(run, source, tmp_path):
    flags = {"to": "safetensors", "optimizer_state": "drop"}
    code, text = run("convert", source, tmp_path / "hf", dry_run=True, **flags)
    assert code == 0 and "nothing is written" in text and os.listdir(tmp_path) == ["source"]
    name = "target/decoder/layers_1/mlp/wi_0/kernel"
    (line,) = [line for line in text.splitlines() if f" {name} " in line]
    there = "decoder.block.1.layer.2.DenseReluDense.wi_0.weight"
    assert line.split(maxsplit=2)[2] == f"{there}  float32 [16, 8]  [renamed, transposed]"
    assert "[dropped: --optimizer_state=drop]" in text and "state/step  int32 []  [kept]" in text
    assert "config.json: T5ForConditionalGeneration" in text
    plan = json.loads(run("convert", source, tmp_path / "hf", dry_run=True, json=True, **flags)[1])
    everything = {name for leaf in plan["leaves"] for name in leaf["sources"]}
    assert everything == set(open_checkpoint(source).leaves)
    # Then the same is done.
    assert run("convert", source, tmp_path / "hf", **flags)[0] == 0
    written = {leaf["target"] for leaf in plan["leaves"]} - {None}
    assert set(open_checkpoint(str(tmp_path / "hf")).leaves) == written
    code, text = run("convert", tmp_path / "hf", tmp_path / "run", to="orbax", layers="axis0", dry_run=True)
    assert "stacked from 3 layers" in text and f"{tmp_path}/run/checkpoint_7 (orbax)" in text
    assert "note: the model is T5Config(vocab_size=24, emb_dim=8, num_heads=2, head_dim=3, mlp_dim=16" in text


def test_a_checkpoint_gets_the_name_of_its_step(run, source, tmp_path):
    assert run("convert", os.path.dirname(source), tmp_path / "new", to="orbax")[0] == 0
    assert os.listdir(tmp_path / "new") == ["checkpoint_7"]
    assert run("verify", tmp_path / "new")[1] == f"{tmp_path}/new/checkpoint_7: valid\n"


@pytest.mark.parametrize(
    ("words", "flags", "message"),
    [
        (["conver", "SOURCE", "x"], {}, "Did you mean 'convert'"),
        (["convert", "SOURCE"], {"to": "orbax"}, "convert takes two paths"),
        (["convert", "SOURCE", "TMP/x"], {}, "convert needs a format: --to=orbax"),
        (["convert", "TMP/nothing", "TMP/x"], {"to": "orbax"}, "there is no such"),
        (["convert", "TMP", "TMP/x"], {"to": "orbax"}, "no checkpoint"),
        (["convert", "SOURCE", "TMP/x.safetensors"], {"to": "orbax"}, "is named as a safetensors file"),
        (["convert", "SOURCE", "TMP/x"], {"to": "safetensors", "max_shard_size": "big"}, "a size such as 5GB"),
        (["convert", "SOURCE", "TMP/x"], {"to": "safetensors", "set": ["head_dimm=3"]}, "Did you mean 'head_dim'"),
        (["convert", "SOURCE", "TMP/x"], {"to": "safetensors", "set": ["head_dim=a b"]}, "no Python value"),
        (["convert", "SOURCE", "TMP/x"], {"to": "safetensors", "config_gin": "TMP/none.gin"}, "cannot be read"),
        (["inspect", "TMP/nothing"], {}, "there is no such"),
    ],
)
def test_what_a_user_may_get_wrong(run, source, tmp_path, words, flags, message):
    words = [word.replace("SOURCE", source).replace("TMP", str(tmp_path)) for word in words]
    flags = {
        name: value.replace("TMP", str(tmp_path)) if isinstance(value, str) else value for name, value in flags.items()
    }
    with pytest.raises(ConfigError, match=message):
        run(*words, **flags)
    assert os.listdir(tmp_path) == ["source"]


def test_several_checkpoints_have_to_be_named(run, source, tmp_path):
    convert(source, tmp_path / "source" / "checkpoint_8", "orbax")
    with pytest.raises(ConfigError, match=r"holds 2 checkpoints \(checkpoint_7, checkpoint_8\): name one of them"):
        run("convert", tmp_path / "source", tmp_path / "x", to="orbax")


def test_in_a_bucket(cloud_storage_in_process, run, source, tmp_path):
    """From a disk to a bucket, and back; the file that makes a checkpoint of a folder is uploaded last."""
    buckets.client.cache_clear()
    cloud = cloud_storage_in_process
    expected = {name: leaf.read() for name, leaf in open_checkpoint(source).leaves.items()}
    for to in ("legacy", "orbax", "safetensors"):
        there = f"{cloud.bucket}/{to}" + ("" if to == "safetensors" else "/checkpoint_7")
        assert run("convert", source, there, to=to)[0] == 0
        assert run("verify", there)[0] == 0
        back = convert(there, tmp_path / f"from_{to}" / "checkpoint_7", "legacy")
        support.assert_same(open_checkpoint(back), expected)
        with pytest.raises(ConfigError, match="exists already"):
            run("convert", source, there, to=to)
