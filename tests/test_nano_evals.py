"""Runs over the nano tasks: intervals and tests by hand, results from a model that is told what to say, the command line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inkling_jax.completion import Completion
from inkling_jax.config import preset
from inkling_jax.engine.request import SamplingParams
from inkling_jax.errors import InputError
from inkling_jax.evals.__main__ import main
from inkling_jax.evals.nano.example import Example
from inkling_jax.evals.nano.media import best_guess, with_media
from inkling_jax.evals.nano.sequence import training_sequence
from inkling_jax.evals.nano.tasks import TASKS, make_example
from inkling_jax.evals.nano.tokenizer import write_processing_files
from inkling_jax.evals.report import comparison_cells, print_cells, results_cells
from inkling_jax.evals.results import Results, TaskResult, read_baseline, read_results, save_results
from inkling_jax.evals.run import SPARE, run_tasks
from inkling_jax.evals.statistics import flips, loss_change, perplexity, share
from inkling_jax.inputs import chat
from inkling_jax.inputs.images import ImageConfig
from inkling_jax.inputs.processor import Processor
from inkling_jax.inputs.prompt import Prompt
from inkling_jax.inputs.tokenizer import Tokenizer

LIMIT = 6
SURE = 0.8  # what the told model gives to each right token


def test_share_is_wilsons_interval() -> None:
    """The ends are where the normal test of a share, with that share's own variance, just does not reject."""
    for successes, total in ((8, 10), (0, 10), (10, 10), (1, 1), (500, 1000), (997, 1000)):
        rate, low, high = share(successes, total)
        assert rate == successes / total and 0 <= low <= rate <= high <= 1
        for end in (low, high):
            if 0 < end < 1:
                assert (rate - end) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / total)
    assert share(8, 10)[1:] == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert math.isnan(share(0, 0).value) and share(0, 0)[1:] == (0, 1)


def test_flips_are_mcnemars_exact_test() -> None:
    """Among nine changed items, eight or more on one side have the probability 2 * (9 + 1) / 512."""
    before = [True] * 8 + [False] + [True] * 20 + [False] * 3
    after = [False] * 8 + [True] + [True] * 20 + [False] * 3
    assert flips(before, after) == (8, 1, pytest.approx(20 / 512))
    assert flips(after, before) == (1, 8, pytest.approx(20 / 512))
    assert flips(before, before) == (0, 0, 1.0)
    assert flips([True, False], [False, True]) == (1, 1, 1.0)
    with pytest.raises(ValueError, match="zip"):
        flips(before, after[:-1])


def test_perplexity_weighs_tokens_and_varies_by_item() -> None:
    """exp of the mean over tokens; items that agree leave no doubt, one item alone leaves all."""
    assert perplexity([2.0, 6.0], [2, 6]) == pytest.approx((math.e, math.e, math.e))
    assert perplexity([1.0, 9.0], [5, 5]).value == pytest.approx(math.e)
    # by hand: residues of 4 either way, so a variance of the sum of 2 * (16 + 16) over 1, and a mean's error of 8 / 10
    assert math.log(perplexity([1.0, 9.0], [5, 5]).high) == pytest.approx(1 + 1.959964 * 0.8)
    assert loss_change([5.0, 1.0], [6.0, 10.0], [5, 5]) == pytest.approx((1.0, 1 - 1.959964 * 0.8, 1 + 1.959964 * 0.8))
    assert perplexity([3.0], [3]).low == 1 and perplexity([3.0], [3]).high > 1e300


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The nano model's tokenizer."""
    where = tmp_path_factory.mktemp("nano")
    write_processing_files(where)
    return Tokenizer.from_directory(where, None)


