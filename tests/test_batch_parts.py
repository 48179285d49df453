"""The parts of a batch: its two files, what it tells while it runs, and what it counts."""

from __future__ import annotations

import io
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from inkling_jax.batch import lines as lines_module
from inkling_jax.batch.lines import numbered_lines, open_input
from inkling_jax.batch.progress import Progress, time_text
from inkling_jax.batch.records import Outcome
from inkling_jax.batch.request import Defaults, Job, Refused, read_line
from inkling_jax.batch.results import ResultFile
from inkling_jax.batch.summary import Summary, oddities, repeats
from inkling_jax.batch.survey import Marks, Shard, survey
from inkling_jax.engine.request import SamplingParams
from inkling_jax.errors import InputError

ALL = Shard()
PRIORITIES = (0, 7, None, 0, -100, 100, None, 1)
DEFAULTS = Defaults(SamplingParams(max_tokens=7, temperature=0.5), "low", 0)


# Input


def test_numbered_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are of the file; blanks around a line, a byte order mark and the rest of a line that is too long do not count."""
    monkeypatch.setattr(lines_module, "MAX_LINE", 8)
    file = io.BytesIO(b"\xef\xbb\xbfone\r\n\n  \n two\n" + b"x" * 30 + b"\nend")
    assert list(numbered_lines(file)) == [(1, b"one"), (4, b"two"), (5, b"x" * 8), (6, b"end")]
    assert list(numbered_lines(file))[0] == (1, b"one")  # again from the beginning


def test_a_line_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inkling_jax.batch.request.MAX_LINE", 1 << 20)
    refused = read_line(1, b'{"prompt": "' + b"x" * (1 << 20), DEFAULTS)
    assert isinstance(refused, Refused) and refused.message.startswith("the line is longer than 1 MiB")


def test_what_can_be_read_but_once_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard input and a pipe that has a name."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
    with open_input("-") as file:
        assert [list(numbered_lines(file)) for _ in range(2)] == [[(1, b"a"), (2, b"b")]] * 2
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b"c\n",))
    writer.start()
    with open_input(str(tmp_path / "pipe")) as file:
        assert [list(numbered_lines(file)) for _ in range(2)] == [[(1, b"c")]] * 2
    writer.join()


def test_defaults_and_what_a_line_says() -> None:
    job = read_line(3, b'{"prompt": "x", "top_p": 0.5, "logit_bias": {"7": 2}, "stop": null}', DEFAULTS)
    assert isinstance(job, Job) and job.head.id == 3
    wanted = SamplingParams(max_tokens=7, temperature=0.5, top_p=0.5, logit_bias={7: 2}, seed=job.params.seed)
    assert job.params == wanted and job.params.seed is not None
    job = read_line(3, b'{"messages": [{"role": "user", "content": "x"}], "seed": 5}', DEFAULTS)
    assert isinstance(job, Job) and (job.effort, job.params.seed) == ("low", 5)


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ({"priority": 1.5}, "priority must be an integer from -100 to 100, got 1.5"),
        ({"priority": True}, "priority must be an integer from -100 to 100, got True"),
        ({"priority": 101}, "priority must be an integer from -100 to 100, got 101"),
        ({"deadline": -1}, "deadline must be a number from 0 to inf, got -1"),
        ({"deadline": "9"}, "deadline must be a number from 0 to inf, got '9'"),
    ],
)
def test_when_a_line_may_run(field: dict[str, Any], told: str) -> None:
    """Its priority and its deadline are those of its request; bad ones are refused by name, in OpenAI's form all."""
    job = read_line(1, b'{"prompt": "x", "priority": -3, "deadline": 2.5}', DEFAULTS)
    assert isinstance(job, Job) and (job.priority, job.deadline) == (-3, 2.5)
    job = read_line(1, b'{"messages": [{"role": "user", "content": "x"}], "priority": 100}', DEFAULTS)
    assert isinstance(job, Job) and (job.priority, job.deadline) == (100, None)
    refused = read_line(1, json.dumps({"prompt": "x"} | field).encode(), DEFAULTS)
    assert isinstance(refused, Refused) and refused.message == told
    ((name, value),) = field.items()
    refused = read_line(1, json.dumps({"custom_id": "a", "body": {"prompt": "x", name: value}}).encode(), DEFAULTS)
    assert isinstance(refused, Refused) and refused.message == f"body.{name} is not implemented"


