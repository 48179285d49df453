"""One launch of a kernel that is written thread by thread, some of whose arrays are changed in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from inkling_jax.kernels import mlir as m
from inkling_jax.kernels.mlir import Value

_REF = plgpu.RefType()


def launch(
    name: str,
    run: Callable[[Value, dict[str, Value]], None],
    *,
    operands: dict[str, Array],
    changed: dict[str, Array],
    results: dict[str, jax.ShapeDtypeStruct],
    shared: dict[str, Any],
    programs: int,
    warpgroups: int = 1,
) -> dict[str, Array]:
    """The results and the changed arrays by name, of `programs` blocks that each do `run(its index, pointers by name)`.

    `changed` arrays are written where they lie, unless they are used afterwards as they were: then XLA copies them first.
    shared: a block's shared memory.
    """
    references = {key: jax.new_ref(array) for key, array in changed.items()}
    names = (*operands, *references, *results, *shared)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, *[_REF] * len(names)), return_type=())
    def program(_: Any, index: Any, *given: Value) -> tuple[()]:
        run(m.scalar(index), dict(zip(names, (mgpu.utils.memref_ptr(ref) for ref in given), strict=True)))
        return ()

    def body(*given: Any) -> None:
        program(lax.axis_index("program"), *given)

    kernel = plgpu.kernel(
        body,
        out_type=tuple(results.values()),
        scratch_types=list(shared.values()),
        grid=(programs,),
        grid_names=("program",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    made = kernel(*operands.values(), *references.values())
    return dict(zip(results, made, strict=True)) | {key: jax.freeze(ref) for key, ref in references.items()}