class ToldModel:
    """Has the methods of an LLM that the run uses, and gives the right answers but for what `spoil` makes of them."""

    def __init__(self, tokenizer: Tokenizer, spoil: Callable[[int, Completion], Completion] = lambda _, made: made):
        self.tokenizer, self.config = tokenizer, preset("inkling-small")
        towers = frozenset({"vision", "audio"})
        self._processor = Processor(self.config, tokenizer, towers, ImageConfig(rescale_frac=None))
        self._spoil = spoil
        self.sampling: list[SamplingParams] = []
        self.wanted: dict[tuple[int, ...], list[int]] = {}
        for task in TASKS:
            for index in range(LIMIT):
                example = make_example(task, 0, "held-out", index)
                ids = training_sequence(example, tokenizer).token_ids.tolist()
                prompt = self.chat_prompt(example.messages[:-1], tools=example.tools, effort=example.effort)
                self.wanted[tuple(prompt.token_ids)] = ids[len(prompt.token_ids) : -1]

    def chat_prompt(self, messages: Sequence[Any], *, tools: Any, effort: Any) -> Prompt:
        return self._processor.encode(chat.render(messages, tools=tools, effort=effort))

    def generate(self, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams]) -> list[Completion]:
        self.sampling += sampling
        found = [self.wanted.get(tuple(prompt.token_ids), []) for prompt in prompts]
        made = [Completion(tuple(ids), self.tokenizer.decode(ids), "stop", None, 1) for ids in found]
        return [self._spoil(n, completion) for n, completion in enumerate(made)]

    def score(self, prompt: Prompt) -> np.ndarray:
        """The next token has the probability SURE, all others share the rest."""
        size = self.tokenizer.vocab_size
        logits = np.zeros((len(prompt.token_ids), size), np.float32)
        logits[np.arange(len(logits) - 1), prompt.token_ids[1:]] = math.log(SURE / (1 - SURE) * (size - 1))
        return logits

    def draft_logits(self, prompt: Prompt) -> list[np.ndarray]:
        """The first depth guesses every token, the second those at even places."""
        ids, depths = np.asarray(prompt.token_ids), []
        for depth in range(2):
            logits = np.zeros((len(ids) - 1 - depth, self.tokenizer.vocab_size), np.float32)
            for place in range(2 + depth, len(ids)):
                logits[place - 2 - depth, ids[place] if depth == 0 or place % 2 == 0 else 0] = 1
            depths.append(logits)
        return depths


def run(model: ToldModel, tasks: Sequence[str] = tuple(TASKS), **options: Any) -> Results:
    return run_tasks(model, list(tasks), limit=LIMIT, **options)  # pyright: ignore[reportArgumentType]


def test_right_answers_are_found_right(tokenizer: Tokenizer) -> None:
    """All is right, twice; perplexity is one over the probability; drafts are counted where they can guess, no further."""
    model = ToldModel(tokenizer)
    results = run(model, control=True, drafts=LIMIT)
    assert list(results.tasks) == list(TASKS) and (results.about["seed"], results.about["limit"]) == (0, LIMIT)
    for name, task in results.tasks.items():
        assert task.right == task.again == [True] * LIMIT, name
        assert not any(task.runaway + task.unclosed + task.empty)
        assert perplexity(task.losses, task.tokens).value == pytest.approx(1 / SURE, rel=1e-5)
        sequences = [training_sequence(make_example(name, 0, "held-out", n), tokenizer) for n in range(LIMIT)]
        assert task.tokens == [int(sequence.loss_mask.sum()) for sequence in sequences]
        answers = [(prompt, ids) for prompt, ids in model.wanted.items() if task_of(model, prompt, ids, sequences)]
        assert task.drafts[0] == (sum(len(ids) for _, ids in answers),) * 2  # all but the first, and the end token
        assert task.drafts[1][1] == sum(len(ids) - 1 for _, ids in answers)
        places = [place for prompt, ids in answers for place in range(len(prompt) + 2, len(prompt) + len(ids) + 1)]
        assert task.drafts[1][0] == sum(place % 2 == 0 for place in places)
    assert results.tasks["tools"].valid and all(results.tasks["tools"].valid)
    assert all(results.tasks[name].blind < 0.7 for name in ("shapes", "tones"))
    longest = {len(ids) for ids in model.wanted.values()}
    assert {params.max_tokens for params in model.sampling} == {2 * (length + 1) + SPARE for length in longest}
    assert all(params.temperature == 0 for params in model.sampling)


def task_of(model: ToldModel, prompt: tuple[int, ...], ids: list[int], sequences: Sequence[Any]) -> bool:
    """Whether an answer is the end of one of these sequences."""
    return any(list(prompt) + ids == sequence.token_ids[:-1].tolist() for sequence in sequences)


def test_what_goes_wrong_is_counted(tokenizer: Tokenizer) -> None:
    """An answer that never ends, one that never stops thinking, one of nothing, and one of other words."""
    think, say = (tokenizer.control[role] for role in ("content_thinking", "content_text"))

    def spoil(n: int, made: Completion) -> Completion:
        words = {
            0: [say, *tokenizer.encode("no " * 9)],
            1: [think, *tokenizer.encode("hmm")],
            2: [],
            3: [say, *tokenizer.encode("no")],
        }
        if n not in words:
            return made
        return dataclasses.replace(made, token_ids=tuple(words[n]), finish_reason="length" if n < 2 else "stop")

    task = run(ToldModel(tokenizer, spoil), ["world"]).tasks["world"]
    assert task.right == [False] * 4 + [True] * 2
    assert task.runaway == [True, True] + [False] * 4
    assert task.unclosed == [False, True] + [False] * 4
    assert task.empty == [False, False, True] + [False] * 3
    assert task.again == [] and task.drafts == []


