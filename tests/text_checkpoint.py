"""A checkpoint that reads and writes text and compiles in seconds: three layers, one of each kind, and a tokenizer of bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from byte_tokenizer import write_byte_tokenizer
from checkpoint_files import micro_config

from inkling_jax.convert.write import write_checkpoint

USABLE = 300  # ids: 256 bytes, 26 pairs of letters, 18 control tokens


def write_text_checkpoint(directory: Path, nvfp4: bool = True, **text: Any) -> Path:
    """Layer 0 dense and local, layer 1 global with experts in BF16, layer 2 local with packed experts; `text` overrides."""
    directory.mkdir()
    ids = write_byte_tokenizer(directory, USABLE)
    layers = {"num_hidden_layers": 3, "local_layer_ids": [0, 2], "dense_mlp_idx": 1}
    shape = micro_config(**(layers | {"vocab_size": 320, "unpadded_vocab_size": USABLE} | text))
    config = dataclasses.replace(shape, **ids)
    write_checkpoint(directory, config, seed=4, nvfp4=nvfp4)
    return directory
