"""The traffic benchmark: what is drawn, what is timed, and a replay that does the same work."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inkling_jax import bench
from inkling_jax.benchmarks import replay, serve
from inkling_jax.benchmarks.arrivals import Arrival, Traffic, draw
from inkling_jax.benchmarks.shard import open_shard
from inkling_jax.engine.engine import EngineOptions
from inkling_jax.engine.output import Output
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.errors import InklingError, InputError

PLAIN = Traffic(prompt=(3, 9), answer=(2, 5))


def test_lengths_times_and_shared_beginnings_are_drawn_as_asked() -> None:
    """All lengths of the ranges come; gaps have the rate's mean and spread; a share of prompts begins alike; a seed decides."""
    traffic = dataclasses.replace(PLAIN, rate=20.0, shared=0.25, prefix=6, seed=3)
    arrivals = draw(traffic, 4000, 1000)
    assert {len(a.prompt_ids) for a in arrivals} == set(range(3, 10)) and {a.max_tokens for a in arrivals} == {2, 3, 4, 5}
    gaps = np.diff([a.at for a in arrivals])
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05) and gaps.std() == pytest.approx(1 / 20, rel=0.1)
    ((begin, _),) = Counter(a.prompt_ids[:3] for a in arrivals).most_common(1)
    alike = [a.prompt_ids[:6] for a in arrivals if a.prompt_ids[:3] == begin]
    assert len(alike) / 4000 == pytest.approx(0.25, abs=0.03)
    longest = max(alike, key=len)
    assert len(longest) == 6 and all(longest[: len(ids)] == ids for ids in alike)
    assert max(map(max, (a.prompt_ids for a in arrivals))) == 999
    assert draw(traffic, 10, 1000) == arrivals[:10] != draw(dataclasses.replace(traffic, seed=4), 10, 1000)
    assert {a.at for a in draw(PLAIN, 10, 1000)} == {0.0}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"prompt": (5, 3)}, "--prompt 5-3"),
        ({"answer": (0, 3)}, "--answer 0-3"),
        ({"rate": 0.0}, "--rate 0.0"),
        ({"shared": 1.5}, "--shared 1.5"),
        ({"shared": 0.5}, "say with --prefix"),
    ],
)
def test_impossible_traffic_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        dataclasses.replace(PLAIN, **change)


class Scripted:
    """An engine whose every step takes a second and gives each request two tokens of those that it wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: dict[int, int] = {}
        self.most, self.ids, self.now = 0, itertools.count(1), 0.0
        monkeypatch.setattr(serve.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(serve.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def add(self, request: Request) -> int:
        request_id = next(self.ids)
        self.left[request_id] = request.params.max_tokens or 0
        self.most = max(self.most, len(self.left))
        return request_id

    def step(self) -> list[Output]:
        self.now += 1
        outputs = []
        for request_id, left in list(self.left.items()):
            made = min(2, left)
            self.left[request_id] -= made
            ended = self.left[request_id] == 0
            outputs.append(Output(request_id, (7,) * made, (), "length" if ended else None))
            if ended:
                del self.left[request_id]
        return outputs


def test_times_of_requests_that_come_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once, of 4, 2 and 4 tokens: first tokens after a second each; 2 s for 4 tokens, 1 s between first and last."""
    engine: Any = Scripted(monkeypatch)
    got = serve.measure_traffic(engine, [Arrival(0.0, (1,) * 5, n) for n in (4, 2, 4)], 2, timed=False)
    assert engine.most == 2
    # at 1 s: 2 + 2 tokens, the second has ended; at 2 s: the first ends, the third begins; at 3 s the third ends
    assert (got["requests"], got["seconds"]) == (3, 3)
    assert got["output_tokens_per_s"] == pytest.approx(10 / 3, abs=0.1) and got["total_tokens_per_s"] == pytest.approx(
        25 / 3, abs=0.1
    )
    assert [got[f"ttft_p{p}_ms"] for p in (50, 90, 99)] == [1000, 1000, 1000]
    assert got["tpot_p50_ms"] == pytest.approx(1000 / 3, abs=0.01) and got["tpot_p99_ms"] == pytest.approx(1000 / 3, abs=0.01)


def test_times_of_requests_that_come_at_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """One at once; the second comes at 0.5 s and waits until the first has ended; the third comes when nothing runs."""
    engine: Any = Scripted(monkeypatch)
    got = serve.measure_traffic(engine, [Arrival(at, (1,), 4) for at in (0.0, 0.5, 10.0)], 1, timed=True)
    # first tokens at 1, 3 and 11 s, for arrivals at 0, 0.5 and 10
    assert got["seconds"] == 12
    assert (got["ttft_p50_ms"], got["ttft_p99_ms"]) == (1000, pytest.approx(np.percentile([1000, 2500, 1000], 99), abs=0.1))


def test_a_row_of_one_layer(oracle_dir: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command on a CPU: two programs, a row whose numbers fit together; asked again later than its limit, none."""
    rows = tmp_path / "serve.json"
    options = ["serve", "--model", str(oracle_dir("tiny")), "--layers", "1", "--concurrency", "3", "--prompt", "8-24"]
    options += [
        "--answer",
        "4-12",
        "--chunk",
        "16",
        "--tokens-per-call",
        "4",
        "--page-size",
        "16",
        "--output",
        str(rows),
        "--quiet",
    ]
    assert bench.main(options) == 0
    (row,) = json.loads(rows.read_text())
    assert row["case"].endswith("layers=1 concurrency=3 prompt=8-24 answer=4-12 seed=0")
    assert (row["bench"], row["phase"], row["programs"], row["requests"]) == ("serve", "decode", 2, 6)
    assert row["decode_tokens_per_s"] == pytest.approx(3e6 / row["time_us"], rel=1e-3)
    assert row["host_share"] == pytest.approx(max(0, 1 - row["device_us"] / row["time_us"]), abs=1e-3)
    assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"] and 0 < row["tpot_p50_ms"] <= row["tpot_p99_ms"]
    assert "concurrency=3" in capsys.readouterr().out


def test_a_replay_does_as_much_as_was_done(oracle_dir: Callable[..., Path]) -> None:
    """It begins and ends where the engine did, though tokens may differ; calls that do less are told."""
    shard = open_shard(str(oracle_dir("tiny")), "tensor=1", 1)
    engine = shard.engine(shard.random_leaves(), shard.cache_shape(2, 128, 32, 16), EngineOptions(chunk=16, tokens_per_call=4))
    engine.add(Request((5, 6, 7), SamplingParams(seed=1, ignore_eos=True, max_tokens=60)))
    for _ in range(3):
        engine.step()
    slot = engine.scheduler.running[0].slot
    began = int(engine.state.length[slot])
    with replay.record(engine) as calls:
        engine.step()
        engine.step()
    assert len(calls.calls) == 2 and engine.programs.decode.__name__ == "program"
    assert int(engine.state.length[slot]) == began + 8
    assert replay.replay_seconds(engine, calls) > 0
    assert int(engine.state.length[slot]) == began + 8
    with pytest.raises(InklingError, match="other work"):
        replay.replay_seconds(engine, dataclasses.replace(calls, calls=calls.calls[:1]))
