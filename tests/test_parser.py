"""What a model wrote, told apart: transcripts written out by hand, whole and cut everywhere, as ids and as spelled text."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import write_byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_jax.errors import InputError
from inkling_jax.inputs.control import CONTROL_TOKENS
from inkling_jax.inputs.tokenizer import Tokenizer
from inkling_jax.outputs.parser import OutputParser, Parsed, ParsedDelta, SpelledParser
from inkling_jax.outputs.tool_calls import MalformedCall, ToolCall

THINK, SAY, CALL, END = "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>", "<|end_message|>"
MODEL, STOP = "<|message_model|>", "<|content_model_end_sampling|>"
WEATHER = '{"name":"get_weather","args":{"city":"Zürich","unit":"C"}}'
NESTED = '{"name":"f","args":{"a":[{"b":"}]\\"{"},2.5],"c":{"d":null,"e":"\\\\"}}}'
SPELLINGS = [s for token in CONTROL_TOKENS.values() for s in token.spellings]
SPELLED = re.compile("(" + "|".join(map(re.escape, SPELLINGS)) + ")")


def case(name: str, text: str, *, reasoning: str = "", content: str = "", calls: Any = (), bad: Any = ()) -> Any:
    """`calls` are (name, arguments), `bad` are (name, payload, what the error says)."""
    return pytest.param(text, reasoning, content, list(calls), list(bad), id=name)


TRANSCRIPTS = [
    case("nothing", ""),
    case("only an opening", MODEL),
    case("plain text", "42", content="42"),
    case("plain words", "Hello there, you.", content="Hello there, you."),
    case("text without an opening, with its end", "hello" + END, content="hello"),
    case("an answer", SAY + "Hi" + END, content="Hi"),
    case("an answer with its opening", MODEL + SAY + "Hi" + END + STOP, content="Hi"),
    case("thinking, then an answer", THINK + "Add." + END + MODEL + SAY + "4" + END + STOP, reasoning="Add.", content="4"),
    case("thinking, then an answer without an end", THINK + "Add." + END + MODEL + SAY + "4", reasoning="Add.", content="4"),
    case("an opening is left out", THINK + "a" + END + SAY + "b" + END, reasoning="a", content="b"),
    case("an end is left out", THINK + "a" + SAY + "b" + MODEL + SAY + "c", reasoning="a", content="bc"),
    case(
        "thinking and saying by turns",
        f"{THINK}a{END}{MODEL}{SAY}b{END}{MODEL}{THINK}c{END}{MODEL}{SAY}d{END}",
        reasoning="ac",
        content="bd",
    ),
    case("cut while thinking", MODEL + THINK + "Let me", reasoning="Let me"),
    case("cut in a name", f"{SAY}a{END}{MODEL}get_wea", content="aget_wea"),
    case("characters of several bytes", f"{THINK}é漢😀{END}{MODEL}{SAY}😀漢é{END}", reasoning="é漢😀", content="😀漢é"),
    case("text of one long word", "漢" * 200, content="漢" * 200),
    case("a call", f"{MODEL}get_weather{CALL}{WEATHER}{END}{STOP}", calls=[("get_weather", {"city": "Zürich", "unit": "C"})]),
    case(
        "a call without an opening", f"get_weather{CALL}" + '{"name":"get_weather","args":{}}' + END, calls=[("get_weather", {})]
    ),
    case("a call without a name before it", f"{MODEL}{CALL}{WEATHER}", calls=[("get_weather", {"city": "Zürich", "unit": "C"})]),
    case("words before a call", f"I will. f{CALL}" + '{"name":"f","args":{}}' + END, content="I will. f", calls=[("f", {})]),
    case(
        "thinking, words and two calls",
        f"{THINK}hm{END}{MODEL}{SAY}Let me see.{END}{MODEL}get_weather{CALL}{WEATHER}{END}{MODEL}f{CALL}{NESTED}{END}{STOP}",
        reasoning="hm",
        content="Let me see.",
        calls=[
            ("get_weather", {"city": "Zürich", "unit": "C"}),
            ("f", {"a": [{"b": '}]"{'}, 2.5], "c": {"d": None, "e": "\\"}}),
        ],
    ),
    case("spaces in a payload", f"f{CALL}" + ' { "name" : "f" ,\n "args" : { "a" : 1 } } ' + END, calls=[("f", {"a": 1})]),
    case("the arguments first", f"f{CALL}" + '{"args":{"a":1},"name":"f"}' + END, calls=[("f", {"a": 1})]),
    case("the arguments first, no name before", CALL + '{"args":{"a":1},"name":"f"}' + END, calls=[("f", {"a": 1})]),
    case("a name with an escape", CALL + '{"name":"\\u0066\\"","args":{}}', calls=[('f"', {})]),
    case("far blanks", f"f{CALL}" + " " * 2000 + '{"name":"f","args":{}}', calls=[("f", {})]),
    case("a call by text", "f<|content_invoke_tool_text|>ls -l" + END, bad=[("f", "ls -l", "not JSON")]),
    case(
        "an entity",
        f"f{CALL}" + '{"name":"f","args":{"u":"http://x&quot;}}' + END,
        bad=[("f", '{"name":"f","args":{"u":"http://x&quot;}}', "not JSON: Unterminated string")],
    ),
    case("no JSON", f"f{CALL}oh dear{END}{MODEL}{SAY}x{END}", content="x", bad=[("f", "oh dear", "not JSON: Expecting value")]),
    case("an empty call", f"f{CALL}{END}", bad=[("f", "", "not JSON: Expecting value")]),
    case(
        "a bracket too many",
        f"f{CALL}" + '{"name":"f","args":{}}}' + END,
        bad=[("f", '{"name":"f","args":{}}}', "not JSON: Extra data")],
    ),
    case(
        "cut in a call",
        f"f{CALL}" + '{"name":"f","args":{"a":"x',
        bad=[("f", '{"name":"f","args":{"a":"x', "the answer ends before")],
    ),
    case("cut where the call is whole", f"f{CALL}" + '{"name":"f","args":{"a":1}}', calls=[("f", {"a": 1})]),
    case(
        "another's key",
        f"f{CALL}" + '{"name":"f","arguments":{}}' + END,
        bad=[("f", '{"name":"f","arguments":{}}', 'not an object of "name" and "args"')],
    ),
    case("a list", f"f{CALL}[1]{END}", bad=[("f", "[1]", "not an object of")]),
    case("no arguments", CALL + '{"name":"f"}' + END, bad=[("f", '{"name":"f"}', "not an object of")]),
    case(
        "arguments in a list",
        f"f{CALL}" + '{"name":"f","args":[1]}' + END,
        bad=[("f", '{"name":"f","args":[1]}', "the arguments are list")],
    ),
    case("a name that is none", CALL + '{"name":7,"args":{}}' + END, bad=[("", '{"name":7,"args":{}}', "the name is 7")]),
    case(
        "two names",
        f"f{CALL}" + '{"name":"g","args":{}}' + END,
        bad=[("f", '{"name":"g","args":{}}', "names 'f', its payload 'g'")],
    ),
    case(
        "a key twice",
        f"f{CALL}" + '{"name":"f","args":{"a":1,"a":2}}' + END,
        bad=[("f", '{"name":"f","args":{"a":1,"a":2}}', "a key stands twice")],
    ),
    case(
        "no numbers",
        f"f{CALL}" + '{"name":"f","args":{"a":NaN}}' + END,
        bad=[("f", '{"name":"f","args":{"a":NaN}}', "NaN is no JSON number")],
    ),
    case(
        "too large",
        f"f{CALL}" + '{"name":"f","args":{"a":1e999}}' + END,
        bad=[("f", '{"name":"f","args":{"a":1e999}}', "not JSON: Out of range")],
    ),
    case(
        "half a pair",
        f"f{CALL}" + '{"name":"f","args":{"a":"\\ud800"}}' + END,
        bad=[("f", '{"name":"f","args":{"a":"\\ud800"}}', "surrogates not allowed")],
    ),
    case(
        "a good call after a bad one",
        f"f{CALL}x{END}{MODEL}g{CALL}" + '{"name":"g","args":{}}' + END,
        calls=[("g", {})],
        bad=[("f", "x", "not JSON")],
    ),
    case(
        "too deep",
        f"f{CALL}" + '{"name":"f","args":{"a":' + "[" * 100_000,
        bad=[("f", '{"name":"f","args":{"a":' + "[" * 100_000, "the answer ends")],
    ),
    case("other tokens between", f"{SAY}a<|audio_end|>b<|endoftext|>c{END}", content="abc"),
    case("other kinds and roles", f"<|content_xml|>a{END}<|message_user|>{SAY}b", content="ab"),
    case("going on after the end", f"{SAY}a{END}{STOP}{MODEL}{SAY}b{END}", content="ab"),
]
SHORT = [p for p in TRANSCRIPTS if len(p.values[0]) < 2500]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("demo")
    write_byte_tokenizer(directory, 320)
    return Tokenizer.from_directory(directory, None)


def ids_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """Control tokens where they are spelled, and text between them as the tokenizer cuts it."""
    pieces = SPELLED.split(text)
    ids = [[tokenizer.control_spellings[p]] if n % 2 else tokenizer.encode(p) for n, p in enumerate(pieces)]
    return list(itertools.chain.from_iterable(ids))


def byte_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """The same with a token for every byte."""
    single = {tokenizer.token_bytes(i): i for i in range(256)}
    pieces = SPELLED.split(text)
    ids = [[tokenizer.control_spellings[p]] if n % 2 else [single[bytes([b])] for b in p.encode()] for n, p in enumerate(pieces)]
    return list(itertools.chain.from_iterable(ids))


def folded(deltas: list[ParsedDelta]) -> dict[str, Any]:
    """What a client makes of the pieces: texts joined, arguments joined and read, malformed calls dropped and noted."""
    calls: dict[int, list[str]] = {}
    malformed = {}
    for call in (delta.call for delta in deltas if delta.call is not None):
        assert bool(call.name) == (call.index not in calls and not isinstance(call.finished, MalformedCall))
        if call.name:
            calls[call.index] = [call.name, ""]
        if call.arguments:
            calls[call.index][1] += call.arguments
        if isinstance(call.finished, MalformedCall):
            calls.pop(call.index, None)
            malformed[call.index] = (call.finished.name, call.finished.text)
        elif call.finished is not None:
            name, arguments = calls[call.index]
            assert (call.finished.name, call.finished.arguments) == (name, json.loads(arguments))
    return {
        "reasoning": "".join(delta.reasoning for delta in deltas),
        "content": "".join(delta.content for delta in deltas),
        "calls": [(name, json.loads(arguments)) for _, (name, arguments) in sorted(calls.items())],
        "malformed": [malformed[n] for n in sorted(malformed)],
    }


def summary(parsed: Parsed) -> dict[str, Any]:
    return {
        "reasoning": parsed.reasoning,
        "content": parsed.content,
        "calls": [(call.name, call.arguments) for call in parsed.tool_calls],
        "malformed": [(call.name, call.text) for call in parsed.malformed_calls],
    }


def run(parser: OutputParser | SpelledParser, pieces: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the deltas say, and what the parser says at the end."""
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    deltas += parser.finish()
    return folded(deltas), summary(parser.parsed)


