"""The draft head, teacher forced: against the reference answers, and against spec 3 written out in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conftest
import numpy as np
import pytest
from checkpoint_files import Tensors, load, save
from safetensors.numpy import load_file
from test_oracle_text import assert_close
from text_checkpoint import write_text_checkpoint

import inkling_jax
from inkling_jax import CapacityError, CheckpointError, InputError, Prompt
from inkling_jax.config import ModelConfig, TextConfig
from inkling_jax.convert.conversion import Conversion
from inkling_jax.convert.converter import convert
from inkling_jax.planning import answer


def open_llm(directory: Path, **options: Any) -> inkling_jax.LLM:
    defaults: dict[str, Any] = {"dtype": "float32", "max_context": 64, "slots": 1, "chunk": 16, "page_size": 16, "quiet": True}
    return inkling_jax.load(directory, **defaults | options)


# In pieces that end inside the window and beyond it, and in one piece; on one device and on two.
CASES = [
    ("tiny", "nvfp4", {"mesh": "tensor=2", "draft": True, "chunk": 13, "page_size": 4}),
    ("wide", "nvfp4", {"chunk": 64}),
    pytest.param("tiny", "nvfp4", {}, marks=pytest.mark.slow),
    pytest.param("tiny", "bf16", {}, marks=pytest.mark.slow),
    pytest.param("gpu", "nvfp4", {"mesh": "expert=2"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("preset", "fmt", "options"), CASES)
def test_oracle(oracle_set: Callable[..., Path], preset: str, fmt: str, options: dict[str, Any]) -> None:
    """Of every depth, at every slot of a prompt that is longer than the window."""
    found = oracle_set(preset, fmt)
    if preset == "gpu":  # whose archive leaves the head out
        found = conftest.BESIDE / preset
        if not found.is_dir():
            pytest.skip("the draft head of 'gpu' is in ../shared/oracle alone")
    answers = load_file(found / f"expected-{fmt}.safetensors")
    with open_llm(found / fmt, **options) as llm:
        assert (llm.engine.drafts is not None) == options.get("draft", False), "read though nobody asked"
        logits = llm.draft_logits(answers["len33.ids"].tolist())
        assert llm.config.mtp is not None and len(logits) == llm.config.mtp.num_depths
        for k, depth in enumerate(logits):
            assert_close(depth, answers[f"len33.draft.{k}"])
        assert len(logits[0]) == 32 and answers["len33.draft.0"].shape == (32, llm.config.text.usable_vocab_size)


# Spec 3 in float64, a tensor by its published name.


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def conv(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    padded = np.concatenate([np.zeros((3, x.shape[1])), x])
    return x + sum(weight[:, 0, j] * padded[j : j + len(x)] for j in range(4))


def attend(x: np.ndarray, of: Callable[[str], np.ndarray], text: TextConfig, local: bool) -> np.ndarray:
    shape = text.local_attention if local else text.global_attention
    width, share = shape.head_dim, shape.num_heads // shape.num_kv_heads
    bias, out = of("attn.rel_logits_proj.proj"), np.zeros((len(x), shape.num_heads, width))
    q, r = ((x @ of(f"attn.{name}.weight").T).reshape(len(x), shape.num_heads, -1) for name in ("wq_du", "wr_du"))
    k, v = (conv(x @ of(f"attn.w{n}_dv.weight").T, of(f"attn.{n}_sconv.weight")).reshape(len(x), -1, width) for n in "kv")
    q, k = norm(q, of("attn.q_norm.weight")), norm(k, of("attn.k_norm.weight"))
    for t, head in np.ndindex(len(x), shape.num_heads):
        tau = 1.0 if local else 1 + 0.1 * np.log(max((t + 1) / (text.log_scaling_floor or np.inf), 1))
        keys = np.arange(max(0, t - shape.window + 1) if local and shape.window else 0, t + 1)
        far = t - keys >= bias.shape[1]
        scores = tau * (k[keys, head // share] @ q[t, head] / width)
        scores += tau * np.where(far, 0, r[t, head] @ bias[:, np.where(far, 0, t - keys)])
        weights = np.exp(scores - scores.max())
        out[t, head] = weights / weights.sum() @ v[keys, head // share]
    return out.reshape(len(x), -1) @ of("attn.wo_ud.weight").T


def drafts(tensors: Tensors, config: ModelConfig, z: np.ndarray, embedded: np.ndarray) -> list[np.ndarray]:
    """Logits of each depth from the states after the final norm and the embeddings of all tokens, both [T, D]."""
    mtp, text, found, state = config.mtp, config.text, [], z.astype(np.float64)
    assert mtp is not None
    for depth in range(mtp.num_depths):
        name = f"model.mtp.layers.{depth}."

        def of(part: str, name: str = name) -> np.ndarray:
            return tensors[name + part].astype(np.float64)

        def inside(part: str, name: str = name) -> np.ndarray:
            return tensors[name + "transformer_block." + part].astype(np.float64)

        state, later = state[: len(z) - 1 - depth], embedded[1 + depth :].astype(np.float64)
        pair = [norm(state, of("hidden_norm.weight")), norm(later, of("embed_norm.weight"))]
        h = np.concatenate(pair, axis=1) @ of("input_proj.weight").T
        local = mtp.local_depths[depth]
        h = h + conv(attend(norm(h, inside("attn_norm.weight")), inside, text, local), inside("attn_sconv.weight"))
        up = norm(h, inside("mlp_norm.weight")) @ inside("mlp.w13_dn.weight").T
        gate, up = up[:, 0::2], up[:, 1::2]
        y = (gate / (1 + np.exp(-gate)) * up) @ inside("mlp.w2_md.weight").T * inside("mlp.global_scale")
        state = h + conv(y, inside("mlp_sconv.weight"))
        if mtp.chain_norm:
            state = norm(state, tensors["model.mtp.chain_norm.weight"].astype(np.float64))
        head = tensors["model.llm.unembed.weight"].astype(np.float64)[: text.usable_vocab_size]
        found.append(state / text.logits_divisor @ head.T)
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local depth and a global one with log scaling, normed on the way from one to the next."""
    return write_text_checkpoint(tmp_path_factory.mktemp("draft") / "model", num_hidden_layers=2, local_layer_ids=[0])


