"""What a step cannot do without: the bytes that it must read and the operations that it must perform, on one rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from inkling_jax.cache.paged import CacheShape, layer_arrays
from inkling_jax.config import TextConfig

_MULTIPLIED = ("qkvr_proj", "o_proj", "w13", "w2", "router.weight")  # matrices that every token meets, besides routed experts


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes by kind and operations of a step. `experts` is how many routed experts a sparse layer reads, on average."""

    weight_bytes: float  # all that every token needs, the head and the embedding's rows
    expert_bytes: float  # routed experts that are hit
    kv_bytes: float
    conv_bytes: float  # what short convolutions remember
    experts: float
    flops: float

    @property
    def bytes(self) -> float:
        """Bytes of all kinds."""
        return self.weight_bytes + self.expert_bytes + self.kv_bytes + self.conv_bytes


def step_traffic(
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    config: TextConfig,
    sizes: Mapping[str, int],
    *,
    rows: int,
    queries: int,
    contexts: Sequence[int],
    fp8: bool = False,
) -> Traffic:
    """Least traffic of a step of `rows` sequences with `queries` tokens each, on a rank that holds `leaves` (by path).

    `contexts` are the lengths at which the step is taken; for several of them the mean. Queries are the last tokens of a context.
    `fp8`: keys and values are, with their scales.
    Routed experts that are hit are the expected number when each token chooses its experts at random: random weights do so.
    """
    tokens = rows * queries
    held = config.num_experts // sizes.get("expert", 1)
    hit = expected_experts(held, config.num_experts, config.num_experts_per_token, tokens)
    weight_bytes = expert_bytes = flops = 0.0
    for path, leaf in leaves.items():
        elements = math.prod(leaf.shape)
        if path == "embed":
            weight_bytes += tokens * leaf.shape[1] * leaf.dtype.itemsize
        elif ".experts." in path:
            expert_bytes += elements * leaf.dtype.itemsize * hit / held
            flops += 2 * _weights(path, elements) / held * tokens * config.num_experts_per_token * held / config.num_experts
        else:
            weight_bytes += elements * leaf.dtype.itemsize
            flops += 2 * elements * (rows if path == "unembed" else tokens if path.endswith(_MULTIPLIED) else 0)
    kv_bytes, conv_bytes, attention_flops = _cache_traffic(
        config, sizes, leaves["norm.weight"].dtype, rows, queries, contexts, fp8
    )
    return Traffic(weight_bytes, expert_bytes, kv_bytes, conv_bytes, hit, flops + attention_flops)


def expected_experts(held: int, experts: int, chosen: int, tokens: int) -> float:
    """Expected number of `held` experts that are hit when each of `tokens` tokens chooses `chosen` of `experts` at random."""
    return held * (1 - (1 - chosen / experts) ** tokens)


def _weights(path: str, elements: int) -> int:
    """Numbers that an expert parameter multiplies with: two a byte of packed codes, none for scales."""
    name = path.rpartition(".")[2]
    return 2 * elements if name == "values" else elements if name in ("w13", "w2") else 0


def _cache_traffic(
    config: TextConfig,
    sizes: Mapping[str, int],
    dtype: jnp.dtype,
    rows: int,
    queries: int,
    contexts: Sequence[int],
    fp8: bool,
) -> tuple[float, float, float]:
    """Bytes of keys and values, bytes of convolution state, and the operations of attention."""
    one = CacheShape(slots=0, page_size=1, global_pages=1, local_pages=1, max_context=1, max_query=1, fp8=fp8)
    kv_bytes = conv_bytes = flops = 0.0
    for layer in range(config.num_layers):
        attention = config.attention(layer)
        for name, stored in layer_arrays(config, one, layer, dtype).items():
            local = [array.local(f"cache of layer {layer}, {name}", sizes) for array in jax.tree.leaves(stored)]
            size = sum(array.dtype.itemsize * math.prod(array.shape) for array in local)
            if name.endswith("_pages"):
                kv_bytes += size * rows * _mean(min(length, (attention.window or length) + queries - 1) for length in contexts)
            else:
                conv_bytes += size * rows
        pairs = _mean(
            sum(min(position + 1, attention.window or position + 1) for position in range(length - queries, length))
            for length in contexts
        )
        heads = attention.num_heads // (sizes.get("tensor", 1) * sizes.get("expert", 1))
        flops += 4 * heads * attention.head_dim * rows * pairs
    return kv_bytes, conv_bytes, flops


def _mean(values) -> float:
    items = list(values)
    return sum(items) / len(items)
