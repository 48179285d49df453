"""What the other tests rest on: the archives of reference answers, and a GPU run that cannot pass by skipping."""

from __future__ import annotations

import json
import os
import runpy
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import missing_gpu

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30


@pytest.mark.parametrize("preset", ["tiny", "wide", "gpu"])
def test_index_and_shards_agree(preset: str, oracle_dir: Callable[..., Path]) -> None:
    """Each tensor lies in the shard that the index names and nowhere else, sizes add up, config.json describes what is there."""
    folder = oracle_dir(preset)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found, total = {}, 0
    for shard in folder.glob("*.safetensors"):
        data = shard.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"] for entry in header.values()]
        assert sum(end - begin for begin, end in ends) == max(end for _, end in ends) == len(data) - 8 - size
        total += len(data) - 8 - size
        found |= dict.fromkeys(header, shard.name)
    assert found == index["weight_map"]
    assert total == index["metadata"]["total_size"]
    config = json.loads((folder / "config.json").read_text())
    for section, prefix in (("audio_config", "model.audio."), ("vision_config", "model.visual."), ("mtp_config", "model.mtp.")):
        assert (section in config) == any(name.startswith(prefix) for name in found)


def test_answers_fit_their_prompts(expected: Callable[..., dict[str, np.ndarray]]) -> None:
    """Every prompt has one row of logits a token, in each set, and the greedy tokens continue the prompt."""
    for preset in ("tiny", "wide", "gpu"):
        answers = expected(preset)
        lengths = [len(ids) for name, ids in answers.items() if name.startswith("len") and name.endswith(".ids")]
        assert len(lengths) >= 7
        for length in lengths:
            assert answers[f"len{length}.logits"].shape[0] == length
        assert answers["len5.greedy"][:5].tolist() == answers["len5.ids"].tolist()


def test_trimming_moves_bytes_with_their_names() -> None:
    """Leaving a tensor out keeps the bytes of the others; leaving all out leaves no file."""
    trim = runpy.run_path(str(ROOT / "scripts" / "pack_test_data.py"))["trim_safetensors"]
    header = json.dumps(
        {
            "b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "drop.a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]},
            "a": {"dtype": "U8", "shape": [3], "data_offsets": [3, 6]},
        }
    ).encode()
    data = struct.pack("<Q", len(header)) + header + b"bDDaaa"
    kept = trim(data, ("drop.",))
    (size,) = struct.unpack("<Q", kept[:8])
    entries = json.loads(kept[8 : 8 + size])
    assert {name: kept[8 + size :][slice(*entry["data_offsets"])] for name, entry in entries.items()} == {"a": b"aaa", "b": b"b"}
    assert trim(data, ("nothing",)) == data
    assert trim(data, ("drop.", "a", "b")) is None


def test_missing_gpu_names_devices_and_bytes() -> None:
    """Enough devices of enough bytes are no lack; otherwise both numbers are told."""
    assert missing_gpu(2, 40 * GIB, [("H200", 100 * GIB), ("H200", 100 * GIB)]) is None
    told = missing_gpu(2, 40 * GIB, [("H200", 100 * GIB), ("T4", 12 * GIB)])
    assert told == f"needs 2 GPU(s) with {40 * GIB} bytes each, found H200 with {100 * GIB} bytes, T4 with {12 * GIB} bytes"
    assert missing_gpu(1, 0, []) == "needs 1 GPU(s) with 0 bytes each, found none"


@pytest.mark.gpu
def test_gpu_multiplies() -> None:
    """The GPU that jax sees computes."""
    import jax
    import jax.numpy as jnp

    assert jax.devices()[0].platform == "gpu"
    assert float(jnp.ones((256, 256)).sum()) == 65536.0


def test_gpu_run_that_skips_all_fails() -> None:
    """--gpu where there is no GPU: the skip says what was lacking, and the run does not count as passed."""
    command = [sys.executable, "-m", "pytest", "--gpu", "-m", "gpu", "-p", "no:cacheprovider", __file__]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=env, check=False)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout
    assert "needs 1 GPU(s) with 0 bytes each, found none" in done.stdout
    assert "no test ran" in done.stdout
