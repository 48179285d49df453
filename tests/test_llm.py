"""The notebook-facing object: what is one prompt, where text ends, what is freed, and which errors name what."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import load as read_tensors
from text_checkpoint import USABLE, write_text_checkpoint

import inkling_jax
from inkling_jax import LLM, CapacityError, CheckpointError, InputError, Prompt, SamplingParams

SLOTS, CONTEXT = 2, 128
SAMPLED = SamplingParams(seed=3, max_tokens=24, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
TEXT = "Once upon"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("llm") / "model")


def load(directory: Path) -> LLM:
    options = {"slots": SLOTS, "page_size": 16, "chunk": 16, "tokens_per_call": 4, "max_context": CONTEXT}
    return inkling_jax.load(directory, dtype="float32", quiet=True, **options)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with load(directory) as llm:
        yield llm


@pytest.fixture
def idle(llm: LLM) -> Iterator[LLM]:
    """The model, which must have all its slots and pages back when the test is done."""
    yield llm
    scheduler = llm.engine.scheduler
    assert not scheduler.running and not scheduler.waiting and len(scheduler.free_slots) == SLOTS
    assert scheduler.pools["global"].available == scheduler.pools["global"].pages
    assert not llm.calls.mail


def test_oracle_through_the_public_names(oracle_dir: Callable[..., Path], expected: Callable[..., dict[str, np.ndarray]]) -> None:
    """generate as it is by default, and score on a mesh of two, against an implementation that shares no code."""
    answers = expected("tiny")
    with inkling_jax.load(oracle_dir("tiny"), dtype="float32", slots=1, quiet=True) as one:
        (completion,) = one.generate(answers["len5.ids"], GREEDY)
        assert [*answers["len5.ids"], *completion.token_ids] == answers["len5.greedy"].tolist()
    with inkling_jax.load(oracle_dir("tiny"), dtype="float32", slots=1, mesh="tensor=2", quiet=True) as two:
        logits, wanted = two.score(answers["len33.ids"]), answers["len33.logits"]
        assert logits.dtype == np.float32 and logits.shape == wanted.shape
        assert np.linalg.norm(logits - wanted) <= 1e-4 * np.linalg.norm(wanted)


def test_media_through_the_public_names(idle: LLM) -> None:
    """A raw prompt and a conversation with an image and a wave, prepared by its processor; placeholders are banned."""
    control = idle.tokenizer.control if idle.tokenizer else {}
    assert set(idle.engine.banned) == {control["image_slot"], control["audio_slot"]}
    image, wave = np.zeros((40, 40, 3), np.uint8), (np.zeros(1600, np.float32), 16000)
    parts = [{"type": "image", "image": image}, {"type": "audio", "audio": wave}, "?"]
    prompt = idle.processor.prompt(parts)
    ids = list(prompt.token_ids)
    assert (ids.count(control["image_slot"]), ids.count(control["audio_slot"])) == (6, 2)  # at twice its size: 2 rows of 3
    asked = idle.chat_prompt([{"role": "user", "content": parts}])
    assert [len(asked.images[0]), len(asked.audios[0])] == [6, 2] and len(asked.token_ids) > len(ids)
    (made,) = idle.generate(prompt, GREEDY)
    (blind,) = idle.generate(dataclasses.replace(prompt, images=[1 - prompt.images[0]]), GREEDY)
    assert made.token_ids != blind.token_ids and made.prompt_tokens == len(ids)


def test_what_is_one_prompt(idle: LLM) -> None:
    """A text, a list of ids and a Prompt are one; a list of them is one each, in order."""
    assert idle.tokenizer is not None
    ids = idle.tokenizer.encode(TEXT)
    (alone,) = idle.generate(TEXT, SAMPLED)
    for same in (ids, tuple(ids), np.array(ids), jnp.array(ids), Prompt(ids), [TEXT], [ids], [Prompt(ids)], [np.array(ids)]):
        assert idle.generate(same, SAMPLED) == [alone]
    other = idle.generate(["!", TEXT, [5, 6]], SAMPLED)
    assert other[1] == alone and [c.prompt_tokens for c in other] == [1, len(ids), 2]
    assert idle.generate([], SAMPLED) == []


def test_completion_fields(idle: LLM) -> None:
    """Text is that of the tokens, log-probabilities are those of score, counts add up."""
    assert idle.tokenizer is not None
    (found,) = idle.generate(TEXT, dataclasses.replace(SAMPLED, logprobs=2))
    assert found.finish_reason == "length" and found.error is None
    assert len(found.token_ids) == 24 and found.prompt_tokens == len(idle.tokenizer.encode(TEXT))
    assert found.text == idle.tokenizer.decode(found.token_ids)
    assert found.logprobs is not None and [entry.token_id for entry in found.logprobs] == list(found.token_ids)
    logits = idle.score([*idle.tokenizer.encode(TEXT), *found.token_ids]).astype(np.float64)[found.prompt_tokens - 1 : -1]
    wanted = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    for row, entry in zip(wanted, found.logprobs, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-3)
        assert [i for i, _ in entry.top] == np.argsort(-row, stable=True)[:2].tolist()
    assert idle.generate(TEXT, SAMPLED)[0].logprobs is None


def test_score_and_trace_have_a_row_a_token(idle: LLM, directory: Path) -> None:
    """Longer than one chunk too. The logits are those of the last hidden state (spec 2.2), and see no later token."""
    ids = list(range(40))
    logits, trace = idle.score(ids), idle.trace(ids)
    assert logits.shape == (40, USABLE) and logits.dtype == np.float32
    assert {name for name in trace if name.startswith("hidden")} == {f"hidden.{i}" for i in range(4)}
    assert trace["hidden.3"].shape == (40, 48) and trace["moe.1.experts"].shape == (40, 2)
    unembed = read_tensors(directory)["model.llm.unembed.weight"].astype(np.float32)[:USABLE]
    wanted = trace["hidden.3"] @ unembed.T / idle.config.text.logits_divisor
    np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(idle.score(ids[:20]), logits[:20], rtol=1e-4, atol=1e-4)


def test_parameters_have_their_paths(idle: LLM, directory: Path) -> None:
    """Each name has its own array: one of each shape and of several layers is the checkpoint's tensor."""
    tensors, found = read_tensors(directory), idle.parameters
    assert len(found) == len({id(array) for array in found.values()}) == len(idle.engine.leaves)
    names = {"embed": "embed.weight", "norm.weight": "norm.weight"}
    names |= {f"layers.{i}.attn.o_proj": f"layers.{i}.attn.wo_ud.weight" for i in range(3)}
    names |= {f"layers.{i}.mlp.router.bias": f"layers.{i}.mlp.gate.bias" for i in (1, 2)}
    for path, name in names.items():
        np.testing.assert_array_equal(found[path], tensors[f"model.llm.{name}"].astype(np.float32), err_msg=path)


