"""Checkpoints in the formats of other programs: what is in them, read leaf by leaf, and written.

    contents = open_checkpoint(path)      names, shapes and dtypes; no array is read
    contents.leaves["target/decoder/decoder_norm/scale"].read()

| format | |
|---|---|
| 'legacy' | T5X's first: a msgpack file `checkpoint`, versions 2 and 3, and a zarr folder for each large leaf |
| 'orbax' | T5X's second, and ours: `checkpoint_<step>/state/` |
| 'safetensors' | one flat file, or several with an index; with Hugging Face's names, or with T5X's |

Names are T5X's throughout: `target/...` for parameters, `state/step`, `state/param_states/...`.
"""

from perex_t5x.checkpoint_formats.leaves import Contents, Leaf
from perex_t5x.checkpoint_formats.opening import open_checkpoint

__all__ = ["Contents", "Leaf", "open_checkpoint"]
