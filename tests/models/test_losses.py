import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x.errors import ConfigError
from perex_t5x.models import losses
from tests.models.model_support import close, decoder_only


def reference(logits, targets, z_loss, smoothing):
    """The definition, in float64, with the smoothed distribution written out."""
    logits = np.asarray(logits, np.float64)
    size = logits.shape[-1]
    log_z = np.log(np.exp(logits).sum(-1))
    q = np.full(logits.shape, smoothing / (size - 1))
    np.put_along_axis(q, np.asarray(targets)[..., None], 1 - smoothing, axis=-1)
    entropy = -np.sum(np.where(q > 0, q * np.log(np.where(q > 0, q, 1)), 0), -1)
    return -(q * (logits - log_z[..., None])).sum(-1) - entropy + z_loss * log_z**2, z_loss * log_z**2


@pytest.mark.parametrize("z_loss, smoothing", [(0.0, 0.0), (1e-2, 0.0), (0.0, 0.1), (1e-2, 0.2)])
def test_cross_entropy(z_loss, smoothing):
    draw = np.random.default_rng(0)
    logits = jnp.asarray(3 * draw.normal(size=(2, 5, 7)), jnp.float32)
    targets = jnp.asarray(draw.integers(0, 7, (2, 5)))
    actual = losses.cross_entropy(logits, targets, z_loss, smoothing)
    loss, z = reference(logits, targets, z_loss, smoothing)
    close(actual.loss, loss)
    close(actual.z_loss, z)
    np.testing.assert_array_equal(actual.correct, logits.argmax(-1) == targets)
    expected = jax.nn.log_softmax(logits)
    close(actual.log_likelihood, jnp.take_along_axis(expected, targets[..., None], -1)[..., 0])


def test_cross_entropy_gradient_is_softmax_minus_target():
    draw = np.random.default_rng(0)
    logits = jnp.asarray(draw.normal(size=(1, 3, 5)), jnp.float32)
    targets = jnp.array([[0, 4, 2]])
    grad = jax.grad(lambda x: losses.cross_entropy(x, targets).loss.sum())(logits)
    close(grad, jax.nn.softmax(logits) - jax.nn.one_hot(targets, 5))


def test_large_logits_stay_finite():
    actual = losses.cross_entropy(jnp.array([[[1e4, -1e4]]]), jnp.array([[1]]))
    assert float(actual.loss[0, 0]) == 2e4


def test_average_per_sequence_weighs_packed_segments_alike():
    batch = {
        "decoder_target_tokens": jnp.array([[5, 6, 7, 8, 9, 0], [5, 6, 0, 0, 0, 0]]),
        "decoder_loss_weights": jnp.array([[1, 1, 1, 0, 1, 0], [1, 1, 0, 0, 0, 0]]),
        "decoder_segment_ids": jnp.array([[1, 1, 1, 2, 2, 0], [1, 1, 0, 0, 0, 0]]),
    }
    weights = losses.loss_weights(batch, "AVERAGE_PER_SEQUENCE")
    close(weights, [[1 / 3, 1 / 3, 1 / 3, 0, 1, 0], [0.5, 0.5, 0, 0, 0, 0]])
    assert float(losses.normalizer(batch, "AVERAGE_PER_SEQUENCE")) == pytest.approx(3)
    rows = {name: batch[name] for name in ("decoder_target_tokens", "decoder_loss_weights")}
    close(losses.loss_weights(rows, "AVERAGE_PER_SEQUENCE").sum(-1), [1, 1])
    assert float(losses.normalizer(rows, "AVERAGE_PER_SEQUENCE")) == pytest.approx(2)


def test_real_target_tokens_are_counted_by_their_loss_weights_as_in_t5x():
    """A prefix language model: the inputs are among the targets, with weight 0."""
    batch = {"decoder_target_tokens": jnp.array([[5, 6, 7, 1, 0], [5, 6, 7, 8, 1]])}
    assert float(losses.normalizer(batch, "NUM_REAL_TARGET_TOKENS")) == 9
    batch["decoder_loss_weights"] = jnp.array([[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]])
    assert float(losses.normalizer(batch, "NUM_REAL_TARGET_TOKENS")) == 4
    batch["decoder_loss_weights"] = jnp.array([[0, 0, 0.25, 0.25, 0], [0, 0, 0, 0, 0.25]])
    assert float(losses.normalizer(batch, "NUM_REAL_TARGET_TOKENS")) == 0.75
    batch["decoder_loss_weights"] = jnp.zeros((2, 5))
    assert float(losses.normalizer(batch, "NUM_REAL_TARGET_TOKENS")) == 1


def test_a_batch_of_padding_has_no_loss_and_no_nan():
    batch = {"decoder_target_tokens": jnp.zeros((2, 3), jnp.int32)}
    for factor in losses.NORMALIZERS:
        assert float(losses.normalizer(batch, factor)) >= 1
        assert float(losses.loss_weights(batch, factor).sum()) == 0


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(loss_normalizing_factor="NUM_REAL_TARGET_TOKEN"), ["Did you mean 'NUM_REAL_TARGET_TOKENS'"]),
        (dict(loss_normalizing_factor=0), ["loss_normalizing_factor = 0", "positive"]),
        (dict(z_loss=-1.0), ["DecoderOnlyModel.z_loss = -1.0"]),
    ],
)
def test_slips_are_named(arguments, words):
    with pytest.raises(ConfigError) as error:
        decoder_only(**arguments)
    for word in words:
        assert word in str(error.value)
