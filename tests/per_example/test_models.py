"""The engine on this project's transformers, against the loop: scanned, rematerialised, tied, packed, with dropout."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from perex_t5x import models, per_example
from perex_t5x.models import remat
from perex_t5x.per_example.independent import check_independent
from tests.models.model_support import as_for_tpu
from tests.per_example.loop_reference import SOME, STATISTICS, assert_matches, clipped, grouped, norms, single_gradients

ROWS, LENGTH, VOCAB = 4, 6, 32
KEY = jax.random.key(5)
SIZES = dict(
    vocab_size=VOCAB, emb_dim=16, num_heads=4, head_dim=4, mlp_dim=20, num_encoder_layers=2, num_decoder_layers=2
)
SCANNED = dict(scan_layers=True, remat_policy="full")


def decoder(**changes):
    module = models.DecoderWrapper(models.T5Config(**(SIZES | changes)))
    return models.DecoderOnlyModel(
        module, SimpleNamespace(eos_id=1), None, loss_normalizing_factor="NUM_REAL_TARGET_TOKENS", z_loss=1e-2
    )


def encoder_decoder(**changes):
    module, vocabulary = models.Transformer(models.T5Config(**(SIZES | changes))), SimpleNamespace(eos_id=1)
    return models.EncoderDecoderModel(
        module, vocabulary, vocabulary, None, loss_normalizing_factor="NUM_REAL_TARGET_TOKENS"
    )


def features(kind="plain"):
    """Ids repeat within a row, rows differ in length."""
    draw = np.random.default_rng(0)
    targets = draw.integers(2, 9, (ROWS, LENGTH)).astype(np.int32)
    targets[1, 3:] = targets[2, 5:] = 0
    batch = {
        "decoder_target_tokens": targets,
        "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
        "decoder_loss_weights": (targets > 0).astype(np.int32),
    }
    if kind == "packed":
        segments = np.array([[1, 1, 2, 2, 2, 3], [1, 1, 1, 0, 0, 0], [1, 2, 2, 2, 2, 0], [1] * 6], np.int32)
        positions = np.array([[0, 1, 0, 1, 2, 0], [0, 1, 2, 0, 0, 0], [0, 0, 1, 2, 3, 0], range(6)], np.int32)
        batch |= {"decoder_segment_ids": segments, "decoder_positions": positions}
    if kind == "encoder_decoder":
        batch["encoder_input_tokens"] = draw.integers(2, 9, (ROWS, 5)).astype(np.int32)
    return jax.tree.map(jnp.asarray, batch)


def initial(model, batch):
    """Values drawn by numpy, the same for the same shapes: nothing to compile."""
    shapes = jax.eval_shape(
        lambda key: model.get_initial_variables(key, {k: x.shape for k, x in batch.items()}), jax.random.key(1)
    )
    draw = np.random.default_rng(1)
    value = lambda x: jnp.asarray(0.4 * draw.normal(size=x.shape), jnp.float32)  # noqa: E731
    return jax.tree.map(value, nn.unbox(shapes["params"]))


def problem(model, kind="plain"):
    """The loss Σ ℓ_i / W with W of the whole batch given, so g_i = B ∇ℓ_i / W."""
    batch = features(kind)
    normalizer = model.loss_normalizer(batch)

    def loss(p, b, key=None):
        return ROWS * model.loss_fn(p, b, key, normalizer)[0]

    return loss, initial(model, batch), batch


@functools.cache
def scanned_reference():
    """Remat changes no number: one reference for all policies."""
    loss, params, batch = problem(decoder(scan_layers=True, logits_via_embedding=True))
    return single_gradients(loss, params, batch)


@functools.cache
def dropped_reference():
    loss, params, batch = problem(decoder(scan_layers=True, logits_via_embedding=True, dropout_rate=0.3))
    return single_gradients(loss, params, batch, key=KEY)


def run(problem, *extra, statistics=SOME, weights=None, **options):
    loss, params, batch = problem
    compute = per_example.grad_statistics(loss, statistics, **options)
    return jax.jit(lambda p, b, *e: compute(p, b, *e, weights=weights))(params, batch, *extra)


@pytest.mark.parametrize(
    "policy",
    [
        "none",
        "full",
        "save:context,mlp_in",
        "save:query;offload:mlp_in,out",
        pytest.param("minimal", marks=pytest.mark.slow),
        "dots_saveable",
        "everything_saveable",
    ],
)
def test_scanned_and_tied_under_every_policy(policy, monkeypatch):
    if "offload" in policy:
        monkeypatch.setattr(remat, "for_tpu", lambda: True)  # CPUs keep offloaded values where they are
    of_policy = problem(decoder(scan_layers=True, logits_via_embedding=True, remat_policy=policy))
    stats, aux = run(of_policy, statistics=STATISTICS, norms=True)
    assert_matches(stats, scanned_reference(), STATISTICS)
    np.testing.assert_allclose(aux.norms, norms(scanned_reference()), rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "changes", "kind"),
    [
        (decoder, {"remat_policy": "full"}, "plain"),
        (decoder, {"logits_via_embedding": True, "num_kv_heads": 2, "loss_chunks": 4}, "packed"),
        (decoder, {"num_kv_heads": 1, "loss_chunks": 4, **SCANNED}, "packed"),
        (encoder_decoder, SCANNED, "encoder_decoder"),
        (encoder_decoder, dict(num_encoder_layers=1, num_decoder_layers=1), "encoder_decoder"),
        (encoder_decoder, dict(relative_bias="per_layer", **SCANNED), "encoder_decoder"),
        (decoder, dict(positions="relative", mlp_activations=("relu",), logits_via_embedding=True), "packed"),
    ],
    ids=[
        "unrolled_remat_untied",
        "unrolled_tied_grouped_packed_chunks",
        "scanned_grouped_packed_chunks",
        "t5_scanned",
        "t5_unrolled",
        "umt5_scanned",
        "t5x_decoder_only_packed",
    ],
)
def test_networks(make, changes, kind):
    made = problem(make(**changes), kind)
    assert_matches(run(made)[0], single_gradients(*made))


def test_layers_in_their_form_for_tpus(monkeypatch):
    loss, params, batch = problem(decoder(num_kv_heads=2, **SCANNED), "packed")
    gradients = single_gradients(loss, params, batch)
    as_for_tpu(monkeypatch)
    reductions = {row.parameter: row.reduction for row in per_example.coverage(loss, params, batch)}
    assert {r for name, r in reductions.items() if "kernel" in name} == {"one at a time"}, reductions
    assert_matches(run((loss, params, batch))[0], gradients)


def test_dropout_weights_clipping_and_microbatches_together():
    made = problem(decoder(logits_via_embedding=True, dropout_rate=0.3, **SCANNED))
    gradients, limit = dropped_reference(), float(np.median(norms(dropped_reference())))
    weights = jnp.array([1.0, 0.0, 2.0, 0.5])
    stats, aux = run(made, KEY, weights=weights, rng_argnums=2, clip_norm=limit, microbatch_size=2)
    assert_matches(stats, clipped(gradients, limit), weights=weights)
    np.testing.assert_allclose(aux.norms, norms(gradients), rtol=1e-5)
    assert int(stats.count) == 3


def test_dropout_in_groups():
    made = problem(decoder(logits_via_embedding=True, dropout_rate=0.3, **SCANNED))
    stats, _ = run(made, KEY, rng_argnums=2, group_size=2)
    assert_matches(stats, grouped(dropped_reference(), 2))
    first, undropped = (jax.tree.leaves(r[0]) for r in (dropped_reference(), scanned_reference()))
    different = [np.abs(a - b).max() for a, b in zip(first, undropped, strict=True)]
    assert max(different) > 1e-2  # dropout did something


def test_a_row_that_is_not_finite_is_skipped():
    loss, params, batch = problem(decoder(logits_via_embedding=True, **SCANNED))
    gradients = scanned_reference()
    batch["poison"] = jnp.array([0.0, 0.0, jnp.nan, 0.0])

    def poisoned(p, b):
        plain = {k: v for k, v in b.items() if k != "poison"}
        return loss(p, plain) * jnp.where(b["poison"][0] == 0, 1.0, jnp.nan)

    stats, aux = run((poisoned, params, batch), non_finite="skip")
    assert_matches(stats, gradients[:2] + gradients[3:])
    assert int(stats.count) == 3 and int(aux.non_finite) == 1


def test_the_normaliser_of_the_batch_is_found_to_mix_rows():
    """Given with the call it is held constant; computed inside, it depends on how many tokens the other rows have."""
    model = decoder(num_decoder_layers=1)
    batch = features()
    params = initial(model, batch)
    check_independent(model.loss_fn, params, batch, None, 17.0, reduction="sum", has_aux=True)
    with pytest.raises(ValueError, match="the loss mixes examples.*reduce_sum.*losses.py"):
        check_independent(model.loss_fn, params, batch, reduction="sum", has_aux=True)


def test_loss_sums_and_mean_gradient_are_those_of_the_batch():
    """The model's own loss_fn, token-normalised and with dropout, as the guide calls it."""
    model, batch = decoder(num_decoder_layers=1, dropout_rate=0.3), features()
    params, normalizer = initial(model, batch), model.loss_normalizer(features())
    compute = per_example.grad_statistics(model.loss_fn, "mean", reduction="sum", rng_argnums=2, has_aux=True)
    stats, aux = jax.jit(compute)(params, batch, KEY, normalizer)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(KEY, jnp.arange(ROWS))
    (loss, sums), gradient = jax.jit(jax.value_and_grad(model.loss_fn, has_aux=True))(params, batch, keys)
    np.testing.assert_allclose(aux.values.sum(), loss, rtol=1e-5)
    for name, total in sums.items():
        np.testing.assert_allclose(aux.aux[name].sum(), total, rtol=1e-5, err_msg=name)
    for a, e in zip(jax.tree.leaves(stats.mean), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=1e-5 * np.abs(e).max())
