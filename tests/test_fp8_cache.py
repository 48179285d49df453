"""Keys and values in fp8: against a quantiser in numpy, against the oracle, and the same tokens however the work is cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attention_cases
import engines
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle_distances import relative
from text_checkpoint import write_text_checkpoint

import inkling_jax
from inkling_jax import InputError, SamplingParams
from inkling_jax.cache.paged import CacheShape, create_cache
from inkling_jax.cache.sizing import cache_bytes
from inkling_jax.config import preset
from inkling_jax.engine.scheduler import Scheduler
from inkling_jax.expert_storage import choose_kernels
from inkling_jax.kernels.pages import Fp8Pages, decode, quantize, write
from inkling_jax.planning import answer

LENGTHS = (1, 5, 33)
# The e4m3 numbers of codes 0 to 126, by their definition: 1 sign, 4 bits of exponent with bias 7, 3 of mantissa; 127 is NaN.
NUMBERS = np.array([(m / 8 + (e > 0)) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)][:127])


def nearest(x: np.ndarray) -> np.ndarray:
    """Codes of the e4m3 numbers nearest to x, the even one of two as near."""
    size = np.abs(x.astype(np.float64))
    above = np.clip(np.searchsorted(NUMBERS, size), 1, 126)
    down, up = size - NUMBERS[above - 1], NUMBERS[above] - size
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    return (code | (np.signbit(x) << 7)).astype(np.uint8)


def by_numpy(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of vectors."""
    scale = np.maximum(np.abs(x).max(-1), np.float32(2.0**-100)) * np.float32(1 / 448)
    return nearest(x / scale[..., None]), scale