def test_samples_follow_one_another(idle: LLM) -> None:
    """n = 2: two completions a prompt, different; the first is that of n = 1, and a seed repeats them all."""
    (alone,) = idle.generate(TEXT, SAMPLED)
    found = idle.generate([TEXT, "!"], dataclasses.replace(SAMPLED, n=2))
    assert len(found) == 4 and [c.prompt_tokens for c in found] == [alone.prompt_tokens] * 2 + [1] * 2
    assert found[0] == alone and found[1].token_ids != alone.token_ids
    with pytest.raises(InputError, match="n is 2"):
        idle.stream(TEXT, dataclasses.replace(SAMPLED, n=2))


def test_settings_for_each_prompt(idle: LLM) -> None:
    """One setting a prompt, each its own; another number of them is refused with both counts."""
    settings = [SAMPLED, dataclasses.replace(SAMPLED, max_tokens=5, seed=9)]
    assert [len(c.token_ids) for c in idle.generate([TEXT, TEXT], settings)] == [24, 5]
    with pytest.raises(InputError, match="3 prompts but 2 sampling settings"):
        idle.generate([TEXT] * 3, settings)
    for wrong in (None, {"temperature": 0}, [0.7]):
        with pytest.raises(InputError, match="sampling is .*: expected SamplingParams"):
            idle.generate(TEXT, wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="sampling is 7: expected SamplingParams"):
        idle.stream(TEXT, 7)  # pyright: ignore[reportArgumentType]


def stop_in_the_middle(llm: LLM) -> tuple[SamplingParams, str, tuple[int, ...]]:
    """A setting whose stop string begins inside one token and ends in the next; the text before it; the tokens of that."""
    assert llm.tokenizer is not None
    for seed in range(50):
        params = dataclasses.replace(SAMPLED, seed=seed)
        (full,) = llm.generate(TEXT, params)
        pieces = [llm.tokenizer.token_bytes(i) for i in full.token_ids]
        for n in range(6, len(pieces) - 6):
            stop, before = pieces[n][1:] + pieces[n + 1], b"".join(pieces[:n]) + pieces[n][:1]
            if len(pieces[n]) > 1 and len(stop) > 1 and stop.isascii() and stop not in before:
                stopping = dataclasses.replace(params, stop=("never there", stop.decode()))
                return stopping, before.decode("utf-8", "replace"), full.token_ids[: n + 1]
    pytest.fail("no answer has a token of several letters")


