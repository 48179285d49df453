"""scripts/parity.py: what it counts, for models that are wrong in a known way."""

from __future__ import annotations

import contextlib
import importlib
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_checkpoint import write_text_checkpoint

from inkling_jax.benchmarks.ceilings import ReadCeiling
from inkling_jax.benchmarks.rows import read_rows
from inkling_jax.command_line import run
from inkling_jax.llm import LLM

LENGTHS = (24, 40)
EDGES, CLEAR = (0.0, 0.15), 0.4


@pytest.fixture(scope="module")
def parity() -> Any:
    """The script as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).resolve().parents[1] / "scripts")
        return importlib.import_module("parity")


class Compared:
    """A model of two layers, prompts, and the logits of these read whole."""

    def __init__(self, parity: Any, folder: Path):
        self.parity, self.directory = parity, folder / "model"
        write_text_checkpoint(self.directory, num_hidden_layers=2, local_layer_ids=[0])
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, 256, n).tolist() for n in LENGTHS]
        self.file = folder / "prompts.json"
        self.file.write_text(json.dumps(prompts))
        wanted = types.SimpleNamespace(dtype="float32", mesh=None, max_context=64)
        self.llm: LLM = parity.open_model(self.directory, "reference", wanted)
        self.logits = [self.llm.score(ids) for ids in prompts]
        ids, counts = np.unique(np.concatenate(self.logits).argmax(1), return_counts=True)
        self.exchanged = ids[np.argsort(-counts, kind="stable")[:6]]  # best most often

    def run(self, where: str, *options: str) -> int:
        """The script's exit code where the tested implementation says one common token for another."""

        @contextlib.contextmanager
        def open_model(_: Path, kernels: str, __: Any) -> Iterator[LLM]:
            engine = self.llm.engine
            sound = engine.leaves, engine.programs
            if kernels == "sm90":
                self.spoil(where)
            yield self.llm
            engine.leaves, engine.programs = sound

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.parity, "open_model", open_model)
            patch.setattr(self.parity, "EDGES", EDGES)
            files = ["--model", str(self.directory), "--prompts", str(self.file)]
            return self.parity.main([*files, "--clear", str(CLEAR), *options])

    def spoil(self, where: str) -> None:
        """Rows of the head change places: everywhere, or in decode steps alone."""
        engine = self.llm.engine
        sound, leaves, head = engine.programs, list(engine.leaves), engine.programs.paths.index("unembed")
        leaves[head] = leaves[head].at[self.exchanged].set(leaves[head][np.roll(self.exchanged, 1)])
        if where == "everywhere":
            engine.leaves = leaves
        elif where == "decode":
            programs: Any = types.SimpleNamespace(**vars(sound))
            programs.decode = lambda _, *rest, **more: sound.decode(leaves, *rest, **more)
            engine.programs = programs

    def wanted(self, chunks: bool, decode: bool) -> list[list[int]]:
        """What the table should hold; the first token of a prompt is not decoded."""
        rows = []
        for least, below in zip((*EDGES, CLEAR), (*EDGES[1:], CLEAR, np.inf), strict=True):
            counts = [0, 0, 0, 0]
            for logits in self.logits:
                ordered = np.sort(logits, axis=1)
                gap, hit = ordered[:, -1] - ordered[:, -2], np.isin(logits.argmax(1), self.exchanged)
                assert (np.abs(gap - least) > 1e-4).all(), "a gap so near an edge that rounding decides"
                inside = (gap >= least) & (gap < below)
                found = inside.sum(), (inside & hit).sum() * chunks, inside[1:].sum(), (inside & hit)[1:].sum() * decode
                counts = [a + int(b) for a, b in zip(counts, found, strict=True)]
            rows.append(counts)
        return rows


@pytest.fixture(scope="module")
def compared(parity: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compared]:
    made = Compared(parity, tmp_path_factory.mktemp("parity"))
    with made.llm:
        yield made


def counts(text: str) -> list[list[int]]:
    """The numbers of a table, a list a line."""
    return [[int(number) for number in line.removesuffix("(clear)").split()[3:]] for line in text.splitlines()[1:]]


@pytest.mark.parametrize(
    ("where", "chunks", "decode"), [("nowhere", False, False), ("everywhere", True, True), ("decode", False, True)]
)
def test_counts_by_gap(where: str, chunks: bool, decode: bool, compared: Compared, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens that change places are otherwise wherever one of them is best; exit 1 since some choices are clear."""
    code, right = compared.run(where), compared.wanted(chunks, decode)
    assert counts(capsys.readouterr().out) == right
    assert right[-1][2] > 3 and (where == "nowhere" or right[-1][3] > 0), "no clear choice: this would show nothing"
    assert code == (where != "nowhere")


def test_unclear_choices_may_differ(compared: Compared, capsys: pytest.CaptureFixture[str]) -> None:
    """Above the widest gap nothing is clear."""
    assert compared.run("everywhere", "--clear", "1000") == 0
    *unclear, clear = counts(capsys.readouterr().out)
    assert clear == [0, 0, 0, 0] and sum(row[1] for row in unclear) > 0


def test_the_row_of_results(compared: Compared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over the bands, and those of the clear one."""
    monkeypatch.setattr(compared.parity, "read_ceiling", lambda _: ReadCeiling(1e9, "none", 1e9))
    assert compared.run("decode", "--output", str(tmp_path / "rows.json")) == 1
    (row,) = read_rows(tmp_path / "rows.json")
    right = np.array(compared.wanted(False, True))
    names = ("chunks_tokens", "chunks_otherwise", "decoded_tokens", "decoded_otherwise")
    assert [row[name] for name in names] == right.sum(0).tolist() and row["decoded_tokens"] == sum(LENGTHS) - len(LENGTHS)
    assert [row["chunks_clear"], row["chunks_clear_otherwise"]] == right[-1, :2].tolist()
    assert [row["decoded_clear"], row["decoded_clear_otherwise"]] == right[-1, 2:].tolist()
    assert (row["case"], row["kernels"], row["against"], row["tokens"]) == ("model bfloat16", "sm90", "reference", max(LENGTHS))


def test_kernels_that_cannot_run_here(parity: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit 2, and nothing was computed before."""
    assert run(lambda: parity.main([])) == 2
    assert capsys.readouterr().err == "error: kernels='sm90': cpu is not a Hopper GPU\n"


@pytest.mark.parametrize(("text", "message"), [("[", "not JSON"), ("{}", "expected a list"), ("[]", "expected a list")])
def test_files_without_prompts(text: str, message: str, parity: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.json").write_text(text)
    assert run(lambda: parity.main(["--model", str(tmp_path), "--prompts", str(tmp_path / "p.json")])) == 2
    assert message in capsys.readouterr().err
    assert run(lambda: parity.main(["--model", str(tmp_path)])) == 2
    assert "go together" in capsys.readouterr().err
