"""Weights in the forms of the Hopper kernels: whether a model can have them so, and the change, one weight at a time."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from inkling_jax.config import TextConfig
from inkling_jax.errors import CheckpointError, InputError
from inkling_jax.kernels.expert_matmul.nvfp4 import Nvfp4
from inkling_jax.kernels.expert_matmul.pack import arrange, check
from inkling_jax.kernels.paged_attention import prepare_bias
from inkling_jax.layers.experts import W2_AXES, W13_AXES
from inkling_jax.layers.mlp import DenseMLP
from inkling_jax.model import Inkling
from inkling_jax.sharding.rules import RULES, Axes, partition_spec

KERNELS = ("auto", "reference", "sm90")
HOPPER = ("H100", "H200", "GH200", "H800", "H20")
logger = logging.getLogger(__name__)
_AXES = {"w13": W13_AXES, "w2": W2_AXES}
_SHARED: dict[str, tuple[Axes, Axes]] = {  # axes of a shared weight as it is loaded, and of its words
    "w13": ((None, None, "ffn", None), (None, "ffn", None, None, None)),
    "w2": ((None, None, "ffn"), (None, None, "ffn", None, None)),
}


def choose_kernels(
    kernels: str,
    config: TextConfig,
    dtype: jnp.dtype,
    device_kind: str,
    sizes: Mapping[str, int],
    page_size: int,
    fp8: bool = False,
) -> bool:
    """Whether experts and attention run on the kernels for Hopper: "sm90" yes, "reference" no, "auto" where they can.

    `fp8`: keys and values are. What was chosen, and why, is logged. What is asked for by name never falls back: InputError says
    why it cannot run here.
    """
    if kernels not in KERNELS:
        raise InputError(f"kernels={kernels!r}: expected one of {', '.join(KERNELS)}")
    refused = kernels_refused(config, dtype, device_kind, sizes, page_size, fp8)
    if kernels == "sm90" and refused is not None:
        raise InputError(f"kernels='sm90': {refused}")
    if kernels == "auto" and refused is None:
        logger.info("kernels: those for Hopper (kernels='reference' for plain XLA)")
    elif kernels == "auto":
        logger.info("kernels: the reference path (plain XLA): %s", refused)
    return kernels != "reference" and refused is None


def kernels_refused(
    config: TextConfig,
    dtype: jnp.dtype,
    device_kind: str,
    sizes: Mapping[str, int],
    page_size: int,
    fp8: bool = False,
) -> str | None:
    """Why the kernels cannot run this model on a mesh of such devices with such axis sizes; None where they can."""
    if not any(kind in device_kind for kind in HOPPER):
        return f"{device_kind} is not a Hopper GPU"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"activations are {jnp.dtype(dtype).name}, not bfloat16"
    from inkling_jax.kernels.expert_matmul.sm90 import supported
    from inkling_jax.kernels.paged_attention.sm90 import unsupported
    from inkling_jax.kernels.residual import sm90 as residual

    for kind, axes in (("experts", RULES["expert_ffn"]), ("shared experts", RULES["ffn"])):
        hidden = config.expert_width
        for axis in axes:
            hidden //= sizes.get(axis, 1)
        if not supported(config.hidden_size, hidden):
            return f"{kind} of {hidden} channels a device for a width of {config.hidden_size} are not whole blocks"
    reason = residual.unsupported(config.hidden_size, config.conv_width)
    if reason is not None:
        return reason
    for shape in (config.global_attention, config.local_attention):
        reason = unsupported(page_size, shape.head_dim, config.rel_dim, shape.num_heads // shape.num_kv_heads, fp8)
        if reason is not None:
            return reason
    return None


def use_kernels(model: Inkling, deterministic: bool = False) -> Inkling:
    """`model`, its expert weights and its relative biases declared in the forms of the kernels, which with that it uses.

    `deterministic`: attention divides its work so that no sequence's results depend on which others there are.
    """
    for layer in model.layers:
        layer.use_kernels(deterministic)
    return model


def quantize_inputs(model: Inkling) -> None:
    """Have the packed experts of `model` round their inputs to NVFP4, by scales that are parameters from now on."""
    for layer in model.layers:
        if not isinstance(layer.mlp, DenseMLP):
            layer.mlp.experts.quantize_inputs()


def measure_inputs(model: Inkling) -> None:
    """Have a trace of `model` tell the largest inputs of its experts, whose weights must not be packed."""
    for layer in model.layers:
        if not isinstance(layer.mlp, DenseMLP):
            layer.mlp.measure_inputs = True


def spread_experts(model: Inkling, dtype: jnp.dtype) -> Inkling:
    """`model`, its routed experts declared as spread over all replicas of a mesh."""
    for layer in model.layers:
        if not isinstance(layer.mlp, DenseMLP):
            layer.mlp.spread_experts(dtype)
    return model


def repack(parameters: Iterable[tuple[str, jax.Array]], mesh: Mesh | None = None) -> Iterator[tuple[str, jax.Array]]:
    """The parameters of a model as those of `use_kernels` of it, each weight as soon as all its parts have come.

    What experts came from is deleted, so memory peaks at one weight more. `mesh`: over which they are spread.
    Raises CheckpointError, naming the parameter, for block scales that are NaN or negative.
    """
    parts: dict[str, dict[str, jax.Array]] = {}
    for path, array in parameters:
        weight, _, part = path.rpartition(".")
        if weight.endswith(".experts") and part in _AXES:
            yield from _repacked(path, array, mesh)
        elif weight.endswith(".shared") and part in _SHARED:
            yield path, _repacked_shared(path, array, mesh)
        elif weight.rpartition(".")[2] in _AXES and ".experts." in weight:
            found = parts.setdefault(weight, {})
            found[part] = array
            if len(found) == len(Nvfp4._fields):
                yield from _repacked(weight, Nvfp4(**parts.pop(weight)), mesh)
        elif path.endswith(".attn.rel_bias"):
            tables = jax.jit(prepare_bias, out_shardings=array.sharding)(array)
            yield from ((f"{path}.{field.name}", getattr(tables, field.name)) for field in dataclasses.fields(tables))
        else:
            yield path, array


def _repacked(path: str, weight: Nvfp4 | jax.Array, mesh: Mesh | None) -> Iterator[tuple[str, jax.Array]]:
    check(weight, path)
    axes = _AXES[path.rpartition(".")[2]]
    scale_spec = partition_spec(axes[:-2])
    pack = arrange
    if mesh is not None:
        whole = partition_spec(axes)
        # the specs of a weight have its form
        given = Nvfp4(whole, whole, scale_spec) if isinstance(weight, Nvfp4) else whole  # pyright: ignore[reportArgumentType]
        result = partition_spec((axes[0], *axes[-2:], None, None))
        pack = jax.jit(jax.shard_map(arrange, mesh=mesh, in_specs=(given,), out_specs=result, check_vma=False))
    words = jax.block_until_ready(pack(weight))
    yield f"{path}.words", words
    if isinstance(weight, Nvfp4):
        yield f"{path}.scale2", weight.scale2
        weight.values.delete()
        weight.scale.delete()
    else:
        yield f"{path}.scale2", _ones(weight.shape[:-2], mesh, scale_spec)
        weight.delete()


def _repacked_shared(path: str, weight: jax.Array, mesh: Mesh | None) -> jax.Array:
    """The words of shared experts: w13 [J, 2, F, D] as those of J experts, w2 [D, J, F] with J between blocks of D and of F."""
    part = path.rpartition(".")[2]
    if weight.dtype != jnp.bfloat16:
        raise CheckpointError(f"{path}: the kernels take weights of bfloat16, not {weight.dtype}")

    def words(local: jax.Array) -> jax.Array:
        if part == "w13":
            return arrange(local)
        out, shared, width = local.shape
        found = arrange(local.reshape(1, out, shared * width))
        return found.reshape(found.shape[1], shared, -1, *found.shape[3:])

    if mesh is not None:
        given, made = (partition_spec(axes) for axes in _SHARED[part])
        words = jax.jit(jax.shard_map(words, mesh=mesh, in_specs=(given,), out_specs=made, check_vma=False))
    result = jax.block_until_ready(words(weight))
    weight.delete()
    return result


def _ones(shape: tuple[int, ...], mesh: Mesh | None, spec: PartitionSpec) -> jax.Array:
    return jnp.ones(shape, jnp.float32, device=None if mesh is None else jax.NamedSharding(mesh, spec))