def test_lines_of_a_higher_priority_come_first() -> None:
    """In the order of the file among equals; those that have a record do not come, nor those that were added since."""
    given = [
        {"prompt": "x", "id": n, **({} if priority is None else {"priority": priority})} for n, priority in enumerate(PRIORITIES)
    ]
    content = [json.dumps(line).encode() for line in given]
    records = Marks()
    records.add("1", read_line(2, content[1], DEFAULTS).head.digest)
    file = io.BytesIO(b"\n".join(content))
    todo = survey(file, DEFAULTS, records, ALL, "out")
    file = io.BytesIO(b"\n".join([*content, b'{"prompt": "x", "id": 9, "priority": 100}']))
    assert [task.head.id for task in todo.tasks(file, DEFAULTS)] == [5, 7, 0, 2, 3, 6, 4]
    assert todo.left == 7 and todo.done == 1


def test_media_are_seen_before_the_model_is_loaded() -> None:
    """Whichever part holds them, in a line that can be run and has no record; not in those of others."""

    def lines(*kinds: str | None) -> io.BytesIO:
        parts = [["x"] if kind is None else ["x", {"type": kind, kind: "file"}] for kind in kinds]
        return io.BytesIO(b"\n".join(json.dumps({"messages": [{"role": "user", "content": part}]}).encode() for part in parts))

    def media(file: io.BytesIO, shard: Shard = ALL) -> bool:
        return survey(file, DEFAULTS, Marks(), shard, "out").media

    assert [media(lines(None, kind)) for kind in (None, "image", "audio", "video", "robot")] == [False, True, True, True, False]
    assert [media(lines(None, "image"), Shard(index, 2)) for index in (0, 1)] == [False, True]


# Output


def record(name: Any, **fields: Any) -> dict[str, Any]:
    return {"id": name, "text": "", "digest": "0123456789abcdef", **fields}


def test_records_are_read_back(tmp_path: Path) -> None:
    """Whatever characters an id has."""
    given = [record("a"), record("ü\u2028"), record("\ud800"), record(5)]
    with ResultFile(str(tmp_path / "f")) as file:
        assert list(file.records()) == []
        for one in given:
            file.add(one)
    with ResultFile(str(tmp_path / "f")) as file:
        assert list(file.records()) == given
    assert (tmp_path / "f").read_bytes().count(b"\n") == 4


@pytest.mark.parametrize("tail", [b"{", b'{"id"', b'{"id": "b", "te', b'{"id": "b"\0\0\0', b"\0\0\0\0"])
def test_a_last_line_without_its_end_is_cut(tail: bytes, tmp_path: Path) -> None:
    """As a kill or a power cut leaves it."""
    whole = json.dumps(record("a")).encode() + b"\n"
    (tmp_path / "f").write_bytes(whole + tail)
    with ResultFile(str(tmp_path / "f")) as file:
        assert list(file.records()) == [record("a")]
        file.add(record("c"))
    assert (tmp_path / "f").read_bytes() == whole + json.dumps(record("c")).encode() + b"\n"


