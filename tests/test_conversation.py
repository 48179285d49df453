"""Conversations with a model: what `llm.chat` answers and streams, what goes on to the next turn, and what is refused when."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import CALL, END, MODEL, OVER, SAY, THINK, ScriptedEngine, demo_tokenizer, ids_of, scripted_llm
from text_checkpoint import USABLE, write_text_checkpoint

import inkling_jax
from inkling_jax import LLM, CheckpointError, InputError, SamplingParams, loading
from inkling_jax.conversation import ChatCompletion, ChatDelta, ChatStream
from inkling_jax.inputs.segments import Control, Text
from inkling_jax.inputs.tokenizer import Tokenizer
from inkling_jax.outputs.tool_calls import MalformedCall, ToolCall

USER = {"role": "user", "content": "Hi"}
PAYLOAD = '{"name":"f","args":{"b":1,"a":"é"}}'
ANSWER = [THINK, "hm", END, MODEL, SAY, "Let me see.", END, MODEL, "f", CALL, PAYLOAD, END, MODEL, "g", CALL, "oh", END]
Ids = Callable[..., tuple[int, ...]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return demo_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def ids(tokenizer: Tokenizer) -> Ids:
    """`ids("<|control|>", "text", ...)`: one after the other."""
    return functools.partial(ids_of, tokenizer)


def engine_of(llm: LLM) -> ScriptedEngine:
    assert isinstance(llm.engine, ScriptedEngine)
    return llm.engine


def test_an_answer_whole_and_streamed(tokenizer: Tokenizer, ids: Ids) -> None:
    """The same from both, however many tokens a step brings; and what the pieces say, joined, is the answer."""
    made = ids(*ANSWER)
    completion = scripted_llm(tokenizer, [made, "stop"]).chat([USER])
    arguments = {"b": 1, "a": "é"}
    assert completion.reasoning == "hm" and completion.content == "Let me see."
    assert completion.tool_calls == (ToolCall("call_0", "f", arguments),)
    (malformed,) = completion.malformed_calls
    assert (malformed.name, malformed.text) == ("g", "oh") and malformed.error.startswith("not JSON")
    assert (completion.token_ids, completion.finish_reason, completion.error) == (made, "stop", None)
    for size in (1, 2, 5, len(made)):
        llm = scripted_llm(tokenizer, [*itertools.batched(made, size), "stop"])
        with llm.chat([USER], stream=True) as stream:
            deltas = list(stream)
        assert stream.completion() == completion
        assert "".join(d.reasoning for d in deltas) == "hm" and "".join(d.content for d in deltas) == "Let me see."
        assert tuple(i for d in deltas for i in d.token_ids) == made
        assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["stop"]
        finished = [d.tool_call.finished for d in deltas if d.tool_call and d.tool_call.finished]
        assert finished == [*completion.tool_calls, malformed]
        assert engine_of(llm).cancelled == []


def test_a_call_has_an_id_that_no_other_has(tokenizer: Tokenizer, ids: Ids) -> None:
    """Though one that cannot be made was told apart before it, and though the beginning of the conversation is left out."""
    call = ("f", CALL, PAYLOAD, END)
    scripts = [[ids("g", CALL, "oh", END, MODEL, *call), "stop"], *[[ids(*call), "stop"]] * 2]
    llm = scripted_llm(tokenizer, *scripts)
    messages, found = [USER], []
    for _ in scripts:
        answer = llm.chat(messages[-3:])
        (made,) = answer.tool_calls
        found.append(made.id)
        messages += [answer.message, {"role": "tool", "tool_call_id": made.id, "content": "1"}]
    assert found == ["call_1", "call_2", "call_3"]


def test_calls_of_others_than_the_model_do_not_count(tokenizer: Tokenizer, ids: Ids) -> None:
    """A user has none, whatever the message says; ids of a client's own making collide with none of ours."""
    history = [{**USER, "tool_calls": 5}, {"role": "assistant", "tool_calls": [{"id": "a7", "function": {"name": "f"}}]}]
    llm = scripted_llm(tokenizer, [ids("f", CALL, PAYLOAD, END), "stop"])
    assert [call.id for call in llm.chat(history).tool_calls] == ["call_0"]


