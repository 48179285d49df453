"""Expert weights in the kernels' order: when, in which shapes, and that every rank gets what packing its own shard would give."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from inkling_jax.config import preset
from inkling_jax.errors import CheckpointError, InputError
from inkling_jax.expert_storage import choose_kernels, kernels_refused, repack, use_kernels
from inkling_jax.kernels.expert_matmul import Nvfp4
from inkling_jax.kernels.expert_matmul.cases import Case, weights_of
from inkling_jax.kernels.expert_matmul.pack import pack, unpack
from inkling_jax.layers.experts import W2_AXES, W13_AXES
from inkling_jax.layers.mlp import SharedExperts
from inkling_jax.model import Inkling
from inkling_jax.random_weights import local_leaves
from inkling_jax.sharding.mesh import make_mesh
from inkling_jax.sharding.rules import partition_spec

AXES = {"w13": W13_AXES, "w2": W2_AXES}
CONFIG = dataclasses.replace(preset("inkling-small").text, num_layers=4, num_experts=4, expert_width=512, hidden_size=256)


def stored(packed: bool, mesh: jax.sharding.Mesh | None) -> dict[str, jax.Array]:
    """Parameters of a layer as they are loaded, on the mesh, among others."""
    found = {"layers.1.mlp.router.bias": jnp.ones(3)}
    for name, weight in zip(AXES, weights_of(Case(256, 512, 4, 4, 1, packed=packed), 0), strict=True):
        parts = weight._asdict() if isinstance(weight, Nvfp4) else {"": weight}
        for part, array in parts.items():
            axes = AXES[name][: array.ndim]
            place = None if mesh is None else NamedSharding(mesh, partition_spec(axes))
            found[f"layers.1.mlp.experts.{name}.{part}".strip(".")] = jax.device_put(array, place)
    return found


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"tensor": 2, "expert": 2}, {"tensor": 4}])
def test_every_rank_has_its_shard_packed(packed: bool, sizes: dict[str, int]) -> None:
    """A rank's words are those of its own channels of its own experts, and what they came from is gone."""
    mesh = make_mesh(sizes)
    given = stored(packed, mesh)
    got = dict(repack(given.items(), mesh))
    assert set(got) == {"layers.1.mlp.router.bias"} | {
        f"layers.1.mlp.experts.{name}.{part}" for name in AXES for part in ("words", "scale2")
    }
    assert all(array.is_deleted() for path, array in given.items() if path.endswith(("values", "scale", "experts.w13")))
    experts, channels = 4 // sizes.get("expert", 1), 512 // sizes.get("tensor", 1)
    for name, weight in zip(AXES, weights_of(Case(256, 512, 4, 4, 1, packed=packed), 0), strict=True):
        for shard in got[f"layers.1.mlp.experts.{name}.words"].addressable_shards:
            expert = shard.index[0].start or 0
            blocks = shard.index[1 if name == "w13" else 2].start or 0
            channel = blocks * 32 if name == "w13" else blocks * 128

            def cut(a: jax.Array, name: str = name, expert: int = expert, channel: int = channel) -> jax.Array:
                a = a[expert : expert + experts]
                if a.ndim < (4 if name == "w13" else 3):
                    return a
                ratio = 512 // a.shape[2]
                part = slice(channel // ratio, (channel + channels) // ratio)
                return a[:, :, part]

            assert np.array_equal(shard.data, pack(jax.tree.map(cut, weight), "w").words)


@pytest.mark.parametrize("sizes", [{}, {"tensor": 2, "expert": 2}])
def test_shared_experts_lie_side_by_side(sizes: dict[str, int]) -> None:
    """Whatever the mesh, a rank's words read as one expert are its channels of each shared expert, one expert after the other."""
    mesh, ranks = make_mesh(sizes), math.prod(sizes.values())
    shared, width, model = 2, 512, 256
    rng = np.random.default_rng(0)
    w13 = rng.standard_normal((shared, 2, width, model)).astype(ml_dtypes.bfloat16)
    w2 = rng.standard_normal((model, shared, width)).astype(ml_dtypes.bfloat16)
    layer = SharedExperts(CONFIG, jnp.bfloat16)
    specs = {name: partition_spec(getattr(layer, name).axes) for name in ("w13", "w2")}
    given = {f"mlp.shared.{n}": jax.device_put(w, NamedSharding(mesh, specs[n])) for n, w in (("w13", w13), ("w2", w2))}
    got = dict(repack(given.items(), mesh))
    layer.use_kernels()
    assert {path: a.shape for path, a in got.items()} == {f"mlp.shared.{n}": getattr(layer, n).get_value().shape for n in specs}
    here = width // ranks
    for rank in range(ranks):
        part = slice(rank * here, (rank + 1) * here)
        layer.w13, layer.w2 = (
            nnx.Param(next(s.data for s in got[f"mlp.shared.{n}"].addressable_shards if s.device == mesh.devices.flat[rank]))
            for n in ("w13", "w2")
        )
        for packed, want in zip(
            layer.packed(),
            (w13[:, :, part].swapaxes(0, 1).reshape(1, 2, -1, model), w2[:, :, part].reshape(1, model, -1)),
            strict=True,
        ):
            assert np.array_equal(np.asarray(unpack(packed)).view(np.uint16), want.view(np.uint16))


def test_bad_scales_name_the_parameter() -> None:
    """A NaN scale is refused with the path of its weight."""
    given = stored(True, None)
    path = "layers.1.mlp.experts.w2.scale"
    given[path] = given[path].at[0, 0, 0].set(jnp.nan)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.w2: a block scale is NaN"):
        dict(repack(given.items()))


def test_declared_shapes_are_those_of_packing() -> None:
    """A model declares words as repacking makes them, here of one rank of tensor=2: gate and up one way, down the other."""
    model = use_kernels(Inkling(CONFIG, frozenset({(3, "w13"), (3, "w2")}), jnp.bfloat16))
    local = {path: leaf.shape for path, leaf in local_leaves(model, {"tensor": 2}).items() if ".experts." in path}
    for layer, packed in ((2, False), (3, True)):
        made = repack(stored(packed, None).items())
        for path, array in made:
            if ".experts." in path:
                shape = list(array.shape)
                if path.endswith("words"):
                    shape[1 if "w13" in path else 2] //= 2
                assert local[path.replace("layers.1", f"layers.{layer}")] == tuple(shape)
    assert len(local) == 2 * 4 and nnx.state(model)


@pytest.mark.parametrize(
    ("kind", "dtype", "sizes", "reason"),
    [
        ("NVIDIA H200", jnp.bfloat16, {"tensor": 8}, None),
        ("NVIDIA H100 80GB HBM3", jnp.bfloat16, {"expert": 8}, None),
        ("NVIDIA GH200 480GB", jnp.bfloat16, {}, None),
        ("NVIDIA A100", jnp.bfloat16, {}, "NVIDIA A100 is not a Hopper GPU"),
        ("cpu", jnp.bfloat16, {}, "cpu is not a Hopper GPU"),
        ("NVIDIA H200", jnp.float32, {}, "activations are float32"),
        ("NVIDIA H200", jnp.bfloat16, {"tensor": 32}, "experts of 64 channels a device for a width of 4096"),
        ("NVIDIA H200", jnp.bfloat16, {"expert": 32}, "shared experts of 64 channels a device for a width of 4096"),
    ],
)
def test_choice(kind: str, dtype: jnp.dtype, sizes: dict[str, int], reason: str | None) -> None:
    """The kernels run on Hopper with bfloat16 and whole blocks; anything else is told why not."""
    found = kernels_refused(preset("inkling-small").text, dtype, kind, sizes, 64)
    assert found == reason if reason is None else reason in found


def test_a_choice_by_name_never_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    """On Hopper the kernels run unasked, and the log says so; elsewhere asking is an error, and unasked they do not run."""
    text = preset("inkling-small").text
    assert choose_kernels("sm90", text, jnp.bfloat16, "NVIDIA H200", {}, 64)
    with pytest.raises(InputError, match="cpu is not a Hopper GPU"):
        choose_kernels("sm90", text, jnp.bfloat16, "cpu", {}, 64)
    with caplog.at_level("INFO", logger="inkling_jax"):
        assert choose_kernels("auto", text, jnp.bfloat16, "NVIDIA H200", {}, 64)
        assert not choose_kernels("auto", text, jnp.bfloat16, "cpu", {}, 64)
    assert "those for Hopper" in caplog.messages[0] and "reference path (plain XLA): cpu is not" in caplog.messages[1]
    assert not choose_kernels("reference", text, jnp.bfloat16, "NVIDIA H200", {}, 64)
