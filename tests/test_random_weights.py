"""Random weights: shapes of a rank's shard, sound values, the same whatever the mesh."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from inkling_jax.config import ModelConfig, TextConfig, preset
from inkling_jax.errors import ConfigError
from inkling_jax.model import Inkling
from inkling_jax.random_weights import local_leaves, packed_experts, random_leaves, random_parameters
from inkling_jax.sharding.mesh import make_mesh
from inkling_jax.towers import Towers

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def declared(config: TextConfig) -> Inkling:
    return Inkling(config, packed_experts(config), jnp.bfloat16)


@pytest.fixture(scope="module")
def tiny(oracle_dir) -> Inkling:
    return declared(ModelConfig.from_directory(oracle_dir("tiny")).text)


@pytest.fixture(scope="module")
def drawn(tiny: Inkling) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf) for path, leaf in zip(local_leaves(tiny, {}), random_leaves(tiny), strict=True)}


def rank_bytes(config: TextConfig, ranks: int) -> int:
    """Bytes of one rank of `ranks` along `tensor`, from the configuration alone (spec 7.1 to 7.4)."""
    d, width, taps = config.hidden_size, config.expert_width, config.conv_width
    total = 2 * (2 * config.vocab_size * d // ranks + 2 * d)  # embedding and head, the norms after and before them
    sparse = 0
    for layer in range(config.num_layers):
        a = config.attention(layer)
        heads, kv = a.num_heads // ranks, a.num_kv_heads // ranks
        rows = heads * a.head_dim + 2 * kv * a.head_dim + heads * config.rel_dim
        total += 2 * (rows * d + heads * a.head_dim * d + 2 * a.head_dim + a.rel_extent * config.rel_dim)
        total += 2 * (2 * kv * a.head_dim * taps + 2 * d * taps + 2 * d)
        if config.dense_layers[layer]:
            total += 2 * 3 * config.dense_width // ranks * d + 4
            continue
        experts = config.num_experts
        total += 2 * (experts + config.num_shared_experts) * d + 4 * experts + 4
        total += 2 * 3 * config.num_shared_experts * width // ranks * d
        weights = experts * 3 * width // ranks * d
        total += weights // 2 + weights // 16 + 4 * 3 * experts if sparse else 2 * weights
        sparse += 1
    return total


@pytest.mark.parametrize(("name", "gigabytes"), [("inkling-small", 20.84), ("inkling", 72.85)])
def test_a_rank_of_eight_holds_an_eighth(name: str, gigabytes: float) -> None:
    """Both presets at tensor=8: bytes by arithmetic, near an eighth of the published totals (the draft head is not built)."""
    leaves = local_leaves(declared(preset(name).text), {"tensor": 8})
    total = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values())
    assert total == rank_bytes(preset(name).text, 8)
    assert total / 1e9 == pytest.approx(gigabytes, abs=0.005)


def test_local_shapes_follow_the_axes() -> None:
    """Routed experts lie whole on `expert` and are sliced over `tensor`; everything else is split over both."""
    leaves = local_leaves(declared(preset("inkling-small").text), {"tensor": 4, "expert": 2})
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    assert shapes["layers.3.mlp.experts.w13.values"] == (128, 2, 512, 2048)
    assert shapes["layers.3.mlp.experts.w2.scale"] == (128, 4096, 32)
    assert shapes["layers.3.attn.qkvr_proj"] == (1, 4 * 128 + 256 + 4 * 16, 4096)
    assert shapes["layers.0.mlp.w13"] == (2, 2048, 4096)
    assert shapes["unembed"] == (25128, 4096)
    assert shapes["layers.3.mlp.router.weight"] == (258, 4096)


def test_what_does_not_divide_is_named() -> None:
    with pytest.raises(ConfigError, match=r"embed: dimension 'vocab' of size 201024 does not divide over 7"):
        local_leaves(declared(preset("inkling-small").text), {"tensor": 7})


def test_values_are_finite_and_valid(drawn: dict[str, np.ndarray]) -> None:
    """No NaN anywhere, block scales within E4M3's positive numbers, all sixteen codes in both nibbles."""
    for path, leaf in drawn.items():
        assert np.isfinite(leaf.astype(np.float32)).all(), path
        if leaf.dtype == ml_dtypes.float8_e4m3fn:
            assert leaf.astype(np.float32).min() >= 64 and leaf.astype(np.float32).max() <= 240, path
        if leaf.dtype == np.uint8:
            assert set(np.unique(leaf & 15)) == set(range(16)) == set(np.unique(leaf >> 4)), path