def test_a_stop_string_ends_the_text_before_it(idle: LLM) -> None:
    """Kept are the tokens up to the one that holds the last letter before the stop string, and their log-probabilities."""
    params, text, token_ids = stop_in_the_middle(idle)
    stopped, other = idle.generate([TEXT, "!"], [params, SAMPLED])
    assert (stopped.text, stopped.token_ids, stopped.finish_reason) == (text, token_ids, "stop")
    assert len(other.token_ids) == 24
    (stopped,) = idle.generate(TEXT, dataclasses.replace(params, logprobs=2))
    assert stopped.logprobs is not None and [entry.token_id for entry in stopped.logprobs] == list(token_ids)


def test_a_stream_is_the_completion_in_pieces(idle: LLM) -> None:
    """Joined, its deltas are what generate returns, with a stop string and without; the last one alone has a reason."""
    for params in (SAMPLED, stop_in_the_middle(idle)[0]):
        deltas = list(idle.stream(TEXT, params))
        (whole,) = idle.generate(TEXT, params)
        assert len(deltas) > 2 and all(d.text or d.token_ids for d in deltas[:-1])
        assert "".join(d.text for d in deltas) == whole.text
        assert sum((d.token_ids for d in deltas), ()) == whole.token_ids
        assert [d.finish_reason for d in deltas if d.finish_reason] == [deltas[-1].finish_reason] == [whole.finish_reason]


def test_a_closed_stream_gives_its_slot_back(idle: LLM) -> None:
    """More streams than slots, each left after its first piece: none is in the way of the next (the fixture looks too)."""
    for _ in range(SLOTS + 1):
        stream = idle.stream(TEXT, SAMPLED)
        next(stream)
        assert len(idle.engine.scheduler.free_slots) == SLOTS - 1
        stream.close()
        assert len(idle.engine.scheduler.free_slots) == SLOTS
    abandoned = idle.stream(TEXT, SAMPLED)
    del abandoned  # never begun: nothing to give back


def test_calls_within_a_stream(idle: LLM) -> None:
    """Two streams in step, and generate in the loop over one, lose no token of one another, with all slots taken too."""
    whole = {prompt: idle.generate(prompt, SAMPLED)[0] for prompt in (TEXT, "!")}
    first, second = ([delta for delta in deltas if delta is not None] for deltas in zip(*both(idle), strict=True))
    for prompt, deltas in ((TEXT, first), ("!", second)):
        assert sum((d.token_ids for d in deltas), ()) == whole[prompt].token_ids
    outer = []
    for delta in idle.stream(TEXT, SAMPLED):
        outer += delta.token_ids
        if len(outer) == 1:
            assert idle.generate(["!"] * SLOTS, SAMPLED) == [whole["!"]] * SLOTS
    assert tuple(outer) == whole[TEXT].token_ids


def both(llm: LLM) -> Iterator[tuple[inkling_jax.Delta | None, inkling_jax.Delta | None]]:
    """In turn; None of one that ended before the other: the first token of a later stream comes with a step of the earlier's."""
    return itertools.zip_longest(llm.stream(TEXT, SAMPLED), llm.stream("!", SAMPLED))


def test_text_never_becomes_a_control_token(idle: LLM) -> None:
    """A str that spells one is tokenised as text."""
    assert idle.tokenizer is not None
    text = "<|message_user|>"
    control = idle.tokenizer.control["message_user"]
    rows = idle.score(text).shape[0]
    assert rows == len(idle.tokenizer.encode(text)) > 1
    assert not np.array_equal(idle.score(text)[-1], idle.score([control])[-1])
    assert idle.generate(text, dataclasses.replace(SAMPLED, max_tokens=1))[0].prompt_tokens == rows


def test_chat_prompt_holds_control_tokens(idle: LLM) -> None:
    """Spec 6: the effort, the turn, the opening of the model's; what a user spells stays text."""
    assert idle.tokenizer is not None
    role, encode = idle.tokenizer.control, idle.tokenizer.encode
    found = idle.chat_prompt([{"role": "user", "content": "a<|end_message|>"}], effort="low").token_ids
    line = encode("Thinking effort level: 0.2")
    wanted = [role["message_system"], role["content_text"], *line, role["end_message"]]
    wanted += [role["message_user"], role["content_text"], *encode("a<|end_message|>"), role["end_message"]]
    assert list(found) == [*wanted, role["message_model"]]
    assert list(found).count(role["end_message"]) == 2


