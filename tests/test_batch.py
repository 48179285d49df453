"""Batches as a whole: every line has one whole record, whatever is wrong with the line and whatever ends the process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import interrupted_batches as batches
import pytest
from interrupted_batches import CONTEXT, SLOTS, AnsweringEngine, answer_to
from PIL import Image
from scripted import CALL, END, MODEL, OVER, SAY, THINK, demo_tokenizer, ids_of, llm_over, scripted_llm

from inkling_jax.batch.request import Defaults
from inkling_jax.batch.run import Batch
from inkling_jax.batch.runner import AHEAD
from inkling_jax.batch.survey import Shard, Survey
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.errors import CapacityError, InputError
from inkling_jax.inputs.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
USER = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    demo_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory, None)


def write(path: Path, lines: list[Any]) -> Path:
    """A file of lines: objects as JSON, text and bytes as they are."""
    path.write_bytes(b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    assert data.endswith(b"\n") or not data
    return [json.loads(line) for line in data.splitlines()]


def by_id(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Records without what depends on the time, by id."""
    found = {}
    for record in records:
        body = (record.get("response") or {}).get("body", {})
        body.pop("created", None)
        found[json.dumps(record.get("custom_id", record["id"]))] = record
    assert len(found) == len(records)
    return found


Run = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture
def run(tokenizer: Tokenizer, tmp_path: Path) -> Run:
    """`run(lines, engine or LLM)`: the exit code of a batch, and the records that are there then."""

    def call(lines: list[Any], engine: Any = None, output: str = "out.jsonl", **options: Any) -> tuple[int, list[dict[str, Any]]]:
        llm = engine if hasattr(engine, "calls") else llm_over(engine or AnsweringEngine(), tokenizer)
        defaults = Defaults(SamplingParams(max_tokens=50), options.pop("effort", None), options.pop("seed", 0))
        given = {"slots": SLOTS, **options}
        source = write(tmp_path / "in.jsonl", lines)
        batch = Batch(str(source), str(tmp_path / output), defaults, "some", lambda media: llm, **given)
        return batch.run(), read(tmp_path / output)

    return call


def lines_of(count: int) -> list[dict[str, Any]]:
    """Prompts of every form, some without an id."""
    lines: list[dict[str, Any]] = []
    for n in range(count):
        body = {"model": "m", "messages": USER, "max_tokens": 5 + n % 9}
        form = n % 4
        if form == 0:
            lines.append({"id": f"line {n}", "prompt": f"Tell {n}"})
        elif form == 1:
            lines.append({"prompt": [1, 2, 3 + n % 90], "max_tokens": 4})
        elif form == 2:
            lines.append({"id": 1000 + n, "messages": USER, "effort": "low"})
        else:
            lines.append({"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": body | {"n": 1 + n % 3}})
    return lines


def test_records_of_every_form(run: Run, tokenizer: Tokenizer) -> None:
    """What the engine was asked for each line is in its record, the seed is of the id, and no more runs at once than may."""
    engine = AnsweringEngine()
    code, records = run(lines_of(40), engine)
    assert code == 0 and engine.most <= SLOTS + 2 and engine.closed  # the n samples of a line are added together
    found = by_id(records)
    assert len(found) == 40 and found.keys() == {json.dumps([f"line {n}", n + 1, 1000 + n, f"c{n}"][n % 4]) for n in range(40)}
    texts = sorted(record["text"] for record in records if "text" in record and "reasoning" not in record)
    wanted = [tokenizer.decode(answer_to(r)[0]) for r in engine.requests if tokenizer.decode(r.prompt_ids).startswith("Tell")]
    wanted += [tokenizer.decode(answer_to(r)[0]) for r in engine.requests if r.prompt_ids[:2] == (1, 2)]
    assert texts == sorted(wanted) and len(texts) == 20
    seeds = {r.params.seed for r in engine.requests}
    assert len(seeds) == 40 and None not in seeds
    request = next(r for r in engine.requests if tokenizer.decode(r.prompt_ids) == "Tell 8")
    ids, reason = answer_to(request)
    usage = {"prompt_tokens": len(tokenizer.encode("Tell 8")), "completion_tokens": len(ids)}
    record = found['"line 8"']
    assert record.pop("digest")
    assert record == {
        "id": "line 8", "text": tokenizer.decode(ids), "token_ids": list(ids), "finish_reason": reason, "usage": usage
    }  # fmt: skip