def test_the_prompt_is_the_conversation(tokenizer: Tokenizer, ids: Ids) -> None:
    """As spec 6 has it, tools and effort included; and nothing of it is in the answer."""
    llm = scripted_llm(tokenizer, [ids("x y"), "stop"])
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert llm.chat([USER], tools=tools, effort="low").content == "x y"
    declared = '[{"description":"","name":"f","parameters":{},"type":"function"}]'
    system = ("<|message_system|>", "tool_declare", "<|content_xml|>", declared, END)
    line = ("<|message_system|>", SAY, "Thinking effort level: 0.2", END)
    (request,) = engine_of(llm).requests
    assert request.prompt_ids == ids(*system, *line, "<|message_user|>", SAY, "Hi", END, MODEL)


def test_an_answer_begins_where_the_template_ends(tokenizer: Tokenizer, ids: Ids) -> None:
    """A template that opens the thinking block itself."""
    llm = scripted_llm(tokenizer, [ids("hm", END, MODEL, SAY, "yes"), "stop"], [ids("hm"), "length"])
    llm._render_chat = lambda *_, **__: [Control("<|message_user|>"), Control(SAY), Text("Hi"), Control(MODEL), Control(THINK)]
    whole = llm.chat([USER])
    assert (whole.reasoning, whole.content) == ("hm", "yes")
    with llm.chat([USER], stream=True) as stream:
        assert [d.reasoning for d in stream] == ["hm", ""]
    assert stream.completion().finish_reason == "length"


@pytest.mark.parametrize("stop", ["m", "mYe", "es", "Yes.", "s. N"])
def test_a_stop_string_cuts_reasoning_and_answer(tokenizer: Tokenizer, ids: Ids, stop: str) -> None:
    """Nothing from the stop string on is said, though it begin within a token of the answer or of the thinking."""
    visible = ["h" + "m", "Yes. No"]
    cut = "".join(visible).index(stop)
    expected = ("".join(visible)[: min(cut, 2)], "".join(visible)[2 : max(cut, 2)])
    th = next(i for i in range(256, USABLE) if tokenizer.decode([i]) == "es")
    made = (*ids(THINK, "hm", END, MODEL, SAY, "Y"), th, *ids(". No"))
    params = SamplingParams(stop=stop)
    for steps in ([made], [(i,) for i in made]):
        whole = scripted_llm(tokenizer, [*steps, "length"]).chat([USER], sampling=params)
        assert ((whole.reasoning, whole.content), whole.finish_reason) == (expected, "stop")
        llm = scripted_llm(tokenizer, [*steps, "length"])
        with llm.chat([USER], sampling=params, stream=True) as stream:
            deltas = list(stream)
        assert ("".join(d.reasoning for d in deltas), "".join(d.content for d in deltas)) == expected
        assert stream.completion() == whole
        assert engine_of(llm).cancelled == [0]


@settings(deadline=None)  # the machine may be busy
@given(
    blocks=st.lists(st.tuples(st.sampled_from([THINK, SAY]), st.text("aeé€th", max_size=8)), max_size=4),
    stop=st.text("aeé€th", min_size=1, max_size=3),
    size=st.integers(1, 4),
)
def test_any_stop_string_cuts_any_answer(tokenizer: Tokenizer, ids: Ids, blocks: list, stop: str, size: int) -> None:
    """Whole and streamed: what comes before the first stop string in all that is visible, each part in its place."""
    visible = "".join(text for _, text in blocks)
    left = len(visible.partition(stop)[0])
    expected = {THINK: "", SAY: ""}
    for kind, text in blocks:
        expected[kind] += text[:left]
        left -= min(left, len(text))
    made = ids(*itertools.chain.from_iterable((MODEL, kind, text, END) for kind, text in blocks))
    params = SamplingParams(stop=stop)
    whole = scripted_llm(tokenizer, [made, "length"]).chat([USER], sampling=params)
    assert (whole.reasoning, whole.content) == (expected[THINK], expected[SAY])
    assert whole.finish_reason == ("stop" if stop in visible else "length")
    with scripted_llm(tokenizer, [*itertools.batched(made, size), "length"]).chat([USER], sampling=params, stream=True) as stream:
        deltas = list(stream)
    assert ("".join(d.reasoning for d in deltas), "".join(d.content for d in deltas)) == (whole.reasoning, whole.content)
    assert stream.completion() == whole