def numbers(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """What codes and scales stand for."""
    return np.where(codes & 128, -1, 1) * np.append(NUMBERS, np.nan)[codes & 127] * scale[..., None].astype(np.float64)


def test_quantiser() -> None:
    """Vectors of all sizes, on and beside the middle between two numbers, and zeros; every code is decoded as defined."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((4096, 128)) * 2.0 ** rng.integers(-40, 40, (4096, 1))).astype(np.float32)
    x[0], x[1] = 0, -0.0
    x[2, :126] = (NUMBERS[1:] + NUMBERS[:-1]) / 2  # with 448 last these have the scale 1
    x[2, 126:] = 448
    x[3] = np.nextafter(x[2], np.float32(0))
    x[3, 127] = -448
    codes, scale = map(np.asarray, jax.jit(quantize)(x))
    wanted = by_numpy(x)
    np.testing.assert_array_equal(codes, wanted[0])
    np.testing.assert_array_equal(scale, wanted[1])
    assert scale.dtype == np.float32 and (numbers(codes, scale)[:2] == 0).all()
    largest = np.abs(x).max(-1, keepdims=True)
    assert (np.abs(numbers(codes, scale) - x) <= np.maximum(np.abs(x) * 2.0**-4, largest * 2.0**-10 / 448) * 1.001).all()
    every = np.arange(256, dtype=np.uint8)
    for dtype in (jnp.bfloat16, jnp.float32):
        found = np.asarray(decode(jnp.asarray(every), dtype)).astype(np.float64)
        np.testing.assert_array_equal(found, numbers(every, np.ones(1))[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    """The scale says it, of that vector alone."""
    x = np.ones((3, 2, 8), np.float32)
    x[1, 0, 5] = bad
    _, scale = jax.jit(quantize)(x)
    assert np.argwhere(np.isnan(scale)).tolist() == [[1, 0]]
    x = np.ones((3, 2, 128), jnp.bfloat16)
    x[1, 0, 77] = bad
    assert np.argwhere(np.isnan(jax.jit(quantize)(x)[1])).tolist() == [[1, 0]]


def in_fp8(pages: np.ndarray) -> tuple[Fp8Pages, np.ndarray]:
    """Pages in fp8, NaN where there was NaN, and the numbers that they hold."""
    codes, scale = by_numpy(np.nan_to_num(pages))
    absent = np.isnan(pages).any(-1)
    held = numbers(codes, scale)
    codes[absent], scale[absent] = 0x7F, np.nan
    return Fp8Pages(jnp.asarray(codes), jnp.asarray(scale)), held


@pytest.mark.parametrize("window", [None, 24])
def test_attention(window: int | None) -> None:
    """Of the numbers that pages hold it is what the definition says; heads and tokens of very different size, NaN around them."""
    case = attention_cases.random_case([(3, 40), (0, 0), (17, 17), (1, 33)])
    rng = np.random.default_rng(3)
    for side in (case.keys, case.values):
        for i, array in enumerate(side):
            side[i] = array * (2.0 ** rng.integers(-3, 2, (*array.shape[:2], 1))).astype(np.float32)
    arrays, sizes = attention_cases.paged(case, window=window)
    arrays = [in_fp8(array)[0] if i in (3, 4) else array for i, array in enumerate(arrays)]
    found = attention_cases.run(*arrays, **sizes)
    case.keys, case.values = ([numbers(*by_numpy(array)) for array in side] for side in (case.keys, case.values))
    np.testing.assert_allclose(found, attention_cases.dense(case, window), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("spread", "window", "bound"), [(0.2, None, 0.04), (3.5, None, 0.1), (3.5, 512, 0.15)])
def test_error_on_long_random_contexts(spread: float, window: int | None, bound: float) -> None:
    """A query after 131,072 random keys, its scores spread so widely, against float64 of the keys as they were."""
    case = attention_cases.random_case([(1, 131_072)], heads=2, kv_heads=1, width=128, extent=window or 1024, rel_dim=16)
    case.q *= spread * 128**0.5 / 4  # both queries and keys have a spread of 2
    arrays, sizes = attention_cases.paged(case, window=window, page=64)
    arrays = [in_fp8(array)[0] if i in (3, 4) else array for i, array in enumerate(arrays)]
    error = relative(np.asarray(attention_cases.run(*arrays, **sizes)), attention_cases.dense(case, window))
    print(f"scores spread by {spread}, window {window}: {error:.4f}")
    assert 1e-3 < error < bound


def test_a_write_changes_its_places_alone_and_copies_no_pool() -> None:
    """Two tokens, one of them to a page that is not there."""
    pages = Fp8Pages(jnp.full((512, 2, 64, 128), 7, jnp.uint8), jnp.full((512, 2, 64), 3.0))
    new = np.random.default_rng(0).standard_normal((2, 2, 128)).astype(np.float32)
    target = (jnp.array([4, 512]), slice(None), jnp.array([63, 0]))
    program = jax.jit(lambda pages, new: write(pages, target, new), donate_argnums=0).lower(pages, new).compile()
    memory = program.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < pages.codes.nbytes / 100
    codes, scale = map(np.array, program(pages, new))
    wanted = by_numpy(new)
    np.testing.assert_array_equal(codes[4, :, 63], wanted[0][0])
    np.testing.assert_array_equal(scale[4, :, 63], wanted[1][0])
    codes[4, :, 63], scale[4, :, 63] = 7, 3
    assert (codes == 7).all() and (scale == 3).all()


# The engine


Answers = Callable[..., dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers: local, global with a dense part, local with experts. The window is 16 tokens."""
    return write_text_checkpoint(tmp_path_factory.mktemp("fp8") / "model")


ROOMY = engines.cache_shape()


def fp8_engine(directory: Path, shape: CacheShape = ROOMY, **options) -> engines.Engine:
    return engines.engine(directory, shape=dataclasses.replace(shape, fp8=True), **options)


@pytest.mark.parametrize("name", ["tiny", pytest.param("gpu", marks=pytest.mark.slow)])
def test_error_on_the_oracle(name: str, oracle_dir: Callable[..., Path], expected: Answers) -> None:
    """Relative errors (2-norm), computed in float32, where without fp8 they are below 1e-4.

    After the dense layers three percent, as a rounding to three bits of mantissa makes. Routers of random weights are often of
    two minds, then: bfloat16 alone makes an error of 0.15 in the logits.
    """
    directory, answers = oracle_dir(name), expected(name)
    dense = engines.model(directory).config.text.dense_layers.index(False)
    for length in (5, 33):
        ids, wanted = answers[f"len{length}.ids"].tolist(), answers[f"len{length}.logits"]
        pieces = list(fp8_engine(directory).evaluate(ids, trace=True))
        found, hidden = (np.concatenate(a) for a in zip(*((z, tape[f"hidden.{dense}"]) for z, tape in pieces), strict=True))
        errors = {"logits": relative(found, wanted)}
        if length == 33:
            errors["hidden"] = relative(hidden, answers[f"len33.hidden.{dense}"])
        print(name, length, errors, f"{(found.argmax(-1) == wanted.argmax(-1)).sum()} of {length} alike")
        assert 1e-3 < errors["logits"] < 0.45 and errors.get("hidden", 0.0) < 0.04, errors


TIGHT = CacheShape(engines.SLOTS, page_size=16, global_pages=7, local_pages=20, max_context=80, max_query=24)


def test_the_same_tokens_however_the_work_is_cut(directory: Path) -> None:
    """Chunks, company, preemption and prefix reuse, with NaN poured over all that nothing may look at.

    The longest sequence fills five of seven pages, so that together some lose theirs.
    """
    poison = partial(engines.poison, local_layers=engines.model(directory).config.text.local_layers)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 250, length).tolist() for length in LENGTHS]
    alone = [engines.run(fp8_engine(directory, TIGHT), [prompt])[0] for prompt in prompts]
    assert all(len(result.tokens) == 40 for result in alone)
    together = fp8_engine(directory, TIGHT, chunk=3, ahead=0)
    assert engines.run(together, prompts, between=poison) == alone
    assert isinstance(together.scheduler, Scheduler) and together.scheduler.preemptions and engines.all_given_back(together)
    kept = fp8_engine(directory, TIGHT, prefix_bytes=1 << 30)
    assert engines.run(kept, [prompts[2]], between=poison) + engines.run(kept, [prompts[2]], between=poison) == [alone[2]] * 2
    assert kept.prefix_statistics.reused == 32


