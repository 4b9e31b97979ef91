"""Models: networks in Flax with logical axis names, and their losses and predictions.

protocol.py   what a model has to offer      network.py    the two networks, their stacks and layers
config.py     sizes and choices              losses.py     cross entropy, normaliser
layers.py     norm, projection, MLP          *_model.py    loss_fn, predict_batch
attention.py  heads, cache, masks, positions decoding.py   greedy, sampling, beam search
dropout.py    one key per example            head.py       output projection and loss in chunks
splash.py     attention by TPU kernels       remat.py      what the backward pass keeps
rotary.py     positions as rotations         rows.py       examples as rows, for kernels and chunks
scalable_network.py   T5X's scalable T5
attention_kernels.py, attention_blocks.py, softmax_kernel.py      the TPU kernels
"""

from perex_t5x.models.base_model import (
    BaseTransformerModel,
    DecoderParams,
    get_input_vocabulary,
    get_output_vocabulary,
)
from perex_t5x.models.config import T5Config, TransformerConfig
from perex_t5x.models.decoder_only_model import DecoderOnlyModel
from perex_t5x.models.encoder_decoder_model import EncoderDecoderModel
from perex_t5x.models.network import DecoderWrapper, Transformer, restack

__all__ = [
    "BaseTransformerModel",
    "DecoderOnlyModel",
    "DecoderParams",
    "DecoderWrapper",
    "EncoderDecoderModel",
    "T5Config",
    "Transformer",
    "TransformerConfig",
    "get_input_vocabulary",
    "get_output_vocabulary",
    "restack",
]
