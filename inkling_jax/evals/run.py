"""Running the nano tasks on a loaded model: greedy answers of many items at once, then what single items are worth to it."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float

from inkling_jax.batch.records import Outcome
from inkling_jax.batch.summary import oddities
from inkling_jax.completion import Completion
from inkling_jax.conversation import ChatCompletion, told_apart
from inkling_jax.engine.request import SamplingParams
from inkling_jax.errors import InputError
from inkling_jax.evals.nano.example import Example, Given
from inkling_jax.evals.nano.media import MEDIA_TASKS, Media, best_guess, with_media
from inkling_jax.evals.nano.sequence import TrainingSequence, training_sequence
from inkling_jax.evals.nano.tasks import grade, make_example
from inkling_jax.evals.nano.tools import is_valid_call
from inkling_jax.evals.results import Results, TaskResult
from inkling_jax.inputs.prompt import Prompt
from inkling_jax.llm import LLM

logger = logging.getLogger(__name__)

SPARE = 48  # tokens that an answer may have beyond twice those of the right one


def run_tasks(
    llm: LLM, tasks: Sequence[str], *, limit: int, seed: int = 0, media: Media = "kept", control: bool = False, drafts: int = 0
) -> Results:
    """The first `limit` held-out items of each task.

    With `control`, answers are made a second time, in reverse order, so that they share steps with others. `drafts`: of so many
    items of each task the draft head guesses the greedy tokens, 0 for a model without one.
    """
    if llm.tokenizer is None:
        raise InputError("the tasks are conversations, and this model came without a tokenizer.json")
    about = {
        "format": llm.config.quant_algo or "BF16",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "seed": seed,
        "limit": limit,
        "media": media,
    }
    results = Results(about, {})
    for task in tasks:
        logger.info("%s: %d items", task, limit)
        examples = [with_media(make_example(task, seed, "held-out", index), media, seed, index) for index in range(limit)]
        results.tasks[task] = _run_task(llm, examples, control, drafts)
    return results


def _run_task(llm: LLM, examples: list[Example], control: bool, drafts: int) -> TaskResult:
    assert llm.tokenizer is not None
    result = TaskResult()
    made = answers(llm, examples)
    for example, (_, _, answer) in zip(examples, made, strict=True):
        _add(result, example, answer)
    if control:
        again = answers(llm, examples[::-1])[::-1]
        result.again = [grade(example, given(answer)) for example, (_, _, answer) in zip(examples, again, strict=True)]
    for example in examples:
        loss, tokens = target_loss(llm, training_sequence(example, llm.tokenizer))
        result.losses.append(loss)
        result.tokens.append(tokens)
    guessed = [guesses(llm, prompt, completion) for prompt, completion, _ in made[:drafts]]
    result.drafts = [(sum(good for good, _ in depth), sum(total for _, total in depth)) for depth in zip(*guessed, strict=True)]
    result.blind = best_guess(examples) if examples[0].task in MEDIA_TASKS else 0.0
    return result


def answers(llm: LLM, examples: Sequence[Example]) -> list[tuple[Prompt, Completion, ChatCompletion]]:
    """Greedy answers, each with its prompt; one may be twice as long as the right one, and SPARE tokens longer."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    prompts = [llm.chat_prompt(e.messages[:-1], tools=e.tools, effort=e.effort) for e in examples]
    wholes = [len(training_sequence(example, tokenizer).token_ids) for example in examples]
    lengths = [max(0, whole - len(prompt.token_ids)) for whole, prompt in zip(wholes, prompts, strict=True)]
    made = llm.generate(prompts, [SamplingParams(temperature=0, max_tokens=2 * length + SPARE) for length in lengths])
    return [(prompt, one, told_apart(tokenizer, one, prompt.token_ids)) for prompt, one in zip(prompts, made, strict=True)]


def given(answer: ChatCompletion) -> Given:
    """An answer as `grade` takes it."""
    return Given(answer.content, answer.reasoning, answer.tool_calls)


def _add(result: TaskResult, example: Example, answer: ChatCompletion) -> None:
    called = bool(answer.tool_calls or answer.malformed_calls)
    found = oddities(Outcome(answer.finish_reason, answer.content, answer.reasoning, called))
    result.right.append(grade(example, given(answer)))
    result.runaway.append(answer.finish_reason == "length")
    result.unclosed.append("unclosed thinking" in found)
    result.empty.append("empty" in found)
    if example.task == "tools" and not isinstance(example.answer, str):
        result.valid.append(is_valid_call(example, given(answer)))


def target_loss(llm: LLM, sequence: TrainingSequence) -> tuple[float, int]:
    """The loss of the right answers of a conversation, in nats summed over their tokens, and how many these are."""
    logits = llm.score(Prompt(sequence.token_ids.tolist(), images=sequence.images, audios=sequence.audios))
    places = np.flatnonzero(sequence.loss_mask)
    return float(-_log_softmax(logits[places - 1])[np.arange(len(places)), sequence.token_ids[places]].sum()), len(places)


def guesses(llm: LLM, prompt: Prompt, made: Completion) -> list[tuple[int, int]]:
    """For each draft depth k (from 0), how many of the greedy tokens it guesses, and of how many it could.

    Depth k sees the greedy tokens before its guess, as when all shallower guesses were accepted. The first token of an answer is
    the model's own, so depth k can guess the second plus k and those after it. The end token counts, where there is one.
    """
    assert llm.tokenizer is not None
    ends = [llm.tokenizer.control["content_model_end_sampling"]] if made.finish_reason == "stop" else []
    ids = [*prompt.token_ids, *made.token_ids, *ends]
    first = len(prompt.token_ids) + 1
    found = []
    for depth, logits in enumerate(llm.draft_logits(Prompt(ids, images=prompt.images, audios=prompt.audios))):
        places = np.arange(first + depth, len(ids))  # row t guesses the token at t + 2 + depth
        guessed = logits[places - 2 - depth].argmax(-1) if len(places) else places
        found.append((int((guessed == np.asarray(ids)[places]).sum()), len(places)))
    return found


def _log_softmax(logits: Float[np.ndarray, "n V"]) -> Float[np.ndarray, "n V"]:
    logits = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))