@pytest.mark.parametrize(
    "content",
    [
        b"my only copy",
        b"a,b\n1,2\n",
        b'{"id": 1}\n',
        b'{"id": 1, "digest": "xyz"}\n',
        b'{"id": "a", "custom_id": "b"}\n',
        b"\n",
        b"{}",
    ],
)
def test_a_file_of_something_else_is_left_alone(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(content)
    with ResultFile(str(tmp_path / "f")) as file, pytest.raises(InputError, match="line 1 is no record of a batch"):
        list(file.records())
    assert (tmp_path / "f").read_bytes() == content


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with ResultFile(str(tmp_path / "f")), pytest.raises(InputError, match="another process is writing to it"):
        ResultFile(str(tmp_path / "f"))
    with ResultFile(str(tmp_path / "f")):
        pass


def test_records_reach_the_disk_every_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And when the file is closed."""
    now, synced = [0.0], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    with ResultFile(str(tmp_path / "f")) as file:
        list(file.records())
        for now[0] in (0.2, 0.9, 1.1, 1.5, 2.0, 2.2, 2.3):
            file.add(record("a"))
    size = len(json.dumps(record("a"))) + 1
    assert synced == [3 * size, 6 * size, 7 * size]


# What is told


def answered(name: Any, tokens: int, reason: str = "stop", text: str = "yes", **fields: Any) -> dict[str, Any]:
    return record(name, text=text, finish_reason=reason, usage={"completion_tokens": tokens}, **fields)


def test_a_summary() -> None:
    """Hundred lines of 1 to 100 tokens, some of them odd, and one error of each form; ten ids are named."""
    summary = Summary()
    for n in range(1, 101):
        summary.add(answered(n, n, "length" if n > 90 else "stop", "" if n <= 12 else "yes"))
    summary.add(answered("deep", 7, "length", "", reasoning="hm", tool_calls=[], malformed_calls=[]))
    summary.add(answered("again", 7, text="no " * 50))
    summary.add({"id": "bad", "error": "told why", "digest": "0"})
    summary.add({"id": "batch_req_0", "custom_id": "c", "response": None, "error": {"message": "told", "code": "x"}})
    choices = [
        {"message": {"content": None, "tool_calls": [1]}, "finish_reason": "tool_calls"},
        {"text": "", "finish_reason": "stop"},
    ]
    body = {"choices": choices, "usage": {"completion_tokens": 300}}
    summary.add({"id": "batch_req_1", "custom_id": "d", "response": {"body": body}, "error": None})
    assert summary.lines == 105
    assert summary.report() == [
        "ended by: stop 92, length 11, error 2, tool_calls 1",
        "tokens a line: least 1, 5% 6, median 50, 95% 96, most 300; 5,364 in all",
        "error: 2, id 'bad' (told why), 'c' (told)",
        "unclosed thinking: 1, id 'deep'",
        "repetition: 1, id 'again'",
        "empty: 13, id 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 3 more",
    ]


@pytest.mark.parametrize(
    ("reason", "text", "reasoning", "called", "odd"),
    [
        ("stop", "yes", "hm", False, []),
        ("stop", " \n", "", False, ["empty"]),
        ("stop", "", "hm", False, ["empty"]),
        ("stop", "", "hm", True, []),
        ("length", "", "hm", False, ["unclosed thinking"]),
        ("length", "", "no " * 50, False, ["unclosed thinking", "repetition"]),
        ("length", "yes", "hm", False, []),
    ],
)
def test_oddities(reason: str, text: str, reasoning: str, called: bool, odd: list[str]) -> None:
    assert oddities(Outcome(reason, text, reasoning, called)) == odd


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", False),
        ("a" * 119, False),
        ("a" * 120, True),
        ("Well, " + "a" * 120, True),
        ("a" * 120 + "b", False),
        (" " * 500, False),
        ("x".join(map(str, range(300))), False),
        ("The cat sat on the mat, and then it slept. " * 3, False),
        ("The cat sat on the mat, and then it slept. " * 4, True),
        ("".join(map(str, range(90))) * 4, True),  # 170 characters
        ("".join(map(str, range(110))) * 4, False),  # 220 characters
    ],
)
def test_repetition(text: str, found: bool) -> None:
    assert repeats(text) == found


def test_progress_in_plain_lines() -> None:
    """Every ten seconds; the rates are of the last minute, and so is the time that is left."""
    now, stream = [0.0], io.StringIO()
    with Progress(1200, quiet=False, stream=stream, clock=lambda: now[0]) as progress:
        for second in range(1, 121):
            now[0] = float(second)
            done = second if second <= 60 else 60 + 9 * (second - 60)
            progress.update(done, 100 * second)
        progress.update(601, 12000)  # too soon to be shown, but it counts
    told = stream.getvalue().splitlines()
    assert len(told) == 12
    assert told[0] == "batch: 10 of 1,200 lines, 100.0 tokens/s, 1.00 requests/s, 19 min 50 s left"
    assert told[-1] == "batch: 600 of 1,200 lines, 100.0 tokens/s, 9.00 requests/s, 1 min 7 s left"
    assert progress.average() == "601 lines in 2 min 0 s: 5.01 requests/s, 100.0 tokens/s"


def test_progress_at_a_terminal_and_quiet() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream, now = Terminal(), [0.0]
    with Progress(10, quiet=False, stream=stream, clock=lambda: now[0]) as progress:
        now[0] = 4.0
        progress.update(8, 40)
    assert re.search(r"8/10.*10\.0 tokens/s, 2\.00 requests/s, 1\.0 s left", stream.getvalue())
    stream = Terminal()
    with Progress(10, quiet=True, stream=stream) as progress:
        progress.update(8, 40)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.14, "3.1 s"), (59, "59 s"), (61, "1 min 1 s"), (3600 * 5 + 120, "5 h 2 min"), (86400 * 2 + 3600, "2 d 1 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_shards_share_all_lines() -> None:
    parts = [{n for n in range(1, 20) if Shard(i, 4).holds(n)} for i in range(4)]
    assert set.union(*parts) == set(range(1, 20)) and sum(map(len, parts)) == 19 and parts[0] == {1, 5, 9, 13, 17}
