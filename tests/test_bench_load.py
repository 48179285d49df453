"""The benchmarks of loading and of memory: sizes and speeds worked out by hand, and rows from runs of a small model."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import jax.numpy as jnp
import pytest
from checkpoint_files import micro_config

from inkling_jax import InputError, bench
from inkling_jax.benchmarks import disk, load, memory, rows, shard
from inkling_jax.benchmarks.ceilings import ReadCeiling
from inkling_jax.config import ModelConfig
from inkling_jax.convert.write import write_checkpoint

MB = 1 << 20


def small(layers: int = 2) -> ModelConfig:
    """Layer 0 dense and local, the others sparse and global."""
    text = {"num_hidden_layers": layers, "local_layer_ids": [0], "dense_mlp_idx": 1, "n_routed_experts": 24}
    return micro_config(**text, model_max_length=1024)


def test_experts_follow_the_size(tmp_path: Path) -> None:
    """The bytes are those that the writer counts, and more experts would be more than was asked for."""
    config = small(5)
    made, size = load.shape_of(config, 1 << 40)
    assert made.text.num_experts == 24 and made.vision is None and made.mtp is None
    fewer, smaller = load.shape_of(config, size - 1)
    assert fewer.text.num_experts == 16 and smaller < size
    assert load.shape_of(config, 1)[0].text.num_experts == 8  # as small as it gets
    assert write_checkpoint(tmp_path, fewer, nvfp4=True) == smaller
    layers = dataclasses.replace(config.text, num_layers=9, local_layers=(True,) * 9, dense_layers=(True,) * 2 + (False,) * 7)
    assert load.shape_of(dataclasses.replace(config, text=layers), 1)[0].text.num_layers == load.LAYERS


@pytest.mark.parametrize("cached", [True, False])
def test_all_bytes_are_read_and_none_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    """By a clock that says 2 s for each try: sizes that are whole pieces, a bit more, and less than a block of the disk."""
    sizes = (disk.READ_BYTES, disk.READ_BYTES + 5, 3)
    files = [tmp_path / str(i) for i in range(3)]
    for file, size in zip(files, sizes, strict=True):
        file.write_bytes(bytes(size))
    ticks = iter(range(10**6))

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return 2.0 if next(ticks) else 0.0

    monkeypatch.setattr(disk, "time", Clock)
    monkeypatch.setattr(disk, "THREADS", (4,))
    found = disk.read_speed(files, cached=cached)
    assert found.bytes_per_second == sum(sizes) / 2
    assert found.fields() == {"ceiling": found.method, "ceiling_gbs": round(sum(sizes) / 2e9, 2)}
    assert found.method in (
        ("cached reads, 4 threads",) if cached else ("O_DIRECT reads, 4 threads", "uncached reads, 4 threads")
    )


def test_the_faster_number_of_threads_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"a")
    monkeypatch.setattr(disk, "_timed", lambda files, threads, direct, limit_s: 1e9 / threads)
    assert disk.read_speed([tmp_path / "a"], cached=True) == disk.ReadSpeed(1e9 / 4, "cached reads, 4 threads")
    monkeypatch.setattr(disk, "_timed", lambda files, threads, direct, limit_s: 1e9 * threads)
    assert disk.read_speed([tmp_path / "a"], cached=True) == disk.ReadSpeed(16e9, "cached reads, 16 threads")


def test_forgotten_files_come_from_the_disk(tmp_path: Path) -> None:
    """What the kernel counts: nothing for what was just written, all of it once it is forgotten."""
    if disk.bytes_from_disk() is None:
        pytest.skip("this system does not count what is read from disks")
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    if max((place, kind) for place, kind in mounts if tmp_path.is_relative_to(place))[1] in ("tmpfs", "ramfs"):
        pytest.skip("temporary files are in memory here")
    file = tmp_path / "a"
    file.write_bytes(os.urandom(4 * MB))
    counts = [disk.bytes_from_disk() or 0]
    for cold in (False, True):
        if cold:
            disk.forget([file])
        file.read_bytes()
        counts.append(disk.bytes_from_disk() or 0)
    assert counts[1] - counts[0] < MB <= 4 * MB <= counts[2] - counts[1]


def test_a_run_of_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each form, cold and warm, and nothing left on the disk."""
    monkeypatch.setattr(load, "preset", lambda name: small())
    output = tmp_path / "load.json"
    options = ["--size", "60kB", "--directory", str(tmp_path), "--output", str(output), "--quiet"]
    assert bench.main(["load", *options]) == 0
    found = rows.read_rows(output)
    assert [row["case"].rpartition("experts=")[2] for row in found] == [
        f"8 {form} {state}" for form in ("direct", "converted") for state in ("cold", "warm")
    ]
    for row in found:
        assert row["gbs"] == pytest.approx(row["bytes"] / row["time_us"] / 1e3, abs=1e-3)
        assert row["first_token_s"] > row["compile_s"] > 0 and ("convert_s" in row) == ("converted" in row["case"])
    assert [path.name for path in tmp_path.iterdir()] == ["load.json"]
    assert "converted warm" in capsys.readouterr().out


def test_sizes_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["load", "--size", "9EB", "--directory", str(tmp_path)]) == 2
    assert "size '9EB'" in capsys.readouterr().err
    assert bench.main(["load", "--size", "8GB", "--directory", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
    assert bench.main(["memory", "--chunks", "64,512", "--context", "256"]) == 2
    assert "--chunks 512: more than the --context of 256" in capsys.readouterr().err
    with pytest.raises(InputError, match="--layers 3: the model has 2"):
        memory.first_layers(small(), 3)


@pytest.mark.slow
def test_a_run_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, which does not tell its peak, the compiler's plan stands in for it."""
    monkeypatch.setattr(memory, "preset", lambda name: small())
    monkeypatch.setattr(memory, "read_ceiling", lambda device: ReadCeiling(1e9, "XLA reduction", 1e9))
    monkeypatch.setattr(memory, "matmul_ceiling", lambda device: 1e12)
    monkeypatch.setattr(shard, "DTYPE", jnp.float32)
    output = tmp_path / "memory.json"
    assert bench.main(["memory", "--layers", "2", "--chunks", "128", "--context", "256", "--output", str(output), "--quiet"]) == 0
    (row,) = rows.read_rows(output)
    assert row["tokens"] == 128 and row["peak_bytes"] == row["compiled_bytes"] and row["peak_by"] == "the compiler"
    assert row["error"] == pytest.approx(row["planned_bytes"] / row["peak_bytes"] - 1, abs=1e-4) and abs(row["error"]) < 0.3
