"""The built-in chat format against conversations written out by hand, and message shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
from byte_tokenizer import write_byte_tokenizer
from chat_cases import CASES, HOSTILE, MEDIA, USER, Item, as_written, options, with_items
from hypothesis import given, settings

from inkling_jax.errors import InputError
from inkling_jax.inputs.chat import render
from inkling_jax.inputs.messages import canonical_json, check_messages
from inkling_jax.inputs.segments import Control, Media, Text, encode_segments
from inkling_jax.inputs.tokenizer import Tokenizer


def body(messages: list, **kw) -> str:
    """What comes after the effort line, as one string (for reading only: text is not marked in it)."""
    segments = render(messages, add_generation_prompt=False, **kw)
    after = segments.index(Text("Thinking effort level: 0.9")) + 2
    return "".join(s.spelling if isinstance(s, Control) else s.text for s in segments[after:])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("demo")
    write_byte_tokenizer(directory, 320)
    return Tokenizer.from_directory(directory, None)


def test_there_are_cases():
    assert len(CASES) == 14 and len(MEDIA) == 2


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_written_out_conversations(case: dict):
    messages, items = with_items(case)
    assert as_written(render(messages, **options(case)), case, items) == case["expect"]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_ids_of_written_out_conversations(case: dict, tokenizer: Tokenizer):
    """Each segment by itself, and as many slots as the item has rows."""
    messages, _ = with_items(case)
    slots = {"image": tokenizer.control_id("image_slot"), "audio": tokenizer.control_id("audio_slot")}
    rows = {kind: s[f"{kind}_slots"] for s in case["expect"] for kind in slots if f"{kind}_slots" in s}
    expected: list[int] = []
    for s in case["expect"]:
        if "control" in s:
            expected.append(tokenizer.id_of(s["control"]) or 0)
        elif "text" in s:
            expected += tokenizer.encode(s["text"])
        else:
            expected += [slots[kind] for kind in rows] * sum(rows.values())
    segments = render(messages, **options(case))
    assert encode_segments(segments, tokenizer, lambda media: [slots[media.kind]] * rows[media.kind]) == expected


def test_media_parts_as_clients_write_them():
    """The part types of the chat and responses forms; objects with an address or with base64; items of any kind."""
    data = "data:audio/mp3;base64,AAAA"
    wanted = [
        ("image", "a.png"),
        ("image", "u"),
        ("image", "u"),
        ("image", "d"),
        ("audio", "a.wav"),
        ("audio", "u"),
        ("audio", data),
    ]
    parts = [
        {"type": "image", "image": "a.png"},
        {"type": "image_url", "image_url": {"url": "u", "detail": "low"}},
        {"type": "image_url", "image_url": "u"},
        {"type": "input_image", "image_url": "d"},
        {"type": "audio", "audio": "a.wav"},
        {"type": "audio_url", "audio_url": {"url": "u"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}},
    ]
    for role in ("user", "tool", "system"):
        media = [s for s in render([{"role": role, "content": parts}]) if isinstance(s, Media)]
        assert [(m.kind, m.item) for m in media] == wanted
    image, audio = ({"type": kind, kind: Item()} for kind in ("image", "audio"))
    tokens = [s.spelling if isinstance(s, Control) else "*" for s in render([{"role": "user", "content": [image, audio]}])[4:-1]]
    opened = ["<|message_user|>", "<|content_image|>", "*", "<|end_message|>", "<|message_user|>"]
    assert tokens == [*opened, "<|content_audio_input|>", "*", "<|audio_end|>", "<|end_message|>"]


def test_a_video_is_its_frames():
    """Each a block of its own, where the video stood; who cannot show one is told."""
    message = {"role": "user", "content": ["a", {"type": "video_url", "video_url": {"url": "v.mp4"}}, "b"]}
    seen = []

    def frames(item: object, name: str) -> list[str]:
        seen.append((item, name))
        return ["f0", "f1"]

    (checked,) = check_messages([message], frames)
    assert seen == [("v.mp4", "messages[0].content[1].video_url")]
    images = [{"type": "image", "image": "f0"}, {"type": "image", "image": "f1"}]
    assert checked["content"] == [{"type": "text", "text": "a"}, *images, {"type": "text", "text": "b"}]
    assert check_messages([checked]) == [checked]
    with pytest.raises(InputError, match=r"messages\[0\].content\[1\] is a video"):
        render([message])


@pytest.mark.parametrize(
    ("effort", "spelled"),
    [(None, "0.9"), (0, "0"), (0.0, "0"), ("0", "0"), ("none", "0"), ("minimal", "0.1"), (0.10, "0.1"), ("0.35", "0.35")]
    + [(0.29, "0.29"), (-0.0, "0"), ("-0", "0")]
    + [("medium", "0.7"), ("high", "0.9"), ("xhigh", "0.99"), ("max", "0.99"), (0.99, "0.99"), (0.01, "0.01")],
)
def test_effort(effort, spelled: str):
    assert Text(f"Thinking effort level: {spelled}") in render([USER], effort=effort)


@pytest.mark.parametrize(
    "effort", [1, 1.0, 0.991, -0.1, 0.355, float("nan"), float("inf"), "loud", "", True, [0.5], "1e9", 10**400]
)
def test_bad_effort(effort):
    with pytest.raises(InputError, match="effort .* is none of none, minimal, .*0 to 0.99 with at most two decimals"):
        render([USER], effort=effort)


def test_json_of_tools():
    spec = {"z": 1, "a": {"n": 2.5, "m": True, "b": None}}
    assert canonical_json(spec, "x") == '{"a":{"b":null,"m":true,"n":2.5},"z":1}'
    declared = render([USER], tools=[{"type": "function", "function": {"name": "é"}}])[3]
    assert declared == Text('[{"description":"","name":"é","parameters":{},"type":"function"}]')
    assert render([USER], tools=[]) == render([USER])


def test_message_shapes():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": "é"}'}}
    text = "<|content_text|>{}<|end_message|>"
    called = '<|message_model|>f<|content_invoke_tool_json|>{"name":"f","args":{"a":"é","b":1}}<|end_message|>'
    end = "<|content_model_end_sampling|>"
    assert body([{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}]) == "".join(
        "<|message_user|>" + text.format(part) for part in "ab"
    )
    assert body([{"role": "user", "content": []}]) == ""
    assert body([{"role": "user", "content": ""}]) == "<|message_user|>" + text.format("")
    for nothing in (None, "", []):
        assert body([{"role": "assistant", "content": nothing, "tool_calls": [call]}]) == called + end
        assert body([{"role": "assistant", "content": nothing}]) == ""
    assert body([{"role": "assistant", "tool_calls": [call, call], "content": "x"}]) == (
        "<|message_model|>" + text.format("x") + called + called + end
    )
    for empty in ({}, "", None, "{}"):
        no_arguments = {"function": {"name": "f", "arguments": empty}}
        assert '{"name":"f","args":{}}' in body([{"role": "assistant", "content": None, "tool_calls": [no_arguments]}])
    parts = [{"type": "thinking", "thinking": "t"}, "x"]
    fields = {"reasoning_content": "t", "content": "x"}
    assert body([{"role": "assistant", "content": parts}]) == body([{"role": "assistant", **fields}])


def test_tool_results_are_named_by_their_call():
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}]}
    result = "<|message_tool|>{}<|content_text|>r<|end_message|>"
    for fields, name in [
        ({"tool_call_id": "c"}, "f"),
        ({"tool_call_id": "c", "name": "g"}, "g"),
        ({"tool_call_id": "unknown"}, ""),
        ({}, ""),
    ]:
        assert body([called, {"role": "tool", "content": "r", **fields}]).endswith(result.format(name))


def call_with(arguments: object) -> list:
    return [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ("Hi", "messages must be a list, not str"),
        (["Hi"], r"messages\[0\] must be an object, not str"),
        ([USER, {"role": "developer", "content": "x"}], r"messages\[1\].role is 'developer'; it must be one of system, user"),
        ([{"content": "x"}], r"messages\[0\].role is None"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\].role is \['user'\]"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be a list, not int"),
        ([{"role": "user", "content": [5]}], r"messages\[0\].content\[0\] must be an object, not int"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text must be a string, not NoneType"),
        ([{"role": "user", "content": [{"type": "poem"}]}], r"content\[0\] is of unknown type 'poem'"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], r"content\[0\] is of unknown type \['text'\]"),
        ([{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}], "only an assistant"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"content\[0\].image is missing; it must be a path"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], r'image_url must hold "url", or "data"'),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": 5}}]}], "data must be a string, not int"),
        (
            [{"role": "assistant", "content": [{"type": "image", "image": "x"}]}],
            "'image', which an assistant message cannot hold",
        ),
        ([{"role": "assistant", "reasoning_content": 5}], "reasoning_content must be a string"),
        (call_with(5), r"tool_calls\[0\].function.arguments must be an object, not int"),
        (call_with("5"), r"arguments must be an object, not int"),
        (call_with("{"), r"arguments is a string that is not JSON"),
        (call_with("[" * 100_000), r"arguments is a string that is not JSON"),
        (call_with({"a": float("nan")}), r"arguments is not JSON"),
        ([{"role": "assistant", "tool_calls": [{"id": "c"}]}], r"tool_calls\[0\].function must be an object"),
        ([{"role": "assistant", "tool_calls": {}, "content": None}, 7], r"messages\[1\] must be an object"),
    ],
)
def test_bad_messages(messages, message: str):
    with pytest.raises(InputError, match=message):
        render(messages)


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ("f", r"tools\[0\] must be an object"),
        ({"name": "f"}, r"tools\[0\].function must be an object"),
        ({"function": {"name": ""}}, r"tools\[0\].function.name is ''; it must have 1 to 128 characters and no spaces"),
        ({"function": {"name": "get weather"}}, r"tools\[0\].function.name is 'get weather'"),
        ({"function": {"name": "f", "parameters": {"x": object()}}}, r"tools\[0\] is not JSON"),
    ],
)
def test_bad_tools(tool, message: str):
    with pytest.raises(InputError, match=message):
        render([USER], tools=[tool])


def test_missing_control_token(tmp_path: Path):
    write_byte_tokenizer(tmp_path, 320)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("<|message_user|>", "<|someone|>"))
    with pytest.raises(InputError, match=r"no <\|message_user\|> token, which the conversation needs"):
        encode_segments(render([USER]), Tokenizer.from_directory(tmp_path, None))


@settings(deadline=None)
@given(text=HOSTILE)
def test_no_user_text_becomes_a_control_token_in_the_built_in_format(tokenizer: Tokenizer, text: str):
    ids = encode_segments(render([{"role": "user", "content": text}]), tokenizer)
    blank = encode_segments(render([{"role": "user", "content": ""}]), tokenizer)
    assert [i for i in ids if i in tokenizer.control_ids] == [i for i in blank if i in tokenizer.control_ids]
