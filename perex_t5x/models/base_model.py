"""What both language models share: loss, metrics, evaluation, scoring, prediction.

A model joins a network, a vocabulary and an optimizer; `perex_t5x.models.protocol` has what the trainer asks of it.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from flax import linen as nn

from perex_t5x import arguments, gin_utils
from perex_t5x.arguments import PositiveInt
from perex_t5x.errors import ConfigError
from perex_t5x.models import decoding, head, losses, protocol, remat, splash
from perex_t5x.models.config import T5Config

Batch = Mapping[str, jax.Array]
Params = Any
Sums = dict[str, jax.Array]
DecodeFn = Callable[..., tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class DecoderParams:
    """What a model's predictions are unless a call says otherwise."""

    return_all_decodes: bool = False
    num_decodes: PositiveInt = 1

    def __post_init__(self) -> None:
        arguments.check_fields(self)


class BaseTransformerModel(abc.ABC):
    """Loss and predictions of a network.

    The loss is L = (1 / W) Σ_i ℓ_i, with ℓ_i the weighted sum of row i's token losses and W the normaliser of the
    *global* batch: rows may be computed together, in microbatches or one by one, and the gradients add up to the
    same. Code that splits a batch computes W of the whole with `loss_normalizer` and passes it to each `loss_fn`.

    Args:
      module: the network.
      optimizer_def: an optax transformation or a function that makes one; the model only carries it.
      decode_fn: makes predictions: one of `perex_t5x.models.decoding`, or a function like those.
      feature_converter_cls: makes batches of a task's features, in place of the model's own `FEATURE_CONVERTER_CLS`.
      loss_normalizing_factor: what W is, see `perex_t5x.models.losses.normalizer`.
      z_loss: coefficient of (log Z)², which keeps the logits from drifting; T5 uses 1e-4.
      label_smoothing: probability given away from the target, uniformly.
    """

    # Features of a batch that the network needs, and those that it takes where they are present.
    REQUIRED_FEATURES: tuple[str, ...]
    OPTIONAL_FEATURES: tuple[str, ...]
    input_vocabulary: Any
    output_vocabulary: Any  # of what the model predicts

    def __init__(
        self,
        module: nn.Module,
        optimizer_def: Any,
        loss_normalizing_factor: losses.LossNormalizingFactor = None,
        z_loss: losses.ZLoss = 0.0,
        label_smoothing: losses.Smoothing = 0.0,
        decode_fn: DecodeFn = decoding.temperature_sample,
        feature_converter_cls: type | None = None,
        default_decoder_params: DecoderParams | None = None,
    ):
        self.module = module
        self.optimizer_def = optimizer_def
        self.decode_fn = gin_utils.configured(decode_fn)
        for name in sorted({"num_decodes", "eos_id"} & gin_utils.bound_names(decode_fn)):
            logging.warning(
                "%s.%s is not used, since the model gives its own: %s.",
                getattr(decode_fn, "__name__", "decode_fn"),
                name,
                "bind predict_batch_with_aux.num_decodes" if name == "num_decodes" else "its vocabulary's",
            )
        self.default_decoder_params = default_decoder_params or DecoderParams()
        if feature_converter_cls is not None:
            self.FEATURE_CONVERTER_CLS = feature_converter_cls
        self.z_loss = z_loss
        self.label_smoothing = label_smoothing
        losses.check_loss_arguments(type(self).__name__, loss_normalizing_factor, z_loss, label_smoothing)
        self.loss_normalizing_factor = loss_normalizing_factor

    @classmethod
    @abc.abstractmethod
    def FEATURE_CONVERTER_CLS(cls) -> type:  # noqa: N802 (T5X's name)
        """SeqIO's feature converter class; imported when asked for, since SeqIO loads TensorFlow."""

    @abc.abstractmethod
    def _start_decoding(
        self, params: Params, batch: Batch, max_decode_len: int | None, **options: Any
    ) -> decoding.Start:
        """Runs the prompt through the network and returns the state that decoding starts from."""

    @abc.abstractmethod
    def flops_per_step(self, batch_size: int, feature_lengths: Mapping[str, int]) -> float:
        """FLOPs of the model in one forward and backward pass over a batch: products only, nothing recomputed."""

    def _network_inputs(self, batch: Batch) -> dict[str, Any]:
        """The network's arguments among the batch's features."""
        required = {name: batch[name] for name in self.REQUIRED_FEATURES}
        return required | {name: batch.get(name) for name in self.OPTIONAL_FEATURES}

    @property
    def gathers_parameters(self) -> bool:
        """Whether the network gathers its parameters where it uses them (`perex_t5x.models.layers.parameter`).

        If not, the trainer gathers all of them before the network runs where they are sharded over data.
        """
        return getattr(self.module, "gathers_parameters", False)

    @property
    def config(self) -> T5Config:
        return self.module.config

    def sharded_dimensions(self) -> dict[str, int]:
        """Sizes that the mesh's `model` axis must divide."""
        return {name: getattr(self.config, name) for name in ("num_heads", "mlp_dim", "vocab_size")}

    def remat_choices(self) -> dict[str, BaseTransformerModel]:
        """Policy -> this model with it, the one with the least recomputation first; empty unless the policy is 'auto'."""
        config = getattr(self.module, "config", None)
        if config is None or getattr(config, "remat_policy", None) != "auto":
            return {}
        choices = {}
        for policy in remat.LADDER:
            choices[policy] = copy.copy(self)
            choices[policy].module = self.module.clone(config=dataclasses.replace(config, remat_policy=policy))
        return choices

    def describe_computation(self, batch_spec: Mapping[str, jax.ShapeDtypeStruct]) -> str:
        """Which attention is used, and why."""
        if not isinstance(getattr(self.module, "config", None), T5Config):
            return ""  # a user's network
        rows_and_length = batch_spec["decoder_input_tokens"].shape
        return splash.description(self.config, *rows_and_length, **self._attention_features(batch_spec))

    def _attention_features(self, batch: Mapping[str, Any]) -> dict[str, bool]:
        """What decides which attention can be used; see `perex_t5x.models.splash.unsupported_reason`."""
        return {}

    def get_initial_variables(
        self, rng: jax.Array, input_shapes: Mapping[str, tuple[int, ...]], input_types: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns {'params': ...}, each leaf boxed with its logical axis names (`nn.LogicallyPartitioned`).

        Args:
          rng: a typed key.
          input_shapes: shape of every feature of a batch, [B, T].
          input_types: dtype of each; int32 where not given.
        """
        missing = [name for name in self.REQUIRED_FEATURES if name not in input_shapes]
        if missing:
            raise ConfigError(
                f"{type(self).__name__}: the batch has no {missing[0]!r}; it has {sorted(input_shapes)}. The feature "
                f"converter of this model is {protocol.feature_converter_cls(self).__name__}."
            )
        types = input_types or {}
        batch = {name: jnp.ones(shape, types.get(name, jnp.int32)) for name, shape in input_shapes.items()}
        return {"params": self.module.init(rng, **self._network_inputs(batch))["params"]}

    def compute_logits(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> jax.Array:
        """Returns logits, [B, T, vocab_size]; `dropout_rng` as in `loss_fn`."""
        return self._apply(params, batch, dropout_rng)

    def _apply(self, params: Params, batch: Batch, dropout_rng: jax.Array | None, **kwargs: Any) -> Any:
        rows = batch["decoder_input_tokens"].shape[0]
        keys_B = None if dropout_rng is None else _keys_per_row(dropout_rng, rows)
        return self.module.apply({"params": params}, **self._network_inputs(batch), dropout_keys_B=keys_B, **kwargs)

    def _objective(
        self,
        params: Params,
        batch: Batch,
        dropout_rng: jax.Array | None,
        weights_BxT: jax.Array,
        normalizer: jax.Array | float,
    ) -> tuple[jax.Array, losses.TokenLosses]:
        """Σ weight · loss / normalizer, and each token's losses."""
        targets_BxT = batch["decoder_target_tokens"]
        if self._computes_own_logits or not head.is_worthwhile(self.config, targets_BxT.shape[1]):
            logits_BxTxV = self.compute_logits(params, batch, dropout_rng)
            per_token = losses.cross_entropy(logits_BxTxV, targets_BxT, self.z_loss, self.label_smoothing)
            return jnp.sum(per_token.loss * weights_BxT) / normalizer, per_token

        def loss(x_BxTxD: jax.Array, kernel_DxV: jax.Array) -> tuple[jax.Array, losses.TokenLosses]:
            how = {"config": self.config, "z_loss": self.z_loss, "label_smoothing": self.label_smoothing}
            return head.cross_entropy(x_BxTxD, kernel_DxV, targets_BxT, weights_BxT, normalizer, **how)

        return self._apply(params, batch, dropout_rng, head=loss)

    @property
    def _computes_own_logits(self) -> bool:
        """Whether logits may be other than x W: in a subclass that overrides them, or a network that is not ours.

        A network says `takes_head = True` in its own class; a subclass, which may change the logits, must say so again.
        """
        overridden = type(self).compute_logits is not BaseTransformerModel.compute_logits
        return overridden or not vars(type(self.module)).get("takes_head", False)

    def loss_normalizer(self, batch: Batch) -> jax.Array:
        """W of this batch, a float32 scalar: give it the global batch."""
        return losses.normalizer(batch, self.loss_normalizing_factor)

    def loss_fn(
        self,
        params: Params,
        batch: Batch,
        dropout_rng: jax.Array | None = None,
        normalizer: jax.Array | float | None = None,
    ) -> tuple[jax.Array, Sums]:
        """Returns (Σ_i ℓ_i / W, sums) over the rows given.

        Args:
          params: the network's parameters.
          batch: features, [B, T] each.
          dropout_rng: None for no dropout, else one typed key per row, [B] (a single key where B is 1).
          normalizer: W; None means this batch is the global batch.

        Returns:
          The loss, and plain sums over the rows, float32 scalars: 'loss' (not divided by W, z-loss included), 'z_loss'
          (part of it), 'correct' (weight of the tokens predicted right), 'weights' (sum of loss weights), 'tokens'
          (targets that are not padding), 'all_tokens' (B · T) and 'examples' (B).
        """
        targets_BxT = batch["decoder_target_tokens"]
        weights_BxT = losses.loss_weights(batch, self.loss_normalizing_factor)
        raw_weights_BxT = losses.raw_loss_weights(batch)
        if normalizer is None:
            normalizer = self.loss_normalizer(batch)
        objective, per_token = self._objective(params, batch, dropout_rng, weights_BxT, normalizer)
        sums = {
            "loss": jnp.sum(per_token.loss * weights_BxT),
            "z_loss": jnp.sum(per_token.z_loss * weights_BxT),
            "correct": jnp.sum(jnp.where(per_token.correct, raw_weights_BxT, 0.0)),
            "weights": jnp.sum(raw_weights_BxT),
            "tokens": jnp.sum(targets_BxT > 0),
            "all_tokens": jnp.float32(targets_BxT.size),
            "examples": jnp.float32(targets_BxT.shape[0]),
        }
        sums = {name: jax.lax.stop_gradient(value).astype(jnp.float32) for name, value in sums.items()}
        return objective, sums

    # Metrics of language models, under T5X's names.
    loss_metric = "loss_per_nonpadding_target_token"
    throughput: Mapping[str, str] = MappingProxyType({"target_tokens": "all_tokens"})

    def summarize_metrics(self, sums: Mapping[str, float], objective: float) -> dict[str, float]:
        """See `perex_t5x.models.protocol.SummarizesMetrics`.

        `loss` is the objective that was optimised (divided by W); `loss_per_nonpadding_target_token` is Σ loss / Σ loss
        weights, whatever W is: of a prefix language model, per token of the continuation.
        """

        def ratio(numerator: float, denominator: float) -> float:
            return numerator / denominator if denominator else 0.0

        loss, z_loss, tokens, all_tokens = (sums[name] for name in ("loss", "z_loss", "tokens", "all_tokens"))
        # The objective is Σ loss / W; its z-loss part is in the same proportion.
        scale = ratio(objective, loss)
        return {
            "accuracy": ratio(sums["correct"], sums["weights"]),
            "loss": objective,
            "cross_ent_loss": (loss - z_loss) * scale,
            "z_loss": z_loss * scale,
            "loss_per_nonpadding_target_token": ratio(loss, sums["weights"]),
            "loss_per_all_target_tokens": ratio(loss, all_tokens),
            "cross_ent_loss_per_all_target_tokens": ratio(loss - z_loss, all_tokens),
            "z_loss_per_all_target_tokens": ratio(z_loss, all_tokens),
            "nonpadding_fraction": ratio(tokens, all_tokens),
        }

    def eval_fn(self, params: Params, batch: Batch) -> tuple[jax.Array, Sums]:
        """`loss_fn` without dropout."""
        return self.loss_fn(params, batch)

    def score_batch(self, params: Params, batch: Batch) -> jax.Array:
        """Log likelihood of each row's targets under their loss weights, [B]."""
        weights_BxT = losses.raw_loss_weights(batch)
        _, per_token = self._objective(params, batch, None, weights_BxT, 1.0)
        return jnp.sum(per_token.log_likelihood * weights_BxT, axis=-1)

    def predict_batch(self, params: Params, batch: Batch, rng: jax.Array | None = None, **kwargs) -> jax.Array:
        """The tokens of `predict_batch_with_aux`."""
        return self.predict_batch_with_aux(params, batch, rng, **kwargs)[0]

    def predict_batch_with_aux(
        self,
        params: Params,
        batch: Batch,
        rng: jax.Array | None = None,
        *,
        decoder_params: Mapping[str, Any] | None = None,
        return_all_decodes: bool | None = None,
        num_decodes: PositiveInt | None = None,
        max_decode_len: PositiveInt | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Continues each row by the model's `decode_fn`.

        Args:
          params: the network's parameters.
          batch: features of the prompts (see the model's class).
          rng: where the function draws at random: one typed key (row b then uses fold_in(rng, b)) or one per row, [B].
          decoder_params: further arguments of the function, such as {'temperature': 0.5, 'topk': 0}.
          return_all_decodes: all `num_decodes`, best last, instead of the best; None: the model's `default_decoder_params`.
          num_decodes: beams, or samples, per row; None as above.
          max_decode_len: most new tokens per row; None: as many as the row has room for.

        Returns:
          New tokens after each prompt, [B, L] ([B, num_decodes, L] if all), with EOS, then 0; and {'scores': those of the
          function}.
        """
        return self._predict(params, batch, rng, decoder_params, return_all_decodes, num_decodes, max_decode_len)

    def _predict(
        self,
        params: Params,
        batch: Batch,
        rng: jax.Array | None,
        decoder_params: Mapping[str, Any] | None,
        return_all_decodes: bool | None,
        num_decodes: int | None,
        max_decode_len: int | None,
        **options: Any,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """`predict_batch_with_aux`; `options` are those of a class's `_start_decoding`."""
        given = {"return_all_decodes": return_all_decodes, "num_decodes": num_decodes, "max_decode_len": max_decode_len}
        hints = arguments.hints(BaseTransformerModel.predict_batch_with_aux)
        arguments.check("predict_batch_with_aux", hints, given | {"decoder_params": decoder_params})
        default = self.default_decoder_params
        decoder_params = {"eos_id": getattr(self.output_vocabulary, "eos_id", 1) or 1, **(decoder_params or {})}
        decoding.check_parameters(self.decode_fn, decoder_params)
        if rng is not None:
            if decoder_params.get("decode_rng") is not None:
                raise ConfigError("decoder_params has a 'decode_rng', and keys are given too: leave it out.")
            decoder_params["decode_rng"] = rng
        tokens_BxNxL, scores_BxN = self.decode_fn(
            self._start_decoding(params, batch, max_decode_len, **options),
            num_decodes=default.num_decodes if num_decodes is None else num_decodes,
            **decoder_params,
        )
        if default.return_all_decodes if return_all_decodes is None else return_all_decodes:
            return tokens_BxNxL, {"scores": scores_BxN}
        return tokens_BxNxL[:, -1], {"scores": scores_BxN[:, -1]}

    @property
    def _cache_batch_axis(self) -> int:
        return 1 if self.config.scan_layers else 0


def get_input_vocabulary(model: BaseTransformerModel) -> Any:
    """A model's vocabulary of inputs, to be bound to a `seqio.Feature`."""
    return model.input_vocabulary


def get_output_vocabulary(model: BaseTransformerModel) -> Any:
    """A model's vocabulary of what it predicts, to be bound to a `seqio.Feature`."""
    return model.output_vocabulary


def _keys_per_row(rng: jax.Array, rows: int) -> jax.Array:
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        raise ValueError(f"dropout_rng must be typed keys (jax.random.key), one per row; got {rng.dtype} {rng.shape}.")
    if rng.shape == () and rows == 1:
        return rng[None]
    if rng.shape != (rows,):
        raise ValueError(
            f"dropout_rng has shape {rng.shape}, but the batch has {rows} rows: give one key per row (fold_in of the "
            "row's index in the global batch), so that no mask depends on how the batch is split."
        )
    return rng
