"""The second launch of decode: combine the parts of items that several programs worked on, and zero the tokens of no row.

Launched as a programmatic dependent of decode.py, so that only its own work adds to the time, not its start.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from inkling_jax.kernels.paged_attention.decode_shape import DecodeShape
from inkling_jax.kernels.paged_attention.mosaic import NEVER, WGMMA, int32
from inkling_jax.kernels.paged_attention.plan import DecodePlan

AT_ONCE = 16  # parts read together, so that their latencies overlap


def merge(
    out: Float[Array, "T N H"],
    partial: Float[Array, "2 W M H"],
    weight: Float[Array, "2 W M"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    plan: DecodePlan,
    shape: DecodeShape,
    interpret: Any = None,
) -> Float[Array, "T N H"]:
    """`out`, updated in place, with every token of every row in it. Parts are as decode() returns them."""
    tokens, heads, width = out.shape
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=1) if width == 128 else WGMMA.reduce(0)
    zero_heads = -(-heads // shape.rows)

    def body(partial_ref, weight_ref, start_ref, count_ref, row_ref, head_ref, followers_ref, idle_ref, out_ref):
        program, r = lax.axis_index("program"), lax.axis_index("r")
        if shape.overlap_merge:
            plgpu.griddepcontrol_wait()
        followers = followers_ref[program]

        @pl.when(followers > 0)
        def _():
            row = row_ref[program]
            token = lax.div(r, int32(shape.share))

            def part(i: Array) -> tuple[Array, Array]:
                which = jnp.where(i == 0, 1, 0)
                place = program - 1 + jnp.minimum(i, followers)
                log_sum = jnp.where(i <= followers, weight_ref[which, place, r], NEVER)
                value = plgpu.load(partial_ref.at[which, place, r], layout=layout, optimized=False)
                return log_sum, value

            def combine(chunk: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
                top, total, summed = carry
                parts = [part(chunk * AT_ONCE + i) for i in range(AT_ONCE)]
                new_top = top
                for log_sum, _ in parts:
                    new_top = jnp.maximum(new_top, log_sum)
                shrink = jnp.exp2(top - new_top)
                total, summed = total * shrink, summed * shrink
                for log_sum, value in parts:
                    factor = jnp.exp2(log_sum - new_top)
                    total, summed = total + factor, summed + value * factor
                return new_top, total, summed

            zero = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)
            chunks = lax.div(followers + AT_ONCE, int32(AT_ONCE))
            _, total, summed = lax.fori_loop(0, chunks, combine, (jnp.float32(NEVER), jnp.float32(0), zero))

            @pl.when(token < count_ref[row])
            def _():
                head = head_ref[program] * shape.share + lax.rem(r, int32(shape.share))
                out_ref.at[start_ref[row] + token, head][...] = (summed * (1 / total)).astype(out_ref.dtype)

        for turn in range(-(-tokens // shape.programs)):
            token = turn * shape.programs + program

            @pl.when(token < tokens)
            def _(token: Array = token):
                @pl.when(idle_ref[jnp.minimum(token, tokens - 1)] > 0)
                def _():
                    for i in range(zero_heads):
                        head = r * zero_heads + i

                        @pl.when(head < heads)
                        def _(head: Array = head):
                            zero = plgpu.layout_cast(jnp.zeros((width,), out_ref.dtype), layout)
                            out_ref.at[token, head][...] = zero

    body.__name__ = "attention_merge"
    target = jax.new_ref(out)
    plgpu.kernel(
        body,
        out_type=(),
        grid=(shape.programs, shape.rows),
        grid_names=("program", "r"),
        num_threads=1,
        thread_name="group",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(partial, weight, start, count, plan.row, plan.head, plan.followers, plan.idle, target)
    return jax.freeze(target)