def test_a_sequence_that_is_not_finite_ends_alone(directory: Path) -> None:
    """What is infinite has scales that are NaN: its sequence ends as an error, and those beside it and after it do not."""
    long, short = [7] * 20 + [3], [1, 2]
    (clean,) = engines.run(fp8_engine(directory, TIGHT), [short])
    assert 7 not in clean.tokens
    shared = engines.model(directory)
    leaves, embed = list(shared.leaves), shared.paths.index("embed")
    leaves[embed] = jax.device_put(leaves[embed].at[7].set(jnp.inf), shared.sharding)
    engine = fp8_engine(directory, TIGHT, leaves=leaves)
    spoilt, beside = engines.run(engine, [long, short])
    assert spoilt.finish_reason == "error" and "not finite" in (spoilt.error or "")
    assert beside == clean == engines.run(engine, [short])[0] and engines.all_given_back(engine)


@pytest.mark.slow
def test_on_a_mesh(oracle_dir: Callable[..., Path]) -> None:
    """Scales lie with their heads; each device has its own alone, and the answers are those of one device."""
    ids, params = list(range(3, 30)), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    options = {"dtype": "float32", "max_context": 64, "slots": 2, "page_size": 16, "chunk": 32, "quiet": True, "kv_dtype": "fp8"}
    made = []
    for mesh in ("tensor=1", "tensor=2"):
        with inkling_jax.load(oracle_dir("tiny"), mesh=mesh, **options) as llm:
            assert "keys and values in fp8" in llm.summary
            made.append((list(llm.generate(ids, params)[0].token_ids), llm.score(ids)))
            for layer in llm.engine.state.cache.layers:
                for array in (*layer.k_pages, *layer.v_pages):
                    shards = array.addressable_shards
                    assert all(shard.data.shape[1] * len(shards) == array.shape[1] for shard in shards)
    assert made[0][0] == made[1][0]
    assert relative(made[1][1], made[0][1]) <= 2e-3  # here and there a rounding falls the other way