def test_a_stream_that_is_left(tokenizer: Tokenizer, ids: Ids) -> None:
    """The request is cancelled, and what came until then is the answer: held back text and half a call included."""
    llm = scripted_llm(tokenizer, [ids(THINK, "hm"), ids(END, MODEL, "wo"), "stop"], [ids(CALL, '{"name":"f","a'), "stop"])
    stream = llm.chat([USER], stream=True)
    assert next(stream) == ChatDelta(reasoning="hm", token_ids=ids(THINK, "hm"))
    assert next(stream) == ChatDelta(token_ids=ids(END, MODEL, "wo"))
    completion = stream.completion()
    assert (completion.reasoning, completion.content, completion.finish_reason) == ("hm", "wo", "cancelled")
    assert completion.token_ids == ids(THINK, "hm", END, MODEL, "wo") and engine_of(llm).cancelled == [0]
    assert list(stream) == []
    with llm.chat([USER], stream=True) as stream:
        next(stream)
    (malformed,) = stream.completion().malformed_calls
    assert malformed == MalformedCall("", '{"name":"f","a', "the answer ends before the call does")
    assert engine_of(llm).cancelled == [0, 1]


def test_an_interrupt_keeps_what_was_said(tokenizer: Tokenizer, ids: Ids) -> None:
    llm = scripted_llm(tokenizer, [ids(SAY, "a b"), KeyboardInterrupt()])
    stream = llm.chat([USER], stream=True)
    assert next(stream).content == "a b"
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert stream.completion().message == {"role": "assistant", "content": "a b"}


def test_an_answer_that_fails(tokenizer: Tokenizer, ids: Ids) -> None:
    llm = scripted_llm(tokenizer, [ids(SAY, "a"), "error"], [ids(SAY, "a"), "error"])
    whole = llm.chat([USER])
    assert (whole.content, whole.finish_reason, whole.error) == ("a", "error", "the logits are not finite")
    with llm.chat([USER], stream=True) as stream:
        assert [d.error for d in stream] == [None, "the logits are not finite"]
    assert stream.completion() == whole