def test_malformed_calls_are_neither_valid_nor_empty(tokenizer: Tokenizer) -> None:
    """A call of broken JSON is no call that can be made."""
    call = tokenizer.control["content_invoke_tool_json"]

    def spoil(n: int, made: Completion) -> Completion:
        return dataclasses.replace(made, token_ids=(call, *tokenizer.encode('{"name":"weather","args":{')))

    task = run(ToldModel(tokenizer, spoil), ["tools"]).tasks["tools"]
    assert not any(task.right + task.valid + task.empty) and task.valid


def item_of(example: Example) -> Any:
    """The picture or wave of an example, None where it has none."""
    items = [part[part["type"]] for part in example.messages[0]["content"] if part["type"] != "text"]
    return np.asarray(items[0][0] if isinstance(items[0], tuple) else items[0]) if items else None


@pytest.mark.parametrize("task", ["shapes", "tones"])
def test_media_are_removed_and_replaced(task: str) -> None:
    """Without its item a question is the same; with another's, that one has another answer."""
    for index in range(10):
        example = make_example(task, 0, "held-out", index)
        removed, replaced = (with_media(example, how, 0, index) for how in ("removed", "replaced"))
        assert with_media(example, "kept", 0, index) is example
        assert item_of(removed) is None and len(removed.messages[0]["content"]) == 1
        assert not np.array_equal(item_of(replaced), item_of(example))
        order = [[part["type"] for part in one.messages[0]["content"]] for one in (example, replaced)]
        assert order[0] == order[1] and replaced.answer == example.answer
        others = (make_example(task, 0, "held-out", index + step) for step in range(1, 1000))
        taken = next(other for other in others if other.answer != example.answer)
        assert np.array_equal(item_of(taken), item_of(replaced))
    example = make_example("talk", 0, "held-out", 0)
    assert with_media(example, "removed", 0, 0) is example


def test_guesses_without_media_are_mostly_wrong() -> None:
    """A question may name a colour or a shape, not the answer."""
    for task, most in (("shapes", 0.4), ("tones", 0.3)):
        assert 0.02 < best_guess([make_example(task, 0, "held-out", index) for index in range(60)]) < most


def small_results(right: str, again: str = "") -> Results:
    first, second, no = [c == "1" for c in right], [c == "1" for c in again], [False] * len(right)
    task = TaskResult(first, second, no, no, no, losses=[0.25] * len(right), tokens=[2] * len(right), drafts=[(3, 4)])
    return Results({"model": "m", "seed": 0, "limit": len(right)}, {"world": task})


def test_results_are_kept(tmp_path: Path) -> None:
    """What is read is what was written; other items, other tasks and other files are refused by name."""
    path = tmp_path / "deeper" / "results.json"
    results = small_results("1101", "1111")
    save_results(path, results)
    assert read_results(path) == results
    assert read_baseline(path, tasks=["world", "talk"], seed=0, limit=4) == results
    items: dict[str, Any] = {"tasks": ["world"], "seed": 0, "limit": 4}
    for wanted, told in (({"limit": 5}, "limit 4"), ({"seed": 1}, "seed 0"), ({"tasks": ["talk"]}, "no task of this run")):
        with pytest.raises(InputError, match=told):
            read_baseline(path, **dict(items, **wanted))
    for name, content in (
        ("none.json", None),
        ("list.json", "[]"),
        ("text.json", "{"),
        ("lacks.json", '{"about": {}, "tasks": {"a": {}}}'),
    ):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(InputError, match=name):
            read_results(tmp_path / name)


def test_tables_say_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    """Shares with their intervals; a comparison with flips both ways beside those of the control."""
    before, after = small_results("1101"), small_results("0111", "0110")
    print_cells(results_cells(after))
    shown = capsys.readouterr().out
    assert " ".join(shown.split("\n")[-2].split()) == (
        "world 4 75.0% (30.1-95.4) 1.133 (1.133-1.133) 75.0% (30.1-95.4) - 0 0 0 -"
    )
    print_cells(comparison_cells(before, after))
    shown = capsys.readouterr().out
    assert " ".join(shown.split("\n")[-2].split()) == "all 4 75.0% 75.0% +0.0 1 1 1 1 0 +0.00 ± 0.00"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--tasks", "world,singing"], "'singing'"),
        (["--limit", "0"], "--limit 0"),
        (["--baseline", "nowhere.json"], "nowhere.json"),
        (["--media", "kept"], "no/such/place"),
    ],
)
def test_command_tells_mistakes_in_a_line(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one line, before any model is loaded."""
    assert main(["nano", "--model", "no/such/place", "--quiet", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and told in error