def wanted(reasoning: str, content: str, calls: list, bad: list) -> dict[str, Any]:
    return {"reasoning": reasoning, "content": content, "calls": calls, "malformed": [(name, text) for name, text, _ in bad]}


def test_there_are_transcripts():
    assert len(TRANSCRIPTS) >= 40 and len({p.id for p in TRANSCRIPTS}) == len(TRANSCRIPTS)


@pytest.mark.parametrize(("text", "reasoning", "content", "calls", "bad"), TRANSCRIPTS)
def test_whole(text: str, reasoning: str, content: str, calls: list, bad: list, tokenizer: Tokenizer):
    """In one piece, as ids and as text; calls are numbered, and what is wrong with one is said."""
    expected = wanted(reasoning, content, calls, bad)
    for parser, piece in ((OutputParser(tokenizer), ids_of(text, tokenizer)), (SpelledParser(), text)):
        assert run(parser, [piece]) == (expected, expected)
        for found, (_, _, error) in zip(parser.parsed.malformed_calls, bad, strict=True):
            assert error in found.error


@pytest.mark.parametrize(("text", "reasoning", "content", "calls", "bad"), SHORT)
def test_ids_cut_everywhere(text: str, reasoning: str, content: str, calls: list, bad: list, tokenizer: Tokenizer):
    """In two pieces at every place, and id by id, be the tokens long or single bytes."""
    expected = wanted(reasoning, content, calls, bad)
    for ids in (ids_of(text, tokenizer), byte_ids(text, tokenizer)):
        cuts = range(len(ids) + 1) if len(ids) < 400 else range(0, len(ids), 41)
        for pieces in [[[i] for i in ids], *([ids[:n], ids[n:]] for n in cuts)]:
            assert run(OutputParser(tokenizer), pieces) == (expected, expected)