def turn(completion: ChatCompletion, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that an answer becomes in the prompt of the next turn."""
    llm = scripted_llm(tokenizer, ["stop"])
    before, after = (llm.chat_prompt([USER, *more]).token_ids for more in ([], [completion.message]))
    assert tuple(after[: len(before) - 1]) == tuple(before[:-1]) and after[-1] == before[-1]
    return tuple(after[len(before) - 1 : -1])


def test_an_answer_goes_into_the_next_prompt_as_it_was_made(tokenizer: Tokenizer, ids: Ids) -> None:
    """Its reasoning kept, its blocks neither joined nor moved; the arguments of calls in canonical order, as in training."""
    simple = [THINK, "hm", END, MODEL, SAY, "yes", END]
    mixed = [SAY, "a", END, MODEL, THINK, "b", END, MODEL, SAY, "c", END, MODEL, SAY, "d", END]
    sorted_call = [MODEL, "f", CALL, '{"name":"f","args":{"a":"é","b":1}}', END]
    for pieces, wanted in (
        (simple, [MODEL, *simple, OVER]),
        (mixed, [MODEL, *mixed, OVER]),
        ([*simple, MODEL, "f", CALL, PAYLOAD, END], [MODEL, *simple, *sorted_call, OVER]),
        (["f", CALL, PAYLOAD, END], [*sorted_call, OVER]),
        ([THINK, "h"], [MODEL, THINK, "h", END, OVER]),
        (["plain words"], [MODEL, SAY, "plain words", END, OVER]),
        (["g", CALL, "oh", END], []),
        ([], []),
    ):
        completion = scripted_llm(tokenizer, [ids(*pieces), "stop"]).chat([USER])
        assert turn(completion, tokenizer) == ids(*wanted), pieces


def test_tools_are_called_and_answered(tokenizer: Tokenizer, ids: Ids) -> None:
    """The answer to a call is named by its id; every call of a conversation has an id of its own."""
    call = ids("f", CALL, PAYLOAD, END)
    llm = scripted_llm(tokenizer, [call, "stop"], [call, "stop"], [ids(SAY, "done"), "stop"])
    messages: list[dict] = [USER]
    for number in range(2):
        completion = llm.chat(messages)
        (made,) = completion.tool_calls
        assert made.id == f"call_{number}"
        messages += [completion.message, {"role": "tool", "tool_call_id": made.id, "content": str(made.arguments["b"])}]
    assert llm.chat(messages).content == "done"
    result = ids("<|message_tool|>", "f", SAY, "1", END)
    prompt = engine_of(llm).requests[-1].prompt_ids
    assert prompt[-len(result) - 1 :] == (*result, *ids(MODEL))
    assert sum(prompt[n : n + len(result)] == result for n in range(len(prompt))) == 2


def test_what_is_refused(tokenizer: Tokenizer) -> None:
    """Before anything runs; by name."""
    llm = scripted_llm(tokenizer)
    with pytest.raises(InputError, match="chat gives one answer, SamplingParams.n is 2"):
        llm.chat([USER], sampling=SamplingParams(n=2))
    with pytest.raises(InputError, match="SamplingParams.n is 2"):
        llm.chat([USER], sampling=SamplingParams(n=2), stream=True)
    with pytest.raises(InputError, match="messages is empty"):
        llm.chat([])
    with pytest.raises(InputError, match="effort 'loud' is none of"):
        llm.chat([USER], effort="loud")
    with pytest.raises(InputError, match=r"tools\[0\].function must be an object"):
        llm.chat([USER], tools=[{}])
    with pytest.raises(InputError, match="a conversation needs a tokenizer"):
        scripted_llm(None).chat([USER])
    assert engine_of(llm).requests == []


def test_a_real_model(directory: Path) -> None:
    """Greedy: the ids are those of `generate` on the chat's prompt; streamed and whole are one; logprobs come where asked for."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    with inkling_jax.load(directory, dtype="float32", quiet=True, slots=1, max_context=128) as llm:
        (made,) = llm.generate([llm.chat_prompt([USER])], params)
        whole = llm.chat([USER], sampling=params)
        with llm.chat([USER], sampling=params, stream=True) as stream:
            assert isinstance(stream, ChatStream) and sum(len(delta.token_ids) for delta in stream) == 24
        assert whole.token_ids == made.token_ids == stream.completion().token_ids
        assert (whole.reasoning, whole.content, whole.message) == (
            stream.completion().reasoning,
            stream.completion().content,
            stream.completion().message,
        )
        assert whole.logprobs == made.logprobs and whole.logprobs is not None
        assert (whole.finish_reason, whole.prompt_tokens) == ("length", made.prompt_tokens)


def test_a_broken_template_is_refused_before_weights_are_read(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name and line."""
    broken = shutil.copytree(directory, tmp_path / "broken")
    (broken / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content }")
    monkeypatch.setattr(loading, "_parameters", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(CheckpointError, match="chat template chat_template.jinja, line 2: "):
        inkling_jax.load(broken)