# Sizes


def test_bytes_are_counted() -> None:
    """Half of bfloat16 and four bytes of scale for each vector, as the arrays that are made; a longer context fits."""
    text = dataclasses.replace(preset("inkling-small").text, num_layers=6)
    shape = CacheShape(slots=2, page_size=64, global_pages=8, local_pages=10, max_context=256, max_query=64, fp8=True)
    cache = jax.eval_shape(lambda: create_cache(text, shape, jnp.bfloat16, {"tensor": 2}))
    held = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(cache.layers))
    found = cache_bytes(text, shape, jnp.dtype(jnp.bfloat16), {"tensor": 2})
    assert held == sum(found.values())
    attention, pages = text.global_attention, 8 * text.local_layers[:6].count(False)
    vectors = 2 * pages * 64 * attention.num_kv_heads // 2
    assert found["global"] == vectors * (attention.head_dim + 4)
    asked = {"mesh": "tensor=8", "device_memory": "60GB", "context": 131072}
    wide, narrow = (answer("inkling-small", **asked, kv_dtype=kv_dtype) for kv_dtype in (None, "fp8"))
    for name in ("global", "local"):
        assert narrow.memory.cache[name] * 256 == wide.memory.cache[name] * 132
    assert narrow.memory.cache["conv"] == wide.memory.cache["conv"] and narrow.largest_batch > 1.7 * wide.largest_batch
    assert "fp8 with scales" in str(list(narrow.rows())) and "fp8" not in str(list(wide.rows()))


def test_load_sizes_the_cache_by_it(directory: Path) -> None:
    """In the same memory more tokens; what is not a form of pages is refused by name."""
    options = {"slots": 4, "page_size": 64, "chunk": 16, "quiet": True, "kv_memory": "80KB"}
    pages: list[int] = []
    for kv_dtype in (None, "fp8"):
        with inkling_jax.load(directory, kv_dtype=kv_dtype, **options) as llm:
            pages.append(llm.engine.shape.global_pages)
            assert llm.engine.shape.fp8 == (kv_dtype == "fp8")
    assert pages[1] > 1.2 * pages[0]  # heads are so narrow here that scales count
    with pytest.raises(InputError, match="kv_dtype='int8': expected None"):
        inkling_jax.load(directory, kv_dtype="int8")


def test_kernels_take_it(caplog: pytest.LogCaptureFixture) -> None:
    """On Hopper, heads of 128 channels; others go through plain JAX, which the log says, or are refused."""
    text = preset("inkling-small").text
    narrow = dataclasses.replace(text, local_attention=dataclasses.replace(text.local_attention, head_dim=64))
    bf16 = jnp.dtype(jnp.bfloat16)
    assert choose_kernels("sm90", text, bf16, "NVIDIA H200", {}, 64, True) and choose_kernels(
        "sm90", narrow, bf16, "H100", {}, 64
    )
    reason = "heads of width 64 in fp8: the kernels take 128"
    with pytest.raises(InputError, match=f"kernels='sm90': {reason}"):
        choose_kernels("sm90", narrow, bf16, "NVIDIA H200", {}, 64, True)
    with caplog.at_level("INFO", logger="inkling_jax"):
        assert not choose_kernels("auto", narrow, bf16, "NVIDIA H200", {}, 64, True)
    assert reason in caplog.text
