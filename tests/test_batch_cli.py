"""A batch as a user meets it, with a real model: the same results however it is run, and what is refused at once."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from text_checkpoint import write_text_checkpoint

import inkling_jax
from inkling_jax import LLM, SamplingParams
from inkling_jax.generate import main

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = ("--dtype", "float32", "--max-context", "64", "--slots", "2", "--page-size", "16", "--max-tokens", "12")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("batch") / "model")


def write(path: Path, count: int) -> Path:
    lines = [{"id": f"line {n}", "max_tokens": 1 + n % 12, "prompt": f"Tell {n % 9}"} for n in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path) -> dict[str | int, dict]:
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    found = {record["id"]: record for record in records}
    assert len(found) == len(records)
    return found


@pytest.fixture(scope="module")
def loaded(directory: Path) -> Iterator[LLM]:
    """As the command loads it."""
    with inkling_jax.load(directory, dtype="float32", max_context=64, slots=2, page_size=16, quiet=True) as llm:
        yield llm


@pytest.fixture
def one_model(loaded: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """What the command finds loaded, and does not close."""
    monkeypatch.setattr("inkling_jax.llm.load", lambda *_, **__: loaded)
    monkeypatch.setattr("inkling_jax.generate.start_jax", lambda: "cpu")
    monkeypatch.setattr(LLM, "close", lambda self: None)
    return loaded


def test_a_batch_of_a_real_model(directory: Path, one_model: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line's tokens are those that it has alone; resumed from the middle, and in two shards, all comes to the same."""
    source, whole = write(tmp_path / "in.jsonl", 12), tmp_path / "whole.jsonl"

    def command(output: Path, *more: str) -> int:
        return main(["--model", str(directory), "--input", str(source), "--output", str(output), *OPTIONS, *more])

    assert command(whole) == 0
    told = capsys.readouterr()
    assert told.out == "" and "in.jsonl: 12 lines\n" in told.err and "whole.jsonl: 12 records\nended by: " in told.err
    records = read(whole)
    for line in map(json.loads, source.read_text().splitlines()):
        record = records[line["id"]]
        params = SamplingParams(max_tokens=line["max_tokens"], seed=seed_of(line["id"]))
        (alone,) = one_model.generate(line["prompt"], params)
        assert tuple(record["token_ids"]) == alone.token_ids and record["finish_reason"] == alone.finish_reason
    resumed = tmp_path / "resumed.jsonl"
    resumed.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    assert command(resumed, "--quiet") == 0 and read(resumed) == records
    assert capsys.readouterr() == ("", "")
    for n in range(2):
        assert command(tmp_path / f"part{n}", "--shard", f"{n}/2") == 0
    assert read(tmp_path / "part0") | read(tmp_path / "part1") == records
    assert len(read(tmp_path / "part0")) == 6