def test_a_result_depends_on_neither_order_nor_company_nor_resumption(run: Run) -> None:
    lines = lines_of(40)
    named = [line | ({} if "custom_id" in line else {"id": line.get("id", n + 1)}) for n, line in enumerate(lines)]
    first = by_id(run(named)[1])
    backwards = by_id(run(named[::-1], output="back.jsonl", slots=1)[1])
    assert backwards == first
    assert by_id(run(named, output="seed.jsonl", seed=1)[1]) != first


def test_killed_twenty_times(tmp_path: Path, directory: Path, tokenizer: Tokenizer) -> None:
    """500 unique whole lines, equal to those of a run that nobody disturbed."""
    source = write(tmp_path / "in.jsonl", [*lines_of(497), b"{broken", {"id": "line 0", "prompt": "again"}, {"id": "x"}])
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert batches.run(source, whole, tokenizer) == 0
    command = [sys.executable, str(ROOT / "tests/interrupted_batches.py"), str(source), str(output), "20", str(directory)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["code"] == 0 and len(told["sizes"]) == 20
    assert len({*told["sizes"]}) > 10 and 0 < told["sizes"][10] and told["sizes"][-1] < whole.stat().st_size
    records, undisturbed = read(output), read(whole)
    assert len(records) == len(undisturbed) == 500
    repeated = [[r for r in found if r.get("error") == "line 499 repeats the id of line 1"] for found in (records, undisturbed)]
    assert repeated[0] == repeated[1] and len(repeated[0]) == 1
    assert by_id([r for r in records if r not in repeated[0]]) == by_id([r for r in undisturbed if r not in repeated[0]])


def test_cut_anywhere(run: Run, tmp_path: Path) -> None:
    """Wherever the file is cut, what is whole stays as it is, what is not is made again, and nothing is there twice."""
    lines = [{"prompt": "ü"}, {"prompt": "ü"}, {"custom_id": "c", "body": {"prompt": "b"}}, b"[]", {"id": "ü", "prompt": "c"}]
    output = tmp_path / "out.jsonl"
    whole = by_id(run(lines)[1])
    data = output.read_bytes()
    last = data.rfind(b"\n", 0, -1)
    for cut in (*range(0, last, 23), *range(last, len(data), 3)):
        output.write_bytes(data[:cut])
        code, records = run(lines)
        assert code == 0 and by_id(records) == whole, cut
        kept = data[: data.rfind(b"\n", 0, cut) + 1]
        assert output.read_bytes().startswith(kept)


BAD = [
    (b"{", "not JSON: "),
    (b"\xff{}", "not JSON: 'utf-8' codec can't decode byte 0xff"),
    (b'{"prompt": "x", "temperature": NaN}', "not JSON: NaN is no JSON number"),
    (b"[" * 100_000, "not JSON: "),
    (b'["prompt"]', "a line is a JSON object, not list"),
    ({"prompt": "x", "temprature": 1}, "unknown field 'temprature': did you mean 'temperature'?"),
    ({"prompt": "x", "qqq": 1}, "unknown field 'qqq': known are id, prompt, "),
    ({"prompt": "x", "messages": USER}, "a line has either prompt or messages, this one has both"),
    ({"id": "a"}, "a line has either prompt or messages, this one has neither"),
    ({"prompt": ""}, "prompt must be one text or one list of token ids"),
    ({"prompt": ["a", "b"]}, "prompt must be one text or one list of token ids"),
    ({"prompt": [1, True]}, "prompt must be one text or one list of token ids"),
    ({"prompt": [1, 300]}, None),  # for the engine to say
    ({"prompt": "\ud800"}, "lone surrogate"),
    ({"prompt": "x", "tools": [TOOL]}, "tools belongs to a chat: give messages"),
    ({"prompt": "x", "n": 2}, "n: a line has one answer"),
    ({"prompt": "x", "temperature": -1}, "temperature must be a number from 0 to 100, got -1"),
    ({"prompt": "x", "max_tokens": "9"}, "max_tokens must be an integer"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias must map token ids to numbers, 'a' is none"),
    ({"prompt": "x", "stop": [""]}, "stop must hold strings that are not empty"),
    ({"id": 1.5, "prompt": "x"}, "id must be a string or an integer, not float"),
    ({"id": True, "prompt": "x"}, "id must be a string or an integer, not bool"),
    ({"messages": []}, "messages is empty"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role is 'robot'"),
    ({"messages": USER, "effort": "huge"}, "effort 'huge' is none of"),
    ({"messages": USER, "tools": [{}]}, "tools[0].function must be an object"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "image": "no.png"}]}]}, "image 0: no.png: no such file"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "http://a/b"}]}]}, "is not fetched"),
    ({"messages": [{"role": "user", "content": [{"type": "video", "video": "no.mp4"}]}]}, "no.mp4: no such file"),
    ({"prompt": "x" * 999}, f"tokens, the context holds {CONTEXT}"),
    ({"custom_id": "a"}, "body is missing"),
    ({"custom_id": "a", "body": []}, "body must be an object"),
    ({"custom_id": "a", "id": "b", "body": {}}, "id is no field of a batch request"),
    ({"custom_id": "a", "method": "GET", "body": {}}, "method must be POST, got 'GET'"),
    ({"custom_id": "a", "url": "/v1/embeddings", "body": {}}, "url '/v1/embeddings' is not implemented"),
    ({"custom_id": ["a"], "body": {"prompt": "x"}}, "custom_id must be a string or an integer, not list"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "told"), BAD, ids=range(len(BAD)))