@pytest.mark.parametrize(("text", "reasoning", "content", "calls", "bad"), SHORT)
def test_text_cut_everywhere(text: str, reasoning: str, content: str, calls: list, bad: list):
    """In two pieces at every character, in three where it is short, and character by character: through control tokens too."""
    expected = wanted(reasoning, content, calls, bad)
    cuts = range(len(text) + 1) if len(text) < 400 else range(0, len(text), 41)
    for pieces in [list(text), *([text[:n], text[n:]] for n in cuts)]:
        assert run(SpelledParser(), pieces) == (expected, expected)
    if len(text) < 50:
        for a, b in itertools.combinations(cuts, 2):
            assert run(SpelledParser(), [text[:a], text[a:b], text[b:]]) == (expected, expected)


def test_text_streams(tokenizer: Tokenizer):
    """Each id's text comes at once; a call's arguments come while they are written, after its name."""
    parser = OutputParser(tokenizer)
    assert parser.push(ids_of(THINK, tokenizer)) == []
    assert [parser.push([i]) for i in byte_ids("hm", tokenizer)] == [[ParsedDelta(reasoning="h")], [ParsedDelta(reasoning="m")]]
    assert parser.push(byte_ids("é", tokenizer)[:1]) == []
    assert parser.push(byte_ids("é", tokenizer)[1:]) == [ParsedDelta(reasoning="é")]
    assert parser.push(ids_of(END + MODEL + SAY + "a b", tokenizer)) == [ParsedDelta(content="a b")]
    assert parser.push(ids_of(END + MODEL + "f" + CALL + '{"name":"f","args":', tokenizer)) == []
    (opened,) = parser.push(ids_of('{"a":', tokenizer))
    assert opened.call is not None and (opened.call.index, opened.call.name, opened.call.arguments) == (0, "f", '{"a":')
    (more,) = parser.push(ids_of("1}}", tokenizer))
    assert more.call is not None and (more.call.name, more.call.arguments, more.call.finished) == ("", "1}", None)
    (last,) = parser.push(ids_of(END, tokenizer))
    assert last.call is not None and last.call.finished == ToolCall("call_0", "f", {"a": 1})
    assert parser.finish() == []


