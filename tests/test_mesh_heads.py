"""Key heads that several ranks hold, and padded vocabularies: what each rank gets, from the tensors as stored, and its bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import load as load_tensors
from checkpoint_files import micro_checkpoint, plan_of
from test_sharded_load import random_boxes

from inkling_jax.config import ModelConfig, preset
from inkling_jax.config_ranks import spread
from inkling_jax.convert import view
from inkling_jax.convert.slices import extents
from inkling_jax.convert.spread import spread_plan
from inkling_jax.convert.weight_map import WeightPlan
from inkling_jax.errors import ConfigError
from inkling_jax.model import Inkling, flat_parameters


def spread_checkpoint(directory: Path, ranks: int) -> tuple[ModelConfig, WeightPlan]:
    """The configuration and the plan of a checkpoint for so many ranks."""
    config, plan = ModelConfig.from_directory(directory), plan_of(directory)
    over = spread(config, ranks)
    declared = flat_parameters(Inkling(over.text, plan.packed, jnp.dtype("float32")))
    return over, spread_plan(plan, {path: leaf.get_value().shape for path, leaf in declared.items()})


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_each_rank_has_its_queries_and_their_key_heads(oracle_dir: Callable[..., Path], ranks: int) -> None:
    """From the stored matrices: the rank's rows of queries and biases, and the rows of each key head that these look at."""
    directory = oracle_dir("tiny")
    config, stored = ModelConfig.from_directory(directory), load_tensors(directory)
    over, plan = spread_checkpoint(directory, ranks)
    for layer in (0, 5):  # local, four key heads; global, two
        shape, path = config.text.attention(layer), f"layers.{layer}.attn."
        name, width, rel = f"model.llm.layers.{layer}.attn.", shape.head_dim, config.text.rel_dim
        group, own = shape.num_heads // shape.num_kv_heads, shape.num_heads // ranks
        heads = over.text.attention(layer).num_kv_heads
        assert heads == max(shape.num_kv_heads, ranks)
        found = {part: plan.assemble(path + part) for part in ("qkvr_proj", "k_conv.weight", "v_conv.weight")}
        for rank in range(ranks):
            queries = range(rank * own, rank * own + own)
            kv_heads = list(dict.fromkeys(query // group for query in queries))
            each = own // len(kv_heads)
            mine = slice(rank * heads // ranks, (rank + 1) * heads // ranks)
            rows = []
            for i, head in enumerate(kv_heads):
                first = queries[i * each]
                rows += [stored[name + "wq_du.weight"][first * width : (first + each) * width]]
                rows += [stored[name + part][head * width : (head + 1) * width] for part in ("wk_dv.weight", "wv_dv.weight")]
                rows += [stored[name + "wr_du.weight"][first * rel : (first + each) * rel]]
            assert found["qkvr_proj"][mine].tobytes() == np.concatenate(rows).tobytes(), (layer, rank)
            for part in ("k", "v"):
                taps = stored[f"{name}{part}_sconv.weight"].reshape(shape.num_kv_heads, width, -1)[kv_heads]
                assert found[part + "_conv.weight"][mine].tobytes() == taps.tobytes()


def test_a_part_of_a_shared_head_is_the_part_of_the_whole(oracle_dir: Callable[..., Path]) -> None:
    _, plan = spread_checkpoint(oracle_dir("tiny"), 8)
    for path in ("layers.0.attn.qkvr_proj", "layers.5.attn.qkvr_proj", "layers.5.attn.k_conv.weight"):
        source, whole = plan.parameters[path], plan.assemble(path)
        for box in random_boxes(source.shape, 20):
            out = np.empty(extents(box), whole.dtype)
            source.content.read(box, out)
            assert out.tobytes() == whole[box].tobytes(), (path, box)


def test_what_ranks_share_is_read_once(oracle_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of a process together: no byte of the file more than once."""
    _, plan = spread_checkpoint(oracle_dir("tiny"), 8)
    seen: list[tuple[str, int, int]] = []
    read = view.read_into

    def watched(info: Any, start: int, buffer: np.ndarray) -> None:
        seen.append((info.name, start, buffer.nbytes))
        read(info, start, buffer)

    monkeypatch.setattr(view, "read_into", watched)
    plan.assemble("layers.5.attn.qkvr_proj")
    assert sum(nbytes for _, _, nbytes in seen) == plan.parameters["layers.5.attn.qkvr_proj"].nbytes
    assert len(set(seen)) == len(seen)


def test_a_vocabulary_is_padded_with_zeros(tmp_path: Path) -> None:
    """72 rows over five ranks: 75, and of any part what lies behind the 72 is zero."""
    config = micro_checkpoint(tmp_path, nvfp4=False)
    plan = plan_of(tmp_path)
    text = dataclasses.replace(config.text, vocab_size=75)
    declared = flat_parameters(Inkling(text, plan.packed, jnp.dtype("float32")))
    padded = spread_plan(plan, {path: leaf.get_value().shape for path, leaf in declared.items()})
    for path in ("embed", "unembed"):
        full, found = plan.assemble(path), padded.assemble(path)
        assert found.shape == (75, 48) and found[:72].tobytes() == full.tobytes() and not found[72:].any()
        for box in random_boxes((75, 48), 20):
            out = np.full(extents(box), np.nan, found.dtype)
            padded.parameters[path].content.read(box, out)
            assert out.tobytes() == found[box].tobytes()


def test_sizes_that_would_do_are_named() -> None:
    """Small: 32 query heads on 8 key heads. A rank's queries must share key heads evenly with those of the others."""
    small = preset("inkling-small")
    told = "layers.5.attn.qkvr_proj: 'kv_heads', 32 query heads on 8 key heads do not divide over 3 devices"
    with pytest.raises(ConfigError, match=rf"{told} \(tensor x expert\); 1, 2, 4, 8, 16, 32 would do"):
        spread(small, 3)
    with pytest.raises(ConfigError, match="over 64 devices"):
        spread(small, 64)
    large = preset("inkling")
    assert spread(large, 64).text.local_attention.num_kv_heads == 64
    assert spread(large, 8) == large == spread(large, 1)
    assert spread(spread(large, 32), 32) == spread(large, 32)