def seed_of(name: str) -> int:
    """The seed of a line without one, by its definition: 63 bits of a hash of --seed, which is 0, and the id as JSON."""
    import hashlib

    data = b"[1, %d]" % (len(name) + 2) + b"0" + json.dumps(name).encode()
    return int(hashlib.blake2b(data, digest_size=8).hexdigest(), 16) >> 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--input", "{in}"), "--input and --output belong together, and --output is missing"),
        (("--output", "{tmp}/out"), "--input and --output belong together, and --input is missing"),
        (("--input", "{tmp}/no", "--output", "{tmp}/out"), "/no: No such file or directory"),
        (("--input", "{tmp}", "--output", "{tmp}/out"), "is a directory; a file of JSON lines would be right"),
        (("--input", "{in}", "--output", "{tmp}"), "Is a directory"),
        (("--input", "{in}", "--output", "{tmp}/no/out"), "there is no directory"),
        (("--input", "{in}", "--output", "{in}"), "in.jsonl"),
        (("--input", "{in}", "--output", "/dev/null"), "--output /dev/null: not a regular file"),
        (("--input", "{in}", "--output", "/proc/version"), "--output /proc/version: "),
        (("--input", "{in}", "--output", "{tmp}/out", "--raw"), "--raw belongs to a single prompt"),
        (("--input", "{in}", "--output", "{tmp}/out", "--image", "a.png"), "--image belongs to a single prompt"),
        (("--input", "{in}", "--output", "{tmp}/out", "--system", "a"), "--system belongs to a single prompt"),
        (("--input", "{in}", "--output", "{tmp}/out", "--slots", "0"), "--slots must be at least 1, got 0"),
        (("--input", "{in}", "--output", "{tmp}/out", "--effort", "huge"), "effort 'huge' is none of"),
        (("--input", "{in}", "--output", "{tmp}/out", "--temperature", "-1"), "--temperature must be a number from 0 to 100"),
        (("--prompt", "x", "--shard", "1/2"), "--shard belongs to --input"),
        (("--prompt", "x", "--slots", "8"), "--slots belongs to --input"),
    ],
)
def test_what_is_refused(
    options: tuple[str, ...], told: str, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, before weights are read, and no file is touched."""
    source = write(tmp_path / "in.jsonl", 1)
    content = source.read_bytes()
    given = [option.replace("{in}", str(source)).replace("{tmp}", str(tmp_path)) for option in options]
    assert main(["--model", str(directory), *given]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and told in err and err.count("\n") == 1, err
    assert source.read_bytes() == content and not (tmp_path / "out").exists()


@pytest.mark.parametrize("shard", ["2/2", "1", "a/b", "-1/2", "0/0"])
def test_what_is_no_shard(shard: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", "x", f"--shard={shard}"])
    assert f"argument --shard: {shard!r} is no part of a whole: 0/4 to 3/4" in capsys.readouterr().err


def test_the_input_by_another_name_is_no_output(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty file, which could be taken for results."""
    (tmp_path / "in").touch()
    (tmp_path / "link").symlink_to(tmp_path / "in")
    assert main(["--model", str(directory), "--input", f"{tmp_path}/in", "--output", f"{tmp_path}/link"]) == 2
    assert "is the input: give another file" in capsys.readouterr().err


def test_standard_input(directory: Path, one_model: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b'{"prompt": [1, 2], "max_tokens": 3}\n{"prompt": [300]}\n'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    output = tmp_path / "out.jsonl"
    assert main(["--model", str(directory), "--input", "-", "--output", str(output), *OPTIONS]) == 0
    found = read(output)
    assert len(found[1]["token_ids"]) == 3
    assert found[2]["error"] == "token 0 of the prompt is 300: ids are integers from 0 to 299"


def test_an_adapter_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory as PEFT writes it, without a config.json."""
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "some/model"}')
    (tmp_path / "adapter_model.safetensors").touch()
    for more in (("--prompt", "x"), ("--input", str(write(tmp_path / "in", 1)), "--output", str(tmp_path / "out"))):
        assert main(["--model", str(tmp_path), *more]) == 2
        told = capsys.readouterr().err
        assert "LoRA adapter layout is not supported: found adapter_config.json; merge it into the model" in told
        assert "(some/model)" in told and told.count("\n") == 1


@pytest.mark.slow
def test_processes_killed_twenty_times(directory: Path, tmp_path: Path) -> None:
    """The command itself, 500 lines: unique, whole, and equal to those of an undisturbed run; then SIGTERM, which it heeds."""
    source, told = write(tmp_path / "in.jsonl", 500), random.Random(0)
    environment = {**os.environ, "XLA_FLAGS": "", "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def start(name: str) -> subprocess.Popen[bytes]:
        files = ("--input", str(source), "--output", str(tmp_path / name))
        command = [sys.executable, "-m", "inkling_jax.generate", "--model", str(directory), *files, *OPTIONS]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def size(name: str) -> int:
        return (tmp_path / name).stat().st_size if (tmp_path / name).exists() else 0

    with start("whole.jsonl") as process:
        process.communicate()
    assert process.returncode == 0
    whole = read(tmp_path / "whole.jsonl")
    for kill in range(21):
        until = size("out.jsonl") + told.randint(1, size("whole.jsonl") // 15)
        with start("out.jsonl") as process:
            while size("out.jsonl") < until and process.poll() is None:
                time.sleep(0.002)
            process.send_signal(signal.SIGTERM if kill == 20 else signal.SIGKILL)
            messages = process.communicate()[1]
        assert process.returncode == (128 + signal.SIGTERM if kill == 20 else -signal.SIGKILL), messages
    assert b"stopped by SIGTERM: " in messages and b"Traceback" not in messages
    with start("out.jsonl") as process:
        process.communicate()
    assert process.returncode == 0 and len(whole) == 500 and read(tmp_path / "out.jsonl") == whole