def test_plain_words_are_held_back_no_longer_than_they_may_be_a_name(tokenizer: Tokenizer):
    parser = OutputParser(tokenizer)
    assert parser.push(byte_ids("Hello", tokenizer)) == []
    assert parser.push(byte_ids(" y", tokenizer)) == [ParsedDelta(content="Hello y")]
    assert parser.push(byte_ids("ou", tokenizer)) == [ParsedDelta(content="ou")]


def test_pieces_of_one_push_keep_their_order(tokenizer: Tokenizer):
    ids = ids_of(SAY + "a" + MODEL + THINK + "b" + MODEL + SAY + "c", tokenizer)
    assert OutputParser(tokenizer).push(ids) == [ParsedDelta(content="a"), ParsedDelta(reasoning="b"), ParsedDelta(content="c")]


def test_blocks_are_kept_apart(tokenizer: Tokenizer):
    """For the next turn's prompt, whose blocks are not joined either; those without text are left out."""
    parser = OutputParser(tokenizer)
    parser.push(ids_of(f"{THINK}a{END}{MODEL}{SAY}b{END}{MODEL}{SAY}{END}{MODEL}{SAY}c", tokenizer))
    parser.finish()
    assert parser.parsed.blocks == (("reasoning", "a"), ("content", "b"), ("content", "c"))