@pytest.fixture(scope="module")
def llm(directory: Path) -> inkling_jax.LLM:
    return open_llm(directory)


def test_definition_with_media(llm: inkling_jax.LLM, directory: Path) -> None:
    """A clip among text: its rows stand for the later tokens as they are, without the embedding norm."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 200, 39).tolist()
    ids[14:20] = [llm.config.audio_token_id] * 6  # over the border of two chunks
    prompt = Prompt(ids, audios=[rng.integers(0, 16, (6, 80)).astype(np.int32)])
    trace = llm.trace(prompt)
    config = llm.config
    assert config.mtp is not None and config.mtp.chain_norm and config.mtp.local_depths == (True, False)
    assert config.text.local_attention.window < 39 and config.text.global_attention.rel_extent < 39
    wanted = drafts(load(directory), config, trace[f"hidden.{config.text.num_layers}"], trace["hidden.0"])
    for depth, logits in zip(llm.draft_logits(prompt), wanted, strict=True):
        assert_close(depth, logits.astype(np.float32), 1e-5)


def test_short_prompts(llm: inkling_jax.LLM) -> None:
    """Depth k has a row for each slot with k + 1 true tokens after it; what is there does not change with what follows."""
    usable = llm.config.text.usable_vocab_size
    longest = llm.draft_logits([5, 6, 7, 8])
    for length in (1, 2, 3):
        found = llm.draft_logits([5, 6, 7, 8][:length])
        assert [depth.shape for depth in found] == [(max(0, length - 1 - k), usable) for k in range(2)]
        for depth, more in zip(found, longest, strict=True):
            np.testing.assert_allclose(depth, more[: len(depth)], rtol=1e-5, atol=1e-5)


def test_a_slot_and_its_pages_come_back(llm: inkling_jax.LLM) -> None:
    llm.draft_logits(list(range(40)))
    scheduler = llm.engine.scheduler
    assert all(pool.free == pool.pages for pool in scheduler.pools.values())
    assert len(scheduler.free_slots) == 1


@pytest.mark.slow
def test_converted_checkpoints_hold_it(llm: inkling_jax.LLM, directory: Path, tmp_path: Path) -> None:
    convert(Conversion.of(directory, tmp_path / "converted"), quiet=True)
    with open_llm(tmp_path / "converted") as converted:
        for ours, theirs in zip(converted.draft_logits([1, 2, 3, 4]), llm.draft_logits([1, 2, 3, 4]), strict=True):
            assert ours.tobytes() == theirs.tobytes()


def without(directory: Path, target: Path, *gone: str) -> Path:
    """A copy of a checkpoint that lacks the tensors whose names begin so."""
    target.mkdir()
    for file in directory.glob("*.json"):
        if "index" not in file.name:
            (target / file.name).write_bytes(file.read_bytes())
    save(target / "model.safetensors", {name: a for name, a in load(directory).items() if not name.startswith(gone)})
    return target


@pytest.mark.parametrize(
    ("gone", "error", "told"),
    [
        ("model.mtp.", InputError, "holds no draft head"),
        ("model.mtp.layers.1.input_proj", CheckpointError, "missing 1 tensor: 'model.mtp.layers.1.input_proj.weight'"),
        ("model.mtp.chain_norm", CheckpointError, "missing 1 tensor: 'model.mtp.chain_norm.weight'"),
    ],
)
def test_what_is_not_there_is_told_to_those_who_ask(
    directory: Path, tmp_path: Path, gone: str, error: type[Exception], told: str
) -> None:
    damaged = without(directory, tmp_path / "damaged", gone)
    with open_llm(damaged) as llm, pytest.raises(error, match=told):
        llm.draft_logits([1, 2, 3])
    with pytest.raises(error, match=told):
        open_llm(damaged, draft=True)


def test_refusals(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headless = dataclasses.replace(ModelConfig.from_directory(directory), mtp=None)
    monkeypatch.setattr(ModelConfig, "from_directory", lambda path: headless)
    with pytest.raises(InputError, match="config.json has no mtp_config"):
        open_llm(directory, draft=True)
    monkeypatch.undo()
    with open_llm(directory) as llm:
        monkeypatch.setattr("inkling_jax.draft_loading.memory_of", lambda *_: (1000, 0))
        with pytest.raises(CapacityError, match=r"the draft head takes \d+ bytes a device, 970 are left: .* draft=True"):
            llm.draft_logits([1, 2, 3])
    with pytest.raises(InputError, match="this model is closed"):
        llm.draft_logits([1, 2, 3])


@pytest.mark.parametrize(("name", "nbytes"), [("inkling-small", 4463824912), ("inkling", 10520891408)])
def test_its_memory_is_planned(name: str, nbytes: int) -> None:
    """The published bytes (spec 7.5), and two more for each depth's scale, which is kept in float32; nothing without `draft`."""
    options: dict[str, Any] = {"device_memory": "4TB", "context": 1024}
    asked, plain = answer(name, draft=True, **options), answer(name, **options)
    assert asked.memory.weights["draft head"] == nbytes + 8 * 2
    assert "draft head" not in plain.memory.weights and plain.memory.total == asked.memory.total - nbytes - 8 * 2
    assert (asked.files.draft, plain.files.draft) == (0, nbytes)
