"""The loss in chunks is the loss: values, sums and gradients against the formula, by XLA and by the kernel."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from perex_t5x import models, optimizers, per_example
from perex_t5x.errors import ConfigError
from perex_t5x.hardware.devices import has_libtpu, tpu_devices
from perex_t5x.models import head, losses, softmax_kernel
from perex_t5x.per_example.independent import check_independent
from tests import tiny
from tests.models.model_support import batch, close, config, decoder_only, encoder_decoder, jit, params
from tests.per_example.loop_reference import norms, single_gradients
from tests.trainer_support import assert_close, gradient_of, make_trainer

ROWS, LENGTH, WIDTH, VOCAB = 2, 70, 6, 24


def problem(seed=0, vocab=VOCAB, length=LENGTH):
    draw = np.random.default_rng(seed)
    return (
        draw.normal(size=(ROWS, length, WIDTH)).astype(np.float32),
        draw.normal(size=(WIDTH, vocab)).astype(np.float32),
        draw.integers(0, vocab, (ROWS, length)).astype(np.int32),
        (draw.uniform(size=(ROWS, length)) * (draw.uniform(size=(ROWS, length)) < 0.8)).astype(np.float32),
    )


def formula(x, kernel, targets, weights, normalizer, z_loss, smoothing):
    """Loss, ∂x, ∂W, ∂weights and ∂normalizer in float64, with the smoothed distribution written out."""
    x, kernel, weights = (np.asarray(a, np.float64) for a in (x, kernel, weights))
    logits = x @ kernel
    size = kernel.shape[1]
    log_z = np.log(np.exp(logits).sum(-1))
    softmax = np.exp(logits - log_z[..., None])
    q = np.full(logits.shape, smoothing / (size - 1))
    np.put_along_axis(q, targets[..., None], 1 - smoothing, axis=-1)
    entropy = -np.sum(np.where(q > 0, q * np.log(np.where(q > 0, q, 1)), 0), -1)
    loss = -(q * (logits - log_z[..., None])).sum(-1) - entropy + z_loss * log_z**2
    total = (loss * weights).sum() / normalizer
    d = (softmax * (1 + 2 * z_loss * log_z)[..., None] - q) * weights[..., None] / normalizer
    grads = d @ kernel.T, np.einsum("btd,btv->dv", x, d), loss / normalizer, -total / normalizer
    return total, loss, np.argmax(logits, -1) == targets, grads


# One piece; pieces that divide the length; a shorter last one.
@pytest.mark.parametrize(
    ("z_loss", "smoothing", "chunks"), [(0.0, 0.0, 1), (1e-2, 0.1, 7), (1e-2, 0.0, 3), (0.0, 0.2, 4)]
)
def test_loss_sums_and_gradients(z_loss, smoothing, chunks):
    x, kernel, targets, weights = problem()
    how = dict(config=config(loss_chunks=chunks), z_loss=z_loss, label_smoothing=smoothing)

    def loss(x, kernel, weights, normalizer):
        return head.cross_entropy(x, kernel, targets, weights, normalizer, **how)

    compute = jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    (value, per_token), grads = compute(x, kernel, weights, 7.0)
    total, per_token_loss, correct, expected = formula(x, kernel, targets, weights, 7.0, z_loss, smoothing)
    close(value, total)
    close(per_token.loss, per_token_loss)
    np.testing.assert_array_equal(per_token.correct, correct)
    close(grads, expected, atol=1e-5)
    # Without a gradient the sums alone are computed; they are the same.
    again, alone = jit(loss)(x, kernel, weights, 7.0)
    np.testing.assert_allclose(again, value, rtol=1e-6)
    plain = losses.cross_entropy(jnp.asarray(x @ kernel), targets, z_loss, smoothing)
    close(alone, plain)


@pytest.mark.parametrize(("vocab", "smoothing", "dtype"), [(384, 0.1, jnp.float32), (2048, 0.0, jnp.bfloat16)])
def test_kernel(vocab, smoothing, dtype):
    """In the interpreter: the second chunk of each row, written between what was there."""
    x, kernel, targets, weights = problem(vocab=vocab, length=32)
    logits = jnp.asarray(x @ kernel)
    options = dict(z_loss=1e-2, label_smoothing=smoothing)
    before = jnp.full((ROWS, 3 * 32, vocab), 7.0, dtype)
    found, sums = softmax_kernel.sums_and_cotangents(
        logits, targets, weights, before, 32, block=16, interpret=True, **options
    )
    gradient = jax.grad(lambda logits: jnp.sum(losses.cross_entropy(logits, targets, **options).loss * weights))(logits)
    close(losses.token_losses(sums, vocab, **options), losses.cross_entropy(logits, targets, **options))
    np.testing.assert_allclose(
        found[:, 32:64].astype(jnp.float32), gradient, rtol=1e-5 if dtype == jnp.float32 else 2**-8, atol=1e-7
    )
    assert (found[:, :32] == 7).all() and (found[:, 64:] == 7).all()


@pytest.mark.parametrize(("make", "tied"), [(decoder_only, False), (encoder_decoder, True)])
def test_models(make, tied):
    """Loss, sums, gradients and scores of a whole model are those of the model that holds its logits."""
    features = batch(make.__name__)
    found = []
    for chunks in (0, 2):
        model = make(z_loss=1e-2, loss_chunks=chunks, logits_via_embedding=tied)
        p = params(model, features)
        value = jax.value_and_grad(model.loss_fn, has_aux=True)
        found.append(jit(lambda p, m=model, f=value: (f(p, features), m.score_batch(p, features)))(p))
    close(found[1], found[0])


def test_auto_asks_for_a_large_vocabulary_and_bad_values_are_named():
    assert head.is_worthwhile(config(vocab_size=32768), 512)
    assert not head.is_worthwhile(config(vocab_size=32768), 511)
    assert not head.is_worthwhile(config(vocab_size=32768, loss_chunks=0), 512)
    for chunks in (-1, "many", 2.0):
        with pytest.raises(
            ConfigError, match="T5Config.loss_chunks = .*: must be a whole number, at least 0, or 'auto'"
        ):
            config(loss_chunks=chunks)


def test_own_logits_enter_the_loss():
    """A model that overrides `compute_logits`, and a network whose class does not say that it takes a head."""

    class Scaled(models.DecoderOnlyModel):
        def compute_logits(self, params, batch, dropout_rng=None):
            return 2.0 * super().compute_logits(params, batch, dropout_rng)

    class Capped(models.DecoderWrapper):
        def __call__(self, *args, **kwargs):
            return 2.0 * super().__call__(*args, **kwargs)

    features = batch("decoder_only")
    plain = decoder_only(loss_chunks=2)
    p = params(plain, features)
    logits = 2.0 * plain.compute_logits(p, features)
    expected = losses.cross_entropy(logits, features["decoder_target_tokens"]).loss * features["decoder_loss_weights"]
    vocabulary = SimpleNamespace(eos_id=1)
    for model in (
        Scaled(models.DecoderWrapper(plain.config), vocabulary, None),
        models.DecoderOnlyModel(Capped(plain.config), vocabulary, None),
    ):
        close(model.loss_fn(p, features)[0], expected.sum())


def test_mapped_over_networks_and_independent():
    features = batch("decoder_only")
    model = decoder_only(loss_chunks=2)
    p = params(model, features)
    pair = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), p)
    gradient = jax.grad(lambda p: model.loss_fn(p, features)[0])
    mapped = jit(jax.vmap(gradient))(pair)
    one = jit(gradient)(jax.tree.map(lambda x: 0.5 * x, p))
    close(jax.tree.map(lambda x: x[1], mapped), one)
    check_independent(model.loss_fn, p, features, None, 17.0, reduction="sum", has_aux=True)


@pytest.mark.parametrize("tied", [False, True])
def test_statistics_with_rounded_factors(tied, monkeypatch):
    """As on TPUs: factors in bfloat16, gradients in float32. The loop has the same factors, but in float32."""
    features = batch("decoder_only", lengths=(9, 4))
    model = decoder_only(z_loss=1e-2, loss_chunks=2, logits_via_embedding=tied)
    p = params(model, features)

    def loss(p, rows):
        return model.loss_fn(p, rows, None, 1.0)[0]

    def rounded(x):
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    with monkeypatch.context() as patch:
        patch.setattr(head, "operand_dtype", lambda _: jnp.dtype(jnp.bfloat16))
        compute = per_example.grad_statistics(loss, ("mean", "mean_square"), norms=True)
        stats, aux = jit(compute)(p, features)
    cotangents = head._cotangents
    monkeypatch.setattr(head, "_operands", lambda how, x, kernel: (rounded(x), rounded(kernel)))
    monkeypatch.setattr(head, "_cotangents", lambda *a: (cotangents(*a)[0], rounded(cotangents(*a)[1])))
    gradients = single_gradients(loss, p, features)
    expected = jax.tree.map(lambda *g: (np.mean(g, axis=0), np.mean(np.square(g), axis=0)), *gradients)
    found = jax.tree.map(lambda *s: s, stats.mean, stats.mean_square)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5 * np.abs(e).max()), found, expected)
    np.testing.assert_allclose(aux.norms, norms(gradients), rtol=1e-5)


# --- on devices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tensor_parallel_statistics(tied):
    """A vocabulary divided over devices, chunks that end within a row: statistics as of one device and all logits."""
    rows = tiny.random_batch(16)
    tying = f"models.T5Config.logits_via_embedding = {tied}"

    def found(chunks, mesh):
        made = make_trainer(optimizers.micro_adam, tying, f"models.T5Config.loss_chunks = {chunks}", mesh=mesh)
        return gradient_of(made, rows)

    whole, parts = found(0, (1, 1)), found(3, (4, 2))
    np.testing.assert_allclose(parts.loss, whole.loss, rtol=1e-5)
    assert_close(parts.statistics.mean, whole.statistics.mean)
    assert_close(parts.statistics.mean_square, whole.statistics.mean_square)


@pytest.mark.skipif(not has_libtpu(), reason="needs the TPU compiler")
def test_compiled_for_tpus_by_kernels():
    """Two kernels: the loss's, and that of the output projection's statistics; no float32 array of all logits."""
    mesh = jax.sharding.Mesh(np.array(tpu_devices("v5e:2x2")), ("data",))
    how = dict(config=config(vocab_size=1024, dtype="bfloat16", loss_chunks=2), z_loss=1e-4)

    def loss(kernel, rows):
        return head.cross_entropy(rows["x"], kernel, rows["targets"], rows["weights"], 9.0, **how)[0]

    seen = []

    def local(kernel, rows):
        seen.append(per_example.coverage(loss, kernel, rows))
        return per_example.grad_statistics(loss, ("mean", "mean_square"))(kernel, rows)[0].mean_square

    def spec(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

    rows = {
        "x": spec((16, 256, 256), jnp.bfloat16, "data"),
        "targets": spec((16, 256), jnp.int32, "data"),
        "weights": spec((16, 256), jnp.float32, "data"),
    }
    run = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    text = jax.jit(run(local)).lower(spec((256, 1024), jnp.float32), rows).compile().as_text()
    kernels = [line for line in text.splitlines() if '"tpu_custom_call"' in line]
    assert sum(softmax_kernel.NAME in line for line in kernels) == 1 and len(kernels) == 2
    assert [row.kernel for row in seen[0]] == [""]
    assert "bf16[4,256,1024]" in text and "f32[4,256,1024]" not in text and "f32[4,128,1024]" in text
