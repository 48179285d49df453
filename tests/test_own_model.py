"""The small model that comes with the package: found by its name, used where none is named, and small enough to come along."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from PIL import Image, ImageDraw
from text_checkpoint import write_text_checkpoint

import inkling_jax
from inkling_jax import sources
from inkling_jax.config import ModelConfig
from inkling_jax.generate_options import make_parser
from inkling_jax.planning import answer
from inkling_jax.sources import NANO, find_source, own_model

ROOT = Path(__file__).resolve().parents[1]
shipped = pytest.mark.skipif(own_model() is None, reason="this copy comes without the model")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint in the place of the package's own."""
    directory = write_text_checkpoint(tmp_path / "nano")
    monkeypatch.setattr(sources, "NANO", directory)
    return directory


def test_its_name_finds_it(stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To load and to plan; a directory of that name comes first, and what is no name lists it."""
    assert find_source("nano", "checkpoint") == stand_in
    by_name, by_path = (answer(name, device_memory="1GB", context=64) for name in ("nano", str(stand_in)))
    assert by_name.files == by_path.files and by_name.memory == by_path.memory
    with pytest.raises(inkling_jax.InputError, match=r"'nanoo': neither a directory nor the package's own \(nano\) nor a preset"):
        find_source("nanoo", "checkpoint")
    (tmp_path / "here" / "nano").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert find_source("nano", "checkpoint") == Path("nano")


def test_it_is_what_generates_where_no_model_is_named(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_parser().parse_args(["--prompt", "x"]).model == "nano"
    assert make_parser().parse_args(["--prompt", "x", "--model", "other"]).model == "other"
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--help"])
    assert "nano, the default: the package's own" in " ".join(capsys.readouterr().out.split())


def test_without_it_a_model_must_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources, "NANO", tmp_path / "nano")
    with pytest.raises(SystemExit) as stopped:
        make_parser().parse_args(["--prompt", "x"])
    assert stopped.value.code == 2 and "the following arguments are required: --model" in capsys.readouterr().err
    with pytest.raises(inkling_jax.InputError, match=r"'nano': neither a directory nor a preset \(inkling,"):
        find_source("nano", "checkpoint")


def test_nothing_keeps_its_files_out_of_a_package() -> None:
    """A build leaves out what git ignores."""
    if not (ROOT / ".git").exists():
        pytest.skip("no working copy")
    files = [NANO / name for name in ("config.json", "model-00001-of-00001.safetensors", "mtp.safetensors", "tokenizer.json")]
    assert subprocess.run(["git", "check-ignore", *files], cwd=ROOT, capture_output=True).returncode == 1


@shipped
def test_it_is_small_and_whole() -> None:
    """At most 12 MB, experts in NVFP4 with their largest inputs, towers, a draft head and a tokenizer."""
    config = ModelConfig.from_directory(NANO)
    assert sum(file.stat().st_size for file in NANO.iterdir()) <= 12_000_000
    assert config.quant_algo == "NVFP4" and config.vision and config.audio and config.mtp
    plan = answer("nano", device_memory="1GB", draft=True)
    assert plan.files.draft == 0 and plan.memory.weights["draft head"] > 0 and plan.memory.weights["towers"] > 0
    assert (NANO / "tokenizer.json").is_file()


@shipped
@pytest.mark.slow
def test_it_answers() -> None:
    """What a person recognises, always the likeliest token."""
    with inkling_jax.load("nano", slots=1, quiet=True) as llm:
        greedy = inkling_jax.SamplingParams(temperature=0, max_tokens=200)

        def ask(content: object) -> str:
            return llm.chat([{"role": "user", "content": content}], sampling=greedy).content

        assert ask("What is 12 + 7?") == "12 + 7 = 19"
        picture = Image.new("RGB", (64, 64), "red")
        assert "red square" in ask([{"type": "image", "image": picture}, "What is in this picture?"])
        picture = Image.new("RGB", (38, 38), "white")
        ImageDraw.Draw(picture).rectangle((8, 8, 28, 28), fill=(220, 20, 20))
        assert "red square" in ask([{"type": "image", "image": picture}, "What is in this picture?"])