def test_calls_are_numbered_after_those_of_the_conversation(tokenizer: Tokenizer):
    parser = OutputParser(tokenizer, first_call=3)
    parser.push(ids_of(f"f{CALL}x{END}{MODEL}g{CALL}" + '{"name":"g","args":{}}' + END, tokenizer))
    assert [call.id for call in parser.parsed.tool_calls] == ["call_4"]


@pytest.mark.parametrize(
    ("prompt", "answer", "reasoning", "content"),
    [
        (f"<|message_user|>{SAY}x{END}", "hello" + END, "", "hello"),
        (f"<|message_user|>{SAY}x{END}{MODEL}", THINK + "a" + END, "a", ""),
        (f"<|message_user|>{SAY}x{END}{MODEL}{THINK}", "a b" + END + MODEL + SAY + "c", "a b", "c"),
        (f"<|message_user|>{SAY}x{END}{MODEL}{THINK}", "a" + END, "a", ""),
        (f"<|message_user|>{SAY}x{END}{MODEL}{SAY}It is", " so", "", " so"),
        (f"{MODEL}{THINK}x{END}{MODEL}{SAY}y{END}{STOP}", "z", "", "z"),
    ],
)
def test_an_answer_goes_on_where_the_prompt_ends(prompt: str, answer: str, reasoning: str, content: str, tokenizer: Tokenizer):
    """A template may open the first block; what the prompt holds is no part of the answer."""
    parser = OutputParser(tokenizer, ids_of(prompt, tokenizer))
    expected = wanted(reasoning, content, [], [])
    assert run(parser, [ids_of(answer, tokenizer)]) == (expected, expected)


def test_a_parser_that_has_finished_begins_anew(tokenizer: Tokenizer):
    """One stream ends while thinking, or in a call; the next is plain text."""
    for parser, read in ((OutputParser(tokenizer), ids_of), (SpelledParser(), lambda text, _: text)):
        for cut in (THINK + "hm", "f" + CALL + "{", "na", SAY + "<|end_mes"):
            parser.push(read(cut, tokenizer))
            parser.finish()
            assert parser.push(read("plain words", tokenizer)) == [ParsedDelta(content="plain words")]
            parser.finish()


@pytest.mark.parametrize(
    ("text", "kept"), [("a <", "a <"), ("a <|", "a <|"), ("a <|e", "a "), ("a <|end_message|", "a "), ("a <|x", "a <|x")]
)
def test_a_control_token_that_text_breaks_off(text: str, kept: str):
    """Too short to be one, it is text; begun in earnest, it is dropped; and none is begun by what no token begins with."""
    assert run(SpelledParser(), [SAY + text])[0]["content"] == kept


def test_ids_that_spell_a_control_token_are_text(tokenizer: Tokenizer):
    text = "say <|end_message|> or <|message_model|>"
    ids = [tokenizer.control["content_text"], *tokenizer.encode(text)]
    expected = wanted("", text, [], [])
    assert run(OutputParser(tokenizer), [ids]) == (expected, expected)


