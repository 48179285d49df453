"""Kill a batch again and again and finish it: run as a program, so that a child can be forked with all imports done.

Arguments: the input, the output, how many kills, a directory with a tokenizer. Each kill comes when the output has grown by a
random number of bytes. Prints the sizes of the output at which children were killed, and the exit code of the one that finished.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from scripted import llm_over

from inkling_jax.batch.request import Defaults
from inkling_jax.batch.run import Batch
from inkling_jax.engine.output import Output
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.errors import CapacityError
from inkling_jax.inputs.tokenizer import Tokenizer

SLOTS, CONTEXT = 4, 200


def answer_to(request: Request) -> tuple[tuple[int, ...], str]:
    """Ids of letters and how they end, which depend on the prompt, the seed and the sample, as those of a model do."""
    told = random.Random(repr((tuple(request.prompt_ids), request.params.seed, request.sample)))
    wanted = request.params.max_tokens or 99
    length = told.randint(0, 12)
    ids = tuple(told.randint(97, 122) for _ in range(min(length, wanted)))
    return ids, "length" if length >= wanted else "stop"


class AnsweringEngine:
    """Makes a token of each of its running requests a step; refuses a prompt of more than CONTEXT tokens."""

    def __init__(self, seconds: float = 0.0):
        self.requests: list[Request] = []
        self.most = 0  # requests that were ever there at once
        self.closed = False
        self.replicas, self.prefix_statistics = 1, None
        self.steps = 0
        self._seconds = seconds  # that a step takes
        self._left: dict[int, list[int]] = {}
        self._reason: dict[int, str] = {}

    def add(self, request: Request) -> int:
        if len(request.prompt_ids) > CONTEXT:
            raise CapacityError(f"the prompt has {len(request.prompt_ids)} tokens, the context holds {CONTEXT}")
        self.requests.append(request)
        ids, self._reason[len(self.requests)] = answer_to(request)
        self._left[len(self.requests)] = list(ids)
        self.most = max(self.most, len(self._left))
        return len(self.requests)

    def cancel(self, number: int) -> None:
        self._left.pop(number, None)

    def close(self) -> None:
        self.closed = True

    def step(self) -> list[Output]:
        self.steps += 1
        time.sleep(self._seconds)
        outputs = []
        for number, left in list(self._left.items())[:SLOTS]:
            token = (left.pop(0),) if left else ()
            if not left:
                del self._left[number]
            outputs.append(Output(number, token, (), None if left else self._reason[number]))
        return outputs


def run(source: Path, output: Path, tokenizer: Tokenizer, seconds: float = 0.0) -> int:
    """The exit code of a batch over an AnsweringEngine."""
    defaults = Defaults(SamplingParams(max_tokens=50), None, 0)
    return Batch(
        str(source), str(output), defaults, "answering", lambda media: llm_over(AnsweringEngine(seconds), tokenizer), SLOTS
    ).run()


def start(source: Path, output: Path, tokenizer: Tokenizer) -> int:
    """The process id of a child that runs the batch."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = run(source, output, tokenizer, seconds=0.002)
        finally:
            os._exit(code)
    return child


def main(source: Path, output: Path, kills: int, directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory, None)
    told, killed = random.Random(kills), []
    growth = 2 * source.stat().st_size // kills  # so that some is left after all kills
    while len(killed) < kills:
        size = output.stat().st_size if output.exists() else 0
        until = size + told.randint(0, growth)
        child = start(source, output, tokenizer)
        while not (output.exists() and output.stat().st_size >= until):
            time.sleep(0.001)
        time.sleep(told.uniform(0, 0.002))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        killed.append(output.stat().st_size)
    code = os.waitstatus_to_exitcode(os.waitpid(start(source, output, tokenizer), 0)[1])
    print(json.dumps({"sizes": killed, "code": code}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
