"""Top-k, top-p and min-p against a stable sort in float64: exactly the same ids, ties included."""

import jax
import numpy as np
import pytest

from inkling_jax.engine.filters import keep_best


@pytest.mark.parametrize("tied", [False, True])
def test_filters_keep_exactly_the_smallest_set(tied):
    """Each row of random scores, with and without many ties, keeps what a stable sort in float64 keeps."""
    rng, rows, vocab = np.random.default_rng(3), 200, 257
    scores = rng.normal(size=(rows, vocab)).astype(np.float32) * 3
    if tied:
        scores = np.round(scores)  # 0.0 and -0.0 among them, which tie
    scores[rng.random(scores.shape) < 0.1] = -np.inf
    temperature = rng.choice([0.0, 0.3, 1.0, 4.0], rows).astype(np.float32)
    top_k = rng.choice([0, 1, 2, 17, 115, 125, 256, 257, 258, 2**31 - 1], rows).astype(np.int32)
    top_p = rng.choice([0.0, 0.1, 0.5, 0.9, 0.999, 1.0], rows).astype(np.float32)
    min_p = rng.choice([0.0, 0.0, 0.013, 1.0], rows).astype(np.float32)
    kept = np.asarray(jax.jit(keep_best)(scores, temperature[:, None], top_k, top_p, min_p))
    checked = 0
    for row in range(rows):
        ranked = np.argsort(-scores[row], kind="stable")
        best = scores[row].astype(np.float64) - scores[row].max()
        weights = np.exp(best / (temperature[row] or 1.0))
        chosen = ranked[: top_k[row] or None]
        share = weights[chosen].cumsum() / weights[chosen].sum()
        if top_p[row] < 1:
            if np.abs(share - top_p[row]).min() < 1e-5:
                continue  # float32 may fall on either side
            chosen = chosen[: 1 + (share < top_p[row]).sum()]
        wanted = np.full(vocab, -np.inf, np.float32)
        chosen = chosen[weights[chosen] >= min_p[row]]
        wanted[chosen] = scores[row, chosen]
        np.testing.assert_array_equal(kept[row], wanted)
        checked += 1
    assert checked > rows * 0.8
