"""Other layouts of the same model, recognised from names alone so that they are refused at once and by name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from inkling_jax.convert.header import show
from inkling_jax.errors import CheckpointError

_WANTED = "expected the published layout (names such as 'model.llm.embed.weight')"
# First match wins, so the packed formats come before the renaming that they are often combined with.
_LAYOUTS = (
    ("MLX affine 4-bit", re.compile(r"\.(scales|biases)$")),
    ("compressed-tensors", re.compile(r"\.(weight_packed|weight_global_scale|input_global_scale)$")),
    ("LoRA adapter", re.compile(r"\.lora_(A|B|embedding_A|embedding_B)(\.|$)")),
    ("Transformers (renamed)", re.compile(r"^(model\.)?language_model\.|^lm_head\.|(^|\.)embed_tokens\.|\.self_attn\.")),
)


def refuse_foreign_names(names: Iterable[str], where: Path) -> None:
    """Raise CheckpointError naming the layout if any tensor name belongs to one that this package does not read."""
    names = sorted(names)
    for layout, pattern in _LAYOUTS:
        for name in names:
            if pattern.search(name):
                raise CheckpointError(f"{where}: {layout} layout is not supported: found {show(name)}, {_WANTED}")


def refuse_foreign_directory(directory: Path) -> NoReturn:
    """Raise CheckpointError for a directory without readable safetensors, saying what it holds instead."""
    if (directory / "adapter_model.safetensors").exists():
        raise CheckpointError(f"{directory}: LoRA adapter layout is not supported: found adapter_model.safetensors, {_WANTED}")
    for layout, pattern in (("GGUF", "*.gguf"), ("PyTorch .bin", "*.bin"), ("PyTorch .bin", "*.bin.index.json")):
        found = sorted(directory.glob(pattern))
        if found:
            raise CheckpointError(f"{directory}: {layout} layout is not supported: found {found[0].name}, {_WANTED}")
    shards = sorted(directory.glob("*.safetensors"))
    if shards:
        raise CheckpointError(
            f"{directory}: {len(shards)} .safetensors files ({shards[0].name}, ...) but neither model.safetensors.index.json "
            "nor model.safetensors"
        )
    raise CheckpointError(f"{directory}: no checkpoint here: neither model.safetensors.index.json nor model.safetensors")