def test_a_bad_line_is_a_record(line: Any, told: str | None, run: Run) -> None:
    """And those before and after it have theirs."""
    code, records = run([{"prompt": "a"}, line, {"prompt": "b"}])
    assert code == 0 and len(records) == 3
    openai = isinstance(line, dict) and "custom_id" in line
    name = line["custom_id"] if openai and isinstance(line["custom_id"], str) else "2" if openai else 2
    if isinstance(line, dict) and line.get("id") == "a":
        name = "a"
    (record,) = (r for r in records if r.get("custom_id", r["id"]) == name)
    if told is None:
        assert record["usage"]["prompt_tokens"] == 2
    elif openai:
        assert told in record["error"]["message"] and record["response"] is None
    else:
        assert told in record["error"] and record.keys() == {"id", "error", "digest"}
    assert by_id(run([{"prompt": "a"}, line, {"prompt": "b"}])[1]) == by_id(records)


def test_ids(run: Run) -> None:
    """A missing id is the number of the line, blank ones counted; 3 and "3" are two ids; every repetition has its record."""
    a, again = {"prompt": "a"}, {"id": "x", "prompt": "c"}
    lines = [a, b"", {"id": "3", "prompt": "a"}, b"  ", {"id": None, "prompt": "b"}, {"id": 1, "prompt": "b"}]
    code, records = run([*lines, again, again, again])
    assert code == 0
    assert sorted(json.dumps(record["id"]) for record in records) == ['"3"', '"x"', '"x"', '"x"', "1", "1", "5"]
    errors = {record["error"] for record in records if "error" in record}
    assert errors == {f"line {n} repeats the id of line {m}" for n, m in ((6, 1), (8, 7), (9, 7))}
    assert run([*lines, again, again, again])[1] == records


def test_a_repetition_may_have_its_record_first(run: Run, tmp_path: Path) -> None:
    """As a kill leaves it, the line that is repeated being in the engine: that one is then run, not taken for changed."""
    lines = [{"id": "x", "prompt": "a"}, {"id": "x", "prompt": "b"}]
    records = run(lines)[1]
    first, error = sorted(records, key=lambda record: "error" in record)
    write(tmp_path / "out.jsonl", [error])
    assert run(lines) == (0, [error, first])


def test_a_changed_line_is_refused(run: Run) -> None:
    """A record is written once: neither another line nor other settings may lead to it. More lines may come."""
    lines = [{"id": "x", "prompt": "a"}, {"id": "y", "prompt": "b"}]
    records = run(lines)[1]
    for changed, options in (([lines[0], {"id": "y", "prompt": "c"}], {}), (lines, {"seed": 1}), (lines, {"effort": "low"})):
        with pytest.raises(
            InputError, match=r"holds a record with the id of line [12] \([12] such lines\), made from another line"
        ):
            run(changed, **options)
    code, more = run([{"id": "z", "prompt": "d"}, *lines])
    assert code == 0 and more[:2] == records and more[2]["id"] == "z" and len(more) == 3


