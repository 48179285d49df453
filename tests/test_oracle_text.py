"""Logits, hidden states and routing against what an independent implementation computes in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import engines
import numpy as np
import pytest

SETS = [("tiny", "nvfp4"), ("wide", "nvfp4"), ("gpu", "nvfp4"), ("tiny", "bf16")]


def lengths(answers: dict[str, np.ndarray]) -> list[int]:
    return sorted(int(name[3 : -len(".ids")]) for name in answers if name.startswith("len") and name.endswith(".ids"))


def evaluate(directory: Path, ids: np.ndarray, chunk: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits and trace of a prompt read in chunks."""
    shape = engines.cache_shape(max_query=max(chunk, 24))
    pieces = list(engines.engine(directory, chunk=chunk, shape=shape).evaluate(ids.tolist(), trace=True))
    assert [len(logits) for logits, _ in pieces[:-1]] == [chunk] * (len(pieces) - 1)
    tape = {name: np.concatenate([tape[name] for _, tape in pieces]) for name in pieces[0][1]}
    return np.concatenate([logits for logits, _ in pieces]), tape


def assert_close(found: np.ndarray, expected: np.ndarray, bound: float = 1e-4) -> None:
    """Relative error in the 2-norm, of the whole and of each row."""
    assert found.shape == expected.shape and found.dtype == np.float32
    error = np.linalg.norm(found - expected, axis=-1)
    assert np.linalg.norm(error) <= bound * np.linalg.norm(expected)
    assert (error <= 2 * bound * np.linalg.norm(expected, axis=-1)).all()


@pytest.mark.parametrize(("preset", "fmt"), SETS)
def test_logits(preset: str, fmt: str, oracle_dir: Callable[..., Path], expected: Callable[..., dict[str, np.ndarray]]) -> None:
    """Of every prompt at each of its tokens, read 16 tokens at a time."""
    directory, answers = oracle_dir(preset, fmt), expected(preset, fmt)
    usable = engines.model(directory).config.text.usable_vocab_size
    for length in lengths(answers):
        found, _ = evaluate(directory, answers[f"len{length}.ids"], 16)
        assert found.shape == (length, usable)
        assert_close(found, answers[f"len{length}.logits"])


@pytest.mark.parametrize("chunk", [64, 13])
@pytest.mark.parametrize(("preset", "fmt"), SETS)
def test_hidden_states_and_routing(
    preset: str, fmt: str, chunk: int, oracle_dir: Callable[..., Path], expected: Callable[..., dict[str, np.ndarray]]
) -> None:
    """After every layer, and which experts each token took with which weights: in one piece and in pieces."""
    directory, answers = oracle_dir(preset, fmt), expected(preset, fmt)
    config = engines.model(directory).config.text
    _, tape = evaluate(directory, answers["len33.ids"], chunk)
    wanted = {name.removeprefix("len33."): value for name, value in answers.items() if ".hidden." in name or ".moe." in name}
    assert set(tape) == set(wanted)
    assert len(wanted) == config.num_layers + 1 + 3 * config.dense_layers.count(False)
    for name, value in wanted.items():
        if name.startswith("hidden."):
            assert_close(tape[name], value)
        elif name.endswith(".experts"):
            np.testing.assert_array_equal(tape[name], value)
        else:
            np.testing.assert_allclose(tape[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("preset", ["tiny", "gpu"])
def test_longest_prompt(preset: str, oracle_dir: Callable[..., Path], expected: Callable[..., dict[str, np.ndarray]]) -> None:
    """100 tokens at a time, on the page size of the kernels: a step reaches past the window, the prompt past the extent."""
    directory, answers = oracle_dir(preset), expected(preset)
    length = lengths(answers)[-1]
    assert length > engines.model(directory).config.text.global_attention.rel_extent
    engine = engines.engine(directory, chunk=100, shape=engines.cache_shape(64, max_query=100))
    found = [logits for logits, _ in engine.evaluate(answers[f"len{length}.ids"].tolist())]
    assert_close(np.concatenate(found), answers[f"len{length}.logits"])