def test_half_a_character(tokenizer: Tokenizer):
    """Before a control token and at the end it is one replacement character, and none where a token says nothing."""
    half = byte_ids("é", tokenizer)[:1]
    ids = [tokenizer.control["content_thinking"], *half, tokenizer.control["end_message"], *half]
    expected = wanted("\ufffd", "\ufffd", [], [])
    assert run(OutputParser(tokenizer), [ids]) == (expected, expected)


def test_bytes_that_do_not_count(tokenizer: Tokenizer):
    """The last id may say more than a stop string lets through; ids before it count in full."""
    word = next(i for i in range(256, 282) if len(tokenizer.token_bytes(i)) == 2)
    text = tokenizer.decode([word])
    for drop, kept in ((0, text + text), (1, text + text[:1]), (2, text)):
        parser = OutputParser(tokenizer)
        parser.push([word, word], drop)
        parser.finish()
        assert parser.parsed.content == kept


def test_ids_out_of_range(tokenizer: Tokenizer):
    with pytest.raises(InputError, match="token id 320 is outside"):
        OutputParser(tokenizer).push([320])


def test_a_token_that_the_format_does_not_name(tmp_path: Path):
    """One for calls whose id is not published is known by its spelling; another is passed over."""
    write_byte_tokenizer(tmp_path, 320)
    file = tmp_path / "tokenizer.json"
    spelled = (
        file.read_text()
        .replace("<|content_tool_error|>", "<|content_invoke_tool|>")
        .replace("<|audio_end|>", "<|model_trigger_generation|>")
    )
    file.write_text(spelled)
    tokenizer = Tokenizer.from_directory(tmp_path, None)
    call, other = tokenizer.id_of("<|content_invoke_tool|>"), tokenizer.id_of("<|model_trigger_generation|>")
    assert call is not None and other is not None
    ids = [other, *tokenizer.encode("f"), call, *tokenizer.encode('{"name":"f","args":{}}')]
    assert run(OutputParser(tokenizer), [ids])[0]["calls"] == [("f", {})]


PIECES = st.lists(
    st.one_of(
        st.sampled_from(
            [*SPELLINGS, WEATHER, NESTED, '{"name":"f","args":{', '"', "}", "\\", "f", "get_weather", " ", "<", "<|", "|>", "é"]
        ),
        st.text(max_size=8),
    ),
    max_size=12,
)


@settings(deadline=None)  # the machine may be busy
@given(pieces=PIECES, data=st.data())
def test_any_answer_is_the_same_however_it_is_cut(tokenizer: Tokenizer, pieces: list[str], data: st.DataObject):
    """Ids in any pieces as in one; no exception; every visible character is in one of the parts, in order."""
    ids = list(itertools.chain.from_iterable(ids_of(p, tokenizer) if p in SPELLINGS else tokenizer.encode(p) for p in pieces))
    whole = run(OutputParser(tokenizer), [ids])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    cut = [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]
    assert run(OutputParser(tokenizer), cut) == run(OutputParser(tokenizer), [[i] for i in ids]) == whole
    assert whole[0] == whole[1]
    if not any("invoke" in p for p in pieces):
        shown = whole[0]["reasoning"] + whole[0]["content"]
        assert set(shown) <= set("".join(p for p in pieces if p not in SPELLINGS))


@settings(deadline=None)
@given(pieces=PIECES, data=st.data())
def test_any_text_is_the_same_however_it_is_cut(tokenizer: Tokenizer, pieces: list[str], data: st.DataObject):
    """Spelled text in any pieces as in one; and where no piece spells half a token, as ids."""
    text = "".join(pieces)
    whole = run(SpelledParser(), [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    cut = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert run(SpelledParser(), cut) == run(SpelledParser(), list(text)) == whole
    if "<" not in SPELLED.sub("", text):
        assert run(OutputParser(tokenizer), [ids_of(text, tokenizer)]) == whole
