"""The towers' benchmark: operations counted by hand, and its row from a run of small towers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from inkling_jax import bench
from inkling_jax.benchmarks import rows, towers
from inkling_jax.benchmarks.ceilings import ReadCeiling
from inkling_jax.config import ModelConfig, VisionConfig, preset


def test_operations_are_those_of_the_linears() -> None:
    """Places and linears of a patch as spec 4.2 lists them, and the 80 table rows of a frame."""
    places_and_linears = [(2 * 8 * 8, 75, 128), (2 * 4 * 4, 512, 320), (2 * 1 * 1, 5120, 4800), (1, 9600, 4096)]
    config = preset("inkling-small")
    assert towers._operations("vision", config) == sum(2 * n * k * m for n, k, m in places_and_linears)
    assert towers._operations("audio", config) == 80 * 4096


def small() -> ModelConfig:
    """Towers of one layer and a width of 64."""
    config = preset("inkling-small")
    assert isinstance(config.vision, VisionConfig) and config.audio is not None
    vision, audio = (dataclasses.replace(part, hidden_size=64) for part in (config.vision, config.audio))
    return dataclasses.replace(config, vision=dataclasses.replace(vision, num_layers=1), audio=audio)


def test_a_run_keeps_a_row_for_each_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(towers, "preset", lambda name: small())
    monkeypatch.setattr(towers, "IMAGE_PATCHES", 6)
    monkeypatch.setattr(towers, "read_ceiling", lambda device: ReadCeiling(1e9, "XLA reduction", 1e9))
    monkeypatch.setattr(towers, "matmul_ceiling", lambda device: 1e12)
    output = tmp_path / "towers.json"
    assert bench.main(["towers", "--preset", "inkling-small", "--items", "2", "--output", str(output)]) == 0
    vision, audio = rows.read_rows(output)
    assert vision["tokens"] == 12 and audio["tokens"] == 2400  # two minutes of frames of 50 ms
    # The rounding of bfloat16 is 2**-9 at most: an error far above says another sum, none at all says no bfloat16.
    assert 1e-4 < vision["rel_err"] < 1e-2 and 1e-4 < audio["rel_err"] < 1e-2
    assert "inkling-small vision" in capsys.readouterr().out