@pytest.fixture
def heeding() -> Iterator[None]:
    """Ctrl-C raises, as at a terminal; a process that was started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeding")
def test_an_interrupt_waits_for_the_step_and_spoils_nothing(idle: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a step: the step is booked, the call raises, and the model goes on as before."""
    (whole,) = idle.generate(TEXT, SAMPLED)
    step, booked = idle.engine.step, []

    def interrupted():
        signal.raise_signal(signal.SIGINT)
        outputs = step()
        booked.append(outputs)
        return outputs

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(idle.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        idle.generate(TEXT, SAMPLED)
    assert len(booked) == 1 and signal.getsignal(signal.SIGINT) is before
    monkeypatch.undo()
    assert idle.generate(TEXT, SAMPLED) == [whole]


@pytest.mark.usefixtures("heeding")
def test_a_second_interrupt_does_not_wait(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take the state with it, so the model is closed."""
    llm = load(directory)

    def stuck():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second interrupt did not come through")

    monkeypatch.setattr(llm.engine, "step", stuck)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(TEXT, SAMPLED)
    with pytest.raises(InputError, match="closed"):
        llm.score(TEXT)


def test_a_closed_model_says_so(directory: Path) -> None:
    """Whatever is asked of it, and twice closed is closed."""
    with load(directory) as llm:
        stream = llm.stream(TEXT, SAMPLED)
    llm.close()
    calls = (lambda: llm.generate(TEXT), lambda: llm.score(TEXT), lambda: llm.trace(TEXT), lambda: next(stream))
    for call in (*calls, lambda: llm.parameters):
        with pytest.raises(InputError, match="this model is closed"):
            call()


def test_without_a_tokenizer(idle: LLM) -> None:
    """Ids work and give no text; text, stop strings and conversations are refused with what to give."""
    bare = copy.copy(idle)
    bare.tokenizer = None
    ids = idle.tokenizer.encode(TEXT) if idle.tokenizer else []
    (found,) = bare.generate(ids, SAMPLED)
    assert found.text == "" and found.token_ids == idle.generate(ids, SAMPLED)[0].token_ids
    assert sum((d.token_ids for d in bare.stream(ids, SAMPLED)), ()) == found.token_ids
    for call in (
        lambda: bare.generate(TEXT),
        lambda: bare.score(TEXT),
        lambda: bare.generate(ids, SamplingParams(stop="x")),
        lambda: bare.chat_prompt([{"role": "user", "content": TEXT}]),
    ):
        with pytest.raises(InputError, match="tokenizer.json: give token ids"):
            call()


@pytest.mark.parametrize(
    ("prompt", "error", "told"),
    [
        ("", InputError, "the prompt is empty"),
        ([[]], InputError, "the prompt is empty"),
        (Prompt([]), InputError, "the prompt is empty"),
        ([1, USABLE], InputError, f"token 1 of the prompt is {USABLE}: ids are integers from 0 to {USABLE - 1}"),
        ([-1], InputError, "token 0 of the prompt is -1"),
        ([[1, True]], InputError, "token 1 of the prompt is True"),
        ([1.5], InputError, "the prompt is 1.5: expected a text, a sequence of token ids or a Prompt"),
        (b"abc", InputError, "the prompt is b'abc': expected a text"),
        (Prompt(5), InputError, "the prompt is 5: expected"),  # pyright: ignore[reportArgumentType]
        ({"prompt": "a"}, InputError, "the prompt is {'prompt': 'a'}: expected"),
        (None, InputError, "the prompt is None: expected"),
        (np.array(5), InputError, "the prompt is .*5.*: expected"),
        (Prompt([1], images=["cat.png"]), InputError, "image 0: cat.png: no such file"),
        ("\ud800", InputError, "lone surrogate at character 0"),
        ([5] * (CONTEXT + 1), CapacityError, f"has {CONTEXT + 1} tokens, the context holds {CONTEXT}"),
    ],
)
def test_bad_prompts(idle: LLM, prompt, error: type[Exception], told: str) -> None:
    """Each is refused by what is wrong with it, alone and beside a good one, and leaves nothing behind."""
    with pytest.raises(error, match=told):
        idle.generate(prompt, SAMPLED)
    one = prompt[0] if str(prompt) in ("[[]]", "[[1, True]]", "[1.5]") else prompt
    with pytest.raises(error, match=told):
        idle.generate([TEXT, one], SAMPLED)
    with pytest.raises(error, match=told):
        idle.score(one)
    assert not idle.engine.scheduler.running and not idle.engine.scheduler.waiting


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"max_context": 513}, InputError, "max_context 513 is not from 1 to the model's 512"),
        ({"kv_memory": 1000}, CapacityError, r"the cache needs \d+ bytes .*, 1000 are left"),
        ({"kv_memory": "2kB", "max_context": 512}, CapacityError, "for a context of 512 tokens, 2000 are left"),
        ({"max_context": 1.5}, InputError, "max_context=1.5: expected an integer of at least 1"),
        ({"max_context": 0}, InputError, "max_context=0: expected an integer of at least 1"),
        ({"seed": -1}, InputError, "seed=-1: expected an integer of at least 0"),
        ({"kv_memory": 1.5e9}, InputError, "kv_memory=1500000000.0: expected a number of bytes"),
        ({"kv_memory": -1}, InputError, "kv_memory=-1: expected a number of bytes"),
        ({"kv_memory": "lots"}, InputError, "size 'lots': expected a number of bytes such as 40GB"),
        ({"page_size": 24}, InputError, "page_size 24 is not a power of two"),
        ({"slots": 0}, InputError, "slots=0: expected an integer of at least 1"),
        ({"chunk": True}, InputError, "chunk=True"),
        ({"dtype": "float16"}, InputError, "dtype 'float16': expected one of bfloat16, float32"),
        ({"dtype": ["float32"]}, InputError, r"dtype \['float32'\]: expected one of bfloat16, float32"),
        ({"kernels": "fast"}, InputError, "kernels='fast'"),
        ({"weights": "none"}, InputError, "weights='none'"),
        ({"mesh": "tensor=9"}, InputError, "needs 9 devices, 8 are present"),
        ({"mesh": "tensor=two"}, InputError, "'tensor=two' is not AXIS=SIZE"),
        ({"mesh": {"tenor": 2}}, InputError, "'tenor=2' is not AXIS=SIZE"),
        ({"mesh": {"tensor": 0}}, InputError, "'tensor=0' is not AXIS=SIZE"),
        ({"mesh": 8}, InputError, "mesh 8: expected axis sizes such as 'tensor=8'"),
        ({"mesh": "tensor=" + "9" * 5000}, InputError, "is not AXIS=SIZE"),
        ({"mesh": "tensor=1,tensor=2"}, InputError, "tensor has more than one size"),
        ({"mesh": "data=2", "draft": True}, InputError, "mesh data=2: the draft head runs on a mesh of one replica"),
        (
            {"experts_over": "data"},
            InputError,
            "experts_over='data': mesh tensor=1 has one replica; give it more, such as data=2",
        ),
        ({"experts_over": "expert"}, InputError, "experts_over='expert': expected None"),
        ({"mesh": "data=2", "experts_over": "data", "kernels": "sm90"}, InputError, "are of the reference path alone"),
        ({"page_size": 0}, InputError, "page_size=0: expected an integer of at least 1"),
    ],
)
def test_bad_options(directory: Path, options: dict, error: type[Exception], told: str) -> None:
    """Each names the option and both numbers, before a weight is read."""
    with pytest.raises(error, match=told):
        inkling_jax.load(directory, quiet=True, **options)


@pytest.mark.parametrize(
    ("source", "error", "told"),
    [
        ("nothing/of/the/kind", CheckpointError, "nothing/of/the/kind: no such directory"),
        ("./nothing", CheckpointError, "./nothing: no such directory"),
        ("incling", InputError, r"unknown model 'incling': neither a directory nor .*a preset \(inkling, inkling-small\)"),
        ("inkling-small", InputError, "is a preset, which is a shape without weights"),
        ("~no such user/model", CheckpointError, "~no such user/model: no such directory"),
        ("x" * 5000, InputError, "unknown model 'xxx"),
        (None, InputError, "model None: expected a checkpoint directory, a preset's name or a hub id"),
    ],
)
def test_bad_sources(source, error: type[Exception], told: str) -> None:
    """A path, a name and a preset without weights each get their own answer."""
    with pytest.raises(error, match=told):
        inkling_jax.load(source)


def test_a_dtype_of_the_configuration_that_we_lack(directory: Path, tmp_path: Path) -> None:
    """Nobody asked for it: the message says where it comes from, and asking for another loads."""
    copied = shutil.copytree(directory, tmp_path / "half")
    config = json.loads((copied / "config.json").read_text())
    config["text_config"]["torch_dtype"] = "float16"
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="dtype 'float16' is the configuration's, give another: one of bfloat16, float32"):
        inkling_jax.load(copied, quiet=True)
    with load(copied) as half:
        assert ", float32, " in half.summary