def test_nothing_to_run_loads_nothing(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """A batch that is done, then with a line that repeats an id, and one of errors alone."""
    lines = [{"prompt": "a"}, {"prompt": ""}]
    run(lines)
    engine = AnsweringEngine()
    repeated = [*lines, {"id": 1, "prompt": "b"}]
    for given, output in (
        (lines, "out.jsonl"), (repeated, "out.jsonl"), ([b"{", b"}"], "errors.jsonl"), ([], "empty.jsonl")
    ):  # fmt: skip
        code, records = run(given, engine, output)
        assert code == 0 and len(records) == len(given) and not engine.closed
    assert "in.jsonl holds no line" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it(number: signal.Signals, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """The step is finished, what runs is dropped, the exit code names the signal, and the same command goes on."""
    before = signal.getsignal(number)
    engine = AnsweringEngine()
    step = engine.step

    def stopped_step() -> list:
        if engine.steps == 10:
            signal.raise_signal(number)
        return step()

    engine.step = stopped_step
    try:
        signal.signal(number, signal.default_int_handler)  # the process may have been started to ignore it
        code, records = run(lines_of(40), engine)
    finally:
        signal.signal(number, before)
    assert code == 128 + number and 0 < len(records) < 40 and engine.steps == 11 and engine.closed
    assert f"stopped by {number.name}: {40 - len(records)} lines have no record yet" in caplog.text
    code, all_records = run(lines_of(40))
    assert code == 0 and all_records[: len(records)] == records
    assert by_id(all_records) == by_id(run(lines_of(40), output="whole.jsonl")[1])


def test_a_second_signal_acts(run: Run) -> None:
    engine = AnsweringEngine()

    def step() -> list:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return []

    engine.step = step
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(lines_of(8), engine)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_shards_are_the_whole(run: Run) -> None:
    """Each takes every third line, a repetition is seen across them, and all together are what one run writes."""
    lines = [*lines_of(10), {"id": "line 0", "prompt": "again"}]
    parts = [run(lines, output=f"{i}.jsonl", shard=Shard(i, 3))[1] for i in range(3)]
    assert [len(part) for part in parts] == [4, 4, 3]
    repeated = "line 11 repeats the id of line 1"
    assert [record.get("error") for record in parts[1]].count(repeated) == 1
    together = [record for part in parts for record in part if record.get("error") != repeated]
    whole = [record for record in run(lines)[1] if record.get("error") != repeated]
    assert by_id(together) == by_id(whole)


def test_lines_are_read_as_there_is_room(run: Run) -> None:
    """Of a long file no more is ever in memory than runs and a few that come next; and the slots are full all the time."""
    engine, seen, read_before = AnsweringEngine(seconds=0.002), [], []
    add = engine.add

    def watched(request: Request) -> int:
        seen.append(engine.steps)
        read_before.append(lines_read[0])
        return add(request)

    lines_read = [0]
    tasks = Survey.tasks

    def counted(*arguments: Any) -> Iterator[Any]:
        for task in tasks(*arguments):
            lines_read[0] += 1
            yield task

    engine.add = watched
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Survey, "tasks", counted)
        run([{"prompt": "a", "id": n} for n in range(300)], engine)
    assert len(seen) == 300 and engine.most == SLOTS
    assert all(read <= n + SLOTS + AHEAD + 1 for n, read in enumerate(read_before))
    work = sum(max(len(answer_to(request)[0]), 1) for request in engine.requests)
    assert work / SLOTS <= engine.steps <= 1.1 * work / SLOTS


def test_openai_responses(run: Run, tokenizer: Tokenizer) -> None:
    """What SDKs read: reasoning beside content, a call's arguments as a JSON string, n choices, both interfaces."""
    thought = [ids_of(tokenizer, THINK, "hm", END, MODEL, SAY, "Hello", OVER), "stop"]
    called = [ids_of(tokenizer, CALL, '{"name":"now","args":{"b":1}}', END), "stop"]
    plain = [ids_of(tokenizer, "abc"), "length"]
    chat = {
        "model": "gpt",
        "messages": USER,
        "reasoning_effort": "low",
        "max_completion_tokens": 30,
        "stream": False,
        "user": "u",
    }
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat | {"n": 2, "tools": [TOOL]}},
        {
            "custom_id": "b",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "gpt", "prompt": "x", "logit_bias": {"5": -1}},
        },
    ]
    llm = scripted_llm(tokenizer, thought, called, plain)
    code, records = run(lines, llm)
    first, second = (next(r for r in records if r["custom_id"] == name) for name in "ab")
    assert code == 0 and first["error"] is None and first["response"]["status_code"] == 200
    body = first["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "some") and isinstance(body["created"], int)
    message = {"role": "assistant", "content": "Hello", "reasoning_content": "hm"}
    assert body["choices"][0] == {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    call = {"id": "call_0", "type": "function", "function": {"name": "now", "arguments": '{"b": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert body["choices"][1] == {"index": 1, "message": message, "logprobs": None, "finish_reason": "tool_calls"}
    made, prompt = len(thought[0]) + len(called[0]), len(llm.engine.requests[0].prompt_ids)
    assert body["usage"] == {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    params = llm.engine.requests[0].params
    assert (params.max_tokens, params.n) == (30, 2) and [r.sample for r in llm.engine.requests] == [0, 1, 0]
    assert llm.engine.requests[2].params.logit_bias == ((5, -1.0),)
    assert second["response"]["body"]["object"] == "text_completion"
    assert second["response"]["body"]["choices"] == [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length"}]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream", True), ("logprobs", True), ("top_logprobs", 3), ("tool_choice", "required"), ("tool_choice", {"type": "a"}),
        ("response_format", {"type": "json_object"}), ("functions", []), ("audio", {}), ("prediction", {}), ("store", True),
        ("parallel_tool_calls", False), ("modalities", ["audio"]), ("service_tier", "flex"), ("web_search_options", {}),
        ("prompt", "x"), ("max_completion_tokens", 9), ("logprobs", 0), ("effort", "low"), ("best_of", 2), ("verbosity", "low"),
    ],
)  # fmt: skip
def test_what_openai_has_and_we_have_not_is_named(field: str, value: Any, run: Run) -> None:
    line = {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": USER, "max_tokens": 5, field: value}}
    (record,) = run([line])[1]
    assert f"body.{field} " in record["error"]["message"] and record["response"] is None
    (record,) = run([line | {"body": {"messages": USER, field: None}}], output="null.jsonl")[1]
    assert record["error"] is None or field == "effort"


def test_a_chat_and_its_record(run: Run, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Media by path; what was thought and said apart; a call that cannot be made is not lost; the model's failure is an error."""
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    messages = [{"role": "user", "content": [{"type": "image", "image": str(tmp_path / "a.png")}, "What?"]}]
    thought = [ids_of(tokenizer, THINK, "hm", END, MODEL, SAY, "Hello", END, MODEL, CALL, "{", END), "stop"]
    llm = scripted_llm(tokenizer, thought, [ids_of(tokenizer, "x"), "error"])
    first, second = run([{"messages": messages, "logprobs": 0}, {"messages": USER, "id": "bad"}], llm, slots=1)[1]
    assert (first["text"], first["content"], first["reasoning"], first["tool_calls"]) == ("Hello", "Hello", "hm", [])
    assert first["malformed_calls"][0]["text"] == "{" and first["token_ids"] == list(thought[0]) and first["logprobs"] == []
    assert len(llm.engine.requests[0].media) == 1
    assert second.pop("digest") and second == {"id": "bad", "error": "the logits are not finite"}


def test_priorities_and_deadlines_reach_the_engine(run: Run) -> None:
    """One line at a time, the highest first; each request has what its line says."""
    engine = AnsweringEngine()
    lines = [
        {"id": n, "prompt": [n], "priority": priority, "deadline": 60 + n} for n, priority in ((1, 0), (2, 3), (3, -1), (4, 3))
    ]
    code, records = run(lines, engine, slots=1)
    assert code == 0 and [record["id"] for record in records] == [2, 4, 1, 3]
    found = [(request.prompt_ids, request.priority, request.deadline) for request in engine.requests]
    assert found == [((2,), 3, 62), ((4,), 3, 64), ((1,), 0, 61), ((3,), -1, 63)]


def test_a_stop_string_ends_a_line(run: Run, tokenizer: Tokenizer) -> None:
    llm = scripted_llm(tokenizer, [ids_of(tokenizer, "ab"), ids_of(tokenizer, "cd"), ids_of(tokenizer, "ef")])
    (record,) = run([{"prompt": "x", "stop": "d"}], llm)[1]
    assert (record["text"], record["finish_reason"]) == ("abc", "stop") and llm.engine.cancelled == [0]


def test_a_fault_of_ours_in_one_line_does_not_end_the_job(
    run: Run, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("inkling_jax.llm.LLM.chat_prompt", lambda *_, **__: 1 / 0)
    records = by_id(run([{"messages": USER}, {"prompt": "a"}])[1])
    assert records["1"]["error"] == "ZeroDivisionError: division by zero" and "text" in records["2"]
    assert "line 1: ZeroDivisionError" in caplog.text


def test_a_full_disk_leaves_whole_records(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the last write left there is taken back, and the same command goes on when there is room."""
    lines, room, write_there = lines_of(40), [3000], os.write

    def full(descriptor: int, data: Any) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        count = write_there(descriptor, data[: room[0]])
        room[0] -= count
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(CapacityError, match=r"out.jsonl: No space left on device; the records before are whole"):
            run(lines)
    there = read(tmp_path / "out.jsonl")
    assert not room[0] and 0 < len(there) < 40
    assert by_id(run(lines)[1]) == by_id(run(lines, output="whole.jsonl")[1])
