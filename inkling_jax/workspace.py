"""How much device memory a step takes on its way, from shapes alone: what its largest part holds, beside the residual stream.

The sizes of loops come from the kernels themselves. A test holds the sums against what compiled programs report.
"""

from __future__ import annotations

from collections.abc import Mapping

from inkling_jax.config import AttentionConfig, TextConfig
from inkling_jax.kernels.expert_matmul.reference import tile_sizes, tiles_at_once
from inkling_jax.kernels.paged_attention.reference import block_sizes

F32 = 4
NVFP4_BYTES = 0.5625  # of one packed value: half a byte, and a sixteenth of a byte of block scale


def step_workspace(
    config: TextConfig,
    sizes: Mapping[str, int],
    itemsize: int,
    *,
    tokens: int,
    rows: int,
    context: int,
    page_size: int,
    logits: int,
    packed: bool,
    fp8: bool = False,
    replicas: int = 1,
) -> int:
    """Bytes on one rank of a mesh with axis `sizes`, for `tokens` query tokens of `rows` sequences of up to `context` tokens.

    `itemsize`: bytes of an activation. `logits`: tokens whose logits are computed. `packed`: some experts are NVFP4. `fp8`: keys
    and values are. `replicas`: over so many experts are spread, each with as many tokens. For the reference kernels; those for
    Hopper take less. Weights, cache and the step's inputs are not counted.
    """
    ways = sizes.get("tensor", 1) * sizes.get("expert", 1)
    width = config.hidden_size
    residual = tokens * width * (itemsize + 2 * F32)
    attention = max(
        _attention(geometry, ways, itemsize, config.rel_dim, tokens, rows, context, page_size, fp8)
        for geometry in (config.global_attention, config.local_attention)
    )
    dense = tokens * config.dense_width // ways * (2 * F32 + F32 + itemsize) if any(config.dense_layers) else 0
    sparse = 0 if all(config.dense_layers) else _experts(config, sizes, itemsize, tokens, packed, replicas)
    head = logits * config.vocab_size * 2 * F32 + min(logits, rows) * config.vocab_size * 2 * F32  # the latter to sample from
    return int(residual + max(attention, dense, sparse, head))


def _attention(
    shape: AttentionConfig,
    ways: int,
    itemsize: int,
    rel_dim: int,
    tokens: int,
    rows: int,
    context: int,
    page_size: int,
    fp8: bool,
) -> int:
    """Keys and values of a block, in fp8 their codes too, biases, scores and weights, running sums, and all blocks' answers."""
    heads, kv_heads, width = shape.num_heads // ways, max(1, shape.num_kv_heads // ways), shape.head_dim
    longest = 1 if tokens == rows else tokens
    blocks = block_sizes(tokens, heads, rows, page_size, shape.window, longest, context)
    queries, keys = blocks.group * blocks.queries, blocks.pages * page_size
    gathered = keys * (2 * blocks.group * kv_heads * width * (itemsize + fp8) + itemsize * queries * rel_dim)
    scores = queries * heads * keys * (2 * F32 + itemsize)
    sums = 3 * queries * heads * width * F32
    answers = (blocks.items * blocks.queries + 2 * tokens) * heads * width * itemsize
    return gathered + scores + sums + answers


def _experts(config: TextConfig, sizes: Mapping[str, int], itemsize: int, tokens: int, packed: bool, replicas: int) -> float:
    """The answers of all tiles, and beside them the weights of a few or the answers in token order."""
    held, hidden = config.num_experts // sizes.get("expert", 1) // replicas, config.expert_width // sizes.get("tensor", 1)
    width, chosen = config.hidden_size, tokens * replicas * config.num_experts_per_token
    rows, count = tile_sizes(chosen, held)
    group = tiles_at_once(count, 2 * hidden * width)
    weights = group * 3 * hidden * width * (itemsize + (NVFP4_BYTES if packed else 0))
    products = group * rows * (width * itemsize + hidden * (2 * F32 + itemsize))
    answers = -(-count // group) * group * rows * width * itemsize
    exchanged = tokens * replicas * width * (itemsize + F32) if replicas > 1 else 0
    return exchanged + answers + max(weights + products, chosen * width * F32)