def test_spread_of_each_role(drawn: dict[str, np.ndarray]) -> None:
    """Matrices have 1 / sqrt(inputs), packed ones once unpacked by the formula of spec 7.4; norms lie around one."""
    assert drawn["layers.0.attn.qkvr_proj"].astype(np.float32).std() == pytest.approx(128**-0.5, rel=0.03)
    assert drawn["layers.0.attn.o_proj"].astype(np.float32).std() == pytest.approx(256**-0.5, rel=0.03)
    assert drawn["layers.2.mlp.experts.w2"].astype(np.float32).std() == pytest.approx(64**-0.5, rel=0.03)
    assert drawn["embed"].astype(np.float32).std() == pytest.approx(1, rel=0.03)
    assert drawn["unembed"].astype(np.float32).std() == pytest.approx(4 * 128**-0.5, rel=0.03)  # the head divides by 4
    assert drawn["norm.weight"].astype(np.float32).mean() == pytest.approx(1, abs=0.05)
    assert drawn["layers.3.mlp.router.global_scale"] == pytest.approx(0.3, abs=0.1)
    for name, inputs in (("w13", 128), ("w2", 64)):
        values, scale, scale2 = (drawn[f"layers.3.mlp.experts.{name}.{part}"] for part in ("values", "scale", "scale2"))
        codes = np.stack([values & 15, values >> 4], -1).reshape(*values.shape[:-1], -1)
        weight = E2M1[codes] * np.repeat(scale.astype(np.float32), 16, -1) * scale2[..., None, None]
        assert weight.std() == pytest.approx(inputs**-0.5, rel=0.05)
        assert abs(weight.mean()) < 0.02 * weight.std()


def test_parameters_differ_and_seeds_repeat(tiny: Inkling, drawn: dict[str, np.ndarray]) -> None:
    """Equal shapes share a program and not their values; rows of one array differ; the seed decides everything."""
    assert (drawn["layers.0.attn.o_proj"] != drawn["layers.1.attn.o_proj"]).mean() > 0.9
    assert len(np.unique(drawn["layers.3.mlp.experts.w13.values"].reshape(-1, 64), axis=0)) == 16 * 2 * 64
    again, other = random_leaves(tiny), random_leaves(tiny, seed=1)
    for leaf, a, b in zip(drawn.values(), again, other, strict=True):
        assert np.array_equal(leaf, np.asarray(a))
        assert leaf.size < 100 or not np.array_equal(leaf, np.asarray(b))


@pytest.mark.parametrize(("axis", "codes", "bias"), [("tensor", (16, 2, 32, 64), (16,)), ("expert", (8, 2, 64, 64), (16,))])
def test_a_mesh_changes_no_value(tiny: Inkling, drawn: dict, axis: str, codes: tuple[int, ...], bias: tuple[int, ...]) -> None:
    """Spread over two devices, each array is the same and lies where the rules say."""
    leaves = dict(zip(drawn, random_leaves(tiny, mesh=make_mesh({axis: 2})), strict=True))
    for path, leaf in leaves.items():
        np.testing.assert_allclose(np.asarray(leaf, np.float32), drawn[path].astype(np.float32), rtol=1e-2, err_msg=path)
    assert leaves["layers.3.mlp.experts.w13.values"].addressable_shards[0].data.shape == codes
    assert leaves["layers.3.mlp.router.bias"].addressable_shards[0].data.shape == bias
    with pytest.raises(ConfigError, match="kv_heads"):
        random_leaves(tiny, mesh=make_mesh({axis: 4}))


def test_towers_too() -> None:
    """A released shape comes with its towers (spec 4.2, 5): of how many bytes, and a part of them drawn."""
    config = preset("inkling-small")
    towers = Towers.of(config, ("vision", "audio"), jnp.bfloat16)
    leaves = local_leaves(towers, {"tensor": 8})  # every rank has all
    linears = 75 * 128 + 512 * 320 + 5120 * 4800 + 9600 * 4096
    assert sum(math.prod(leaf.shape) for leaf in leaves.values()) == linears + 128 + 320 + 4800 + 4096 + 1281 * 4096
    heard = dict(random_parameters(Towers.of(config, ("audio",), jnp.bfloat16)))
    assert heard["audio.embed"].shape == (1280, 4096) and heard["audio.norm.weight"].shape == (4096,)
    assert np.asarray(heard["audio.embed"], np.float32).std() == pytest.approx(1, rel=0.01)


def test_order_is_that_of_the_state(tiny: Inkling) -> None:
    """Merging the leaves gives every module a parameter of its own shape."""
    graph, state = nnx.split(tiny)
    merged = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), random_leaves(tiny)))
    for (path, want), (_, got) in zip(nnx.to_flat_state(nnx.state(tiny)), nnx.to_flat_state(nnx.state(merged)), strict=True):
        assert (want.get_value().shape, want.get_value().dtype) == (got.get_value().shape, got.get_value().dtype), path
