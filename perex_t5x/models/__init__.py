"""Models: networks in Flax with logical axis names, and their losses and predictions.

config.py      sizes and choices            positions.py  rotary, relative bias
layers.py      norm, projection, MLP        masks.py      who sees whom
dropout.py     one key per example          attention.py  heads and their cache
stack.py       scan, remat                  decoder.py, encoder.py, network.py  the networks
losses.py      cross entropy, normaliser    *_model.py    loss_fn, predict_batch
decoding.py    greedy, sampling             beam.py       beam search
"""

from perex_t5x.models.base_model import BaseTransformerModel
from perex_t5x.models.config import T5Config
from perex_t5x.models.decoder_only_model import DecoderOnlyModel
from perex_t5x.models.encoder_decoder_model import EncoderDecoderModel
from perex_t5x.models.network import DecoderWrapper, Transformer
from perex_t5x.models.stack import restack

__all__ = [
    "BaseTransformerModel",
    "DecoderOnlyModel",
    "DecoderWrapper",
    "EncoderDecoderModel",
    "T5Config",
    "Transformer",
    "restack",
]
