"""Whatever interrupts a conversion, the next run ends as if nothing had, or says why it does not go on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from spread_parameters import held
from text_checkpoint import write_text_checkpoint

import inkling_jax
from inkling_jax.convert import orbax_store
from inkling_jax.convert.conversion import Conversion
from inkling_jax.convert.converted import JOURNAL, RECORD
from inkling_jax.convert.converter import convert
from inkling_jax.convert.journal import Journal
from inkling_jax.errors import CheckpointError
from inkling_jax.sharding.mesh import mesh_sizes

STATE = Path("weights/state")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint of text, with experts in both forms."""
    return write_text_checkpoint(tmp_path_factory.mktemp("source") / "published")


def interrupt(source: Path, place: Path, what: str, count: int) -> list[dict]:
    """Conversions that were killed and finished."""
    script = Path(__file__).with_name("interrupted_conversions.py")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(script.parents[1])}
    command = [sys.executable, str(script), str(source), str(place), what, str(count)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def check_interrupted(source: Path, place: Path, what: str, count: int) -> list[dict]:
    """Killed conversions end as one that nobody disturbed, and what was done by then is not touched again."""
    whole, runs = place / "whole", interrupt(source, place, what, count)
    record, wanted = (whole / RECORD).read_text(), held(whole)
    assert wanted == held(source)
    for run in runs:
        directory = Path(run["directory"])
        assert run["left_alone"] and all(code == 0 for code in run["codes"]), run
        assert (directory / RECORD).read_text() == record
        assert held(directory) == wanted
        files = {file.relative_to(directory) for file in directory.rglob("*")} - {Path(JOURNAL)}
        assert files == {file.relative_to(whole) for file in whole.rglob("*")}
        assert not directory.with_name(directory.name + ".partial").exists()
    return runs


@pytest.mark.parametrize("count", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_costs_no_finished_tensor(source: Path, tmp_path: Path, count: int) -> None:
    runs = check_interrupted(source, tmp_path, "moments", count)
    assert sum(run["killed"] for run in runs) == count


@pytest.mark.parametrize("count", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_a_kill_while_finishing_leaves_all_or_nothing(source: Path, tmp_path: Path, count: int) -> None:
    """The last four steps: the record's name flushed, the rename, the new name flushed, the journal removed."""
    runs = check_interrupted(source, tmp_path, "events", count)
    assert len(runs) == count and all(run["killed"] for run in runs)
    assert [run["looked_done"] for run in runs] == [False] * (count - 2) + [True] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fmt"), [("tiny", "nvfp4"), ("tiny", "bf16")])
def test_larger_conversions_survive_ten_kills(oracle_dir: Callable[..., Path], tmp_path: Path, name: str, fmt: str) -> None:
    check_interrupted(oracle_dir(name, fmt), tmp_path, "moments", 10)


def stopped(source: Path, destination: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> Conversion:
    """A conversion that fails while writing, after so many files."""
    conversion, writes = Conversion.of(source, destination), []
    write = orbax_store.ArrayWriter.write

    def failing(self: orbax_store.ArrayWriter, box: tuple[slice, ...], values: np.ndarray) -> None:
        writes.append(box)
        if len(writes) > after:
            raise CheckpointError("stop")
        write(self, box, values)

    with monkeypatch.context() as patch:
        patch.setattr(orbax_store.ArrayWriter, "write", failing)
        with pytest.raises(CheckpointError, match="stop"):
            convert(conversion, quiet=True)
    assert not destination.exists()
    return conversion


def test_half_a_conversion_is_refused_by_name(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversion = stopped(source, tmp_path / "model", monkeypatch, 10)
    shutil.copy(source / "config.json", conversion.partial)
    with pytest.raises(
        CheckpointError, match=r"model.partial: a conversion that is not finished; the same conversion, run again"
    ):
        inkling_jax.load(conversion.partial, quiet=True)


def test_another_conversion_does_not_go_on_with_it(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other chunks, or files that changed since."""
    conversion = stopped(source, tmp_path / "model", monkeypatch, 10)
    with pytest.raises(CheckpointError, match=r"model.partial: begun from other files, or with other options"):
        convert(Conversion.of(source, conversion.destination, mesh_sizes("")), quiet=True)
    changed = Path(shutil.copytree(source, tmp_path / "changed"))
    os.utime(next(changed.glob("*.safetensors")))
    with pytest.raises(CheckpointError, match="begun from other files"):
        convert(Conversion.of(changed, conversion.destination), quiet=True)
    convert(conversion, quiet=True)
    assert held(conversion.destination) == held(source)


def test_a_journal_cut_short_and_files_cut_short_are_done_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversion = stopped(source, tmp_path / "model", monkeypatch, 20)
    journal = conversion.partial / JOURNAL
    entries = [json.loads(line) for line in journal.read_bytes().splitlines()]
    file = conversion.partial / STATE / entries[3]["parameter"] / next(iter(entries[3]["files"]))
    os.truncate(file, file.stat().st_size - 1)
    os.truncate(journal, journal.stat().st_size - 5)
    convert(conversion, quiet=True)
    assert held(conversion.destination) == held(source)


def test_a_source_that_changes_meanwhile_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changing = Path(shutil.copytree(source, tmp_path / "changing"))
    write = orbax_store.ArrayWriter.write

    def touching(self: orbax_store.ArrayWriter, box: tuple[slice, ...], values: np.ndarray) -> None:
        os.utime(changing / "config.json")
        write(self, box, values)

    monkeypatch.setattr(orbax_store.ArrayWriter, "write", touching)
    with pytest.raises(CheckpointError, match="changing: its files changed while they were read; remove .*model.partial"):
        convert(Conversion.of(changing, tmp_path / "model"), quiet=True)
    assert not (tmp_path / "model").exists()


def test_one_process_at_a_time(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversion = stopped(source, tmp_path / "model", monkeypatch, 3)
    with (
        Journal(conversion.partial / JOURNAL, json.loads(json.dumps(conversion.identity()))),
        pytest.raises(CheckpointError, match=r"model.partial: another process is converting into it"),
    ):
        convert(conversion, quiet=True)
