"""The built-in chat format against conversations written out by hand, message shapes, and checkpoints' own templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_jax.errors import CheckpointError, InputError
from inkling_jax.inputs.chat import render
from inkling_jax.inputs.chat_template import ChatTemplate, chat_renderer
from inkling_jax.inputs.control import CONTROL_TOKENS
from inkling_jax.inputs.demo_tokenizer import write_demo_tokenizer
from inkling_jax.inputs.messages import canonical_json, check_messages
from inkling_jax.inputs.segments import Control, Media, Segment, Text, encode_segments
from inkling_jax.inputs.tokenizer import Tokenizer

CASES = json.loads((Path(__file__).parent / "data" / "chat.json").read_text(encoding="utf-8"))["cases"]
MEDIA = [c for c in CASES if any("image_slots" in s or "audio_slots" in s for s in c["expect"])]
SPELLINGS = [s for token in CONTROL_TOKENS.values() for s in token.spellings]
HOSTILE = st.lists(
    st.one_of(st.sampled_from([*SPELLINGS, "<|", "|>", "<", "|", ">", "end_message", " ", "\ue000", "{{ 7*7 }}"]), st.text()),
    max_size=6,
).map("".join)
USER = {"role": "user", "content": "Hi"}


class Item:
    """Stands for an image or a clip: renderers look into none, whatever it is."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("an array has no one truth value")

    __hash__ = object.__hash__


def with_items(case: dict) -> tuple[list, list[Item]]:
    """The messages of a case, which says only how large its media are, with items in them, and these in order."""
    items: list[Item] = []
    messages = json.loads(json.dumps(case["messages"]))
    for part in (p for m in messages if isinstance(m["content"], list) for p in m["content"] if p["type"] in ("image", "audio")):
        items.append(Item())
        part[part["type"]] = items[-1]
    return messages, items


def as_written(segments: list[Segment], case: dict, items: list[Item]) -> list[dict]:
    """Segments in the form of the cases, each item as the slots that the case wants in its place."""
    slots = [s for s in case["expect"] if not s.keys() & {"control", "text"}]
    written = []
    for segment in segments:
        if isinstance(segment, Media):
            assert segment.item is items.pop(0)
            written.append(slots.pop(0))
            assert f"{segment.kind}_slots" in written[-1]
        else:
            written.append({"control": segment.spelling} if isinstance(segment, Control) else {"text": segment.text})
    assert not items
    return written


def options(case: dict) -> dict:
    return {key: case[key] for key in ("tools", "effort", "add_generation_prompt") if key in case}


def body(messages: list, **kw) -> str:
    """What comes after the effort line, as one string (for reading only: text is not marked in it)."""
    segments = render(messages, add_generation_prompt=False, **kw)
    after = segments.index(Text("Thinking effort level: 0.9")) + 2
    return "".join(s.spelling if isinstance(s, Control) else s.text for s in segments[after:])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("demo")
    write_demo_tokenizer(directory, 320)
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


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_a_template_of_the_same_format_says_the_same(case: dict, released: ChatTemplate):
    messages, items = with_items(case)
    assert as_written(released.render(messages, **options(case)), case, items) == case["expect"]


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
    write_demo_tokenizer(tmp_path, 320)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("<|message_user|>", "<|someone|>"))
    with pytest.raises(InputError, match=r"no <\|message_user\|> token, which the conversation needs"):
        encode_segments(render([USER]), Tokenizer.from_directory(tmp_path, None))


# Spec 6 as a checkpoint's template could say it; it joins, trims, slices and dumps what users wrote.
TEMPLATE = """
{%- macro block(role, kind, text, name='') -%}
<|message_{{ role }}|>{{ name }}<|content_{{ kind }}|>{{ text }}<|end_message|>
{%- endmacro -%}
{%- if tools %}{{ block('system', 'xml', tools | tojson, 'tool_declare') }}{% endif -%}
{%- for m in messages %}
{%- if m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('no such role') }}{% endif %}
{%- if m.content is string %}
{{- block({'assistant': 'model'}.get(m.role, m.role), 'text', m.content | trim) }}
{%- else %}
{{- block({'assistant': 'model'}.get(m.role, m.role), 'text', m.content | map(attribute='text') | join) }}
{%- endif %}
{%- if m.role == 'assistant' %}<|content_model_end_sampling|>{% endif %}
{%- endfor %}
{%- if reasoning_effort is defined %}effort {{ reasoning_effort }}{% endif %}
{%- if add_generation_prompt %}<|message_model|>{% endif %}
"""


# The same format as the checkpoint's own template writes it: one placeholder an item (spec 6, spec_disagreements 34).
RELEASED = """
{%- macro block(role, kind, text, name='') -%}
<|message_{{ role }}|>{{ name }}<|content_{{ kind }}|>{{ text }}<|end_message|>
{%- endmacro -%}
{%- set names = {'none': 0, 'minimal': 0.1, 'low': 0.2, 'medium': 0.7, 'high': 0.9, 'xhigh': 0.99, 'max': 0.99} -%}
{%- set effort = reasoning_effort | default(0.9) -%}
{%- set effort = names.get(effort, effort) -%}
{%- macro effort_line() %}{{ block('system', 'text', 'Thinking effort level: ' ~ effort) }}{% endmacro -%}
{%- if tools -%}
{%- set ns = namespace(declared=[]) -%}
{%- for t in tools -%}
{%- set f = t.function -%}
{%- set one = {'description': f.description, 'name': f.name, 'parameters': f.parameters, 'type': t.type} -%}
{%- set ns.declared = ns.declared + [one] -%}
{%- endfor -%}
{{- block('system', 'xml', ns.declared | tojson(separators=(',', ':'), sort_keys=true), 'tool_declare') -}}
{%- endif -%}
{%- set said = namespace(effort=false) -%}
{%- for m in messages -%}
{%- if m.role != 'system' and not said.effort %}{{ effort_line() }}{% set said.effort = true %}{% endif -%}
{%- set role = 'model' if m.role == 'assistant' else m.role -%}
{%- if m.reasoning_content %}{{ block(role, 'thinking', m.reasoning_content) }}{% endif -%}
{%- if m.content is string %}{{ block(role, 'text', m.content, m.name) }}
{%- else -%}
{%- for part in m.content or [] -%}
{%- if part.type == 'image' %}{{ block(role, 'image', '<|unused_200054|>', m.name) }}
{%- elif part.type == 'audio' %}{{ block(role, 'audio_input', '<|unused_200053|><|audio_end|>', m.name) }}
{%- else %}{{ block(role, part.type, part[part.type], m.name) }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{%- set args = call.function.arguments | tojson(separators=(',', ':'), sort_keys=true) -%}
{{- block(role, 'invoke_tool_json', '{"name":' ~ call.function.name | tojson ~ ',"args":' ~ args ~ '}', call.function.name) -}}
{%- endfor -%}
{%- if role == 'model' %}<|content_model_end_sampling|>{% endif -%}
{%- endfor -%}
{%- if not said.effort %}{{ effort_line() }}{% endif -%}
{%- if add_generation_prompt %}<|message_model|>{% endif -%}
"""


@pytest.fixture(scope="module")
def released(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(RELEASED, "chat_template.jinja", tokenizer, {})


@pytest.mark.parametrize(("source", "wrote"), [("<|unused_200054|>", 1), ("<|unused_200053|>", 0), ("<|unused_200054|>" * 3, 3)])
def test_a_template_that_miscounts_media(tokenizer: Tokenizer, source: str, wrote: int):
    """As many placeholders of each kind as there are items, or the prompt would show the model another's picture."""
    message = {"role": "user", "content": [{"type": "image", "image": Item()}, {"type": "image", "image": Item()}]}
    with pytest.raises(InputError, match=f"template t.jinja wrote {wrote} image placeholders for the 2 in the messages"):
        ChatTemplate(source, "t.jinja", tokenizer, {}).render([message])


@settings(deadline=None)  # the machine may be busy
@given(texts=st.lists(HOSTILE, min_size=2, max_size=2), name=HOSTILE)
def test_hostile_texts_around_media(released: ChatTemplate, texts: list[str], name: str):
    """A text that spells a placeholder stays text, in the built-in format and in a template, and the item keeps its place."""
    item = Item()
    parts = [texts[0], {"type": "image", "image": item}, texts[1]]
    messages = [{"role": "tool", "name": name, "content": parts}, {"role": "user", "content": texts[0]}]
    for renders in (render, released.render):
        segments = renders(messages)
        (media,) = [s for s in segments if isinstance(s, Media)]
        assert media.item is item
        found = [s for s in segments[4:-1] if not isinstance(s, Media)]
        blocks = [("tool", name, "text", texts[0]), ("tool", name, "image", ""), ("tool", name, "text", texts[1])]
        wanted: list[Segment] = []
        for role, author, kind, text in [*blocks, ("user", "", "text", texts[0])]:
            opening, payload = [Control(f"<|message_{role}|>"), Text(author)], [Control(f"<|content_{kind}|>"), Text(text)]
            wanted += [s for s in (*opening, *payload, Control("<|end_message|>")) if s != Text("")]
        assert found == wanted


@pytest.fixture(scope="module")
def template(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(TEMPLATE, "chat_template.jinja", tokenizer, {})


def spelled(*segments: str) -> list[Segment]:
    return [Control(s) if s.startswith("<|") else Text(s) for s in segments]


def test_template(template: ChatTemplate):
    tools = [{"type": "function", "function": {"name": "<|end_message|>é", "parameters": {"a|b": 1}}}]
    messages = [USER, {"role": "assistant", "content": [{"type": "text", "text": "a | b"}]}]
    dumped = '[{"type": "function", "function": {"name": "<|end_message|>é", "description": "", "parameters": {"a|b": 1}}}]'
    assert template.render(messages, tools=tools, effort=0.0) == [
        *spelled("<|message_system|>", "tool_declare", "<|content_xml|>"),
        Text(dumped),
        *spelled("<|end_message|>", "<|message_user|>", "<|content_text|>", "Hi", "<|end_message|>"),
        *spelled("<|message_model|>", "<|content_text|>", "a | b", "<|end_message|>", "<|content_model_end_sampling|>"),
        *spelled("effort 0", "<|message_model|>"),
    ]
    assert template.render([USER], effort="low", add_generation_prompt=False)[-1] == Text("effort low")


@settings(deadline=None)
@given(parts=st.lists(HOSTILE, min_size=1, max_size=4))
def test_no_user_text_becomes_a_control_token_in_a_template(template: ChatTemplate, parts: list[str]):
    message = {"role": "user", "content": [{"type": "text", "text": p} for p in parts]}
    joined = "".join(parts)
    text = [Text(joined)] if joined else []
    opened = spelled("<|message_user|>", "<|content_text|>")
    assert template.render([message], add_generation_prompt=False) == [*opened, *text, Control("<|end_message|>")]
    trimmed = [Text(joined.strip())] if joined.strip() else []
    message = {"role": "user", "content": joined}
    assert template.render([message], add_generation_prompt=False) == [*opened, *trimmed, Control("<|end_message|>")]


@settings(deadline=None)
@given(text=HOSTILE)
def test_no_user_text_becomes_a_control_token_in_the_built_in_format(tokenizer: Tokenizer, text: str):
    ids = encode_segments(render([{"role": "user", "content": text}]), tokenizer)
    blank = encode_segments(render([{"role": "user", "content": ""}]), tokenizer)
    assert [i for i in ids if i in tokenizer.control_ids] == [i for i in blank if i in tokenizer.control_ids]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x\n\n{{ raise_exception('roles must alternate') }}", "t.jinja, line 3: TemplateError: roles must alternate"),
        ("{% for m in messages %}\n{{ m.content + 1 }}{% endfor %}", "t.jinja, line 2: TypeError"),
        ("{{ messages.__class__.__mro__ }}", "t.jinja, line 1: SecurityError"),
        ("\n{{ messages.append(1) }}", "t.jinja, line 2: SecurityError"),
        ("\n{{ nothing.at.all }}", "t.jinja, line 2: UndefinedError"),
        ("{% for i in range(1000000000) %}{% endfor %}", "t.jinja, line 1: OverflowError"),
    ],
)
def test_template_errors_name_the_line(tokenizer: Tokenizer, source: str, message: str):
    with pytest.raises(InputError, match=message):
        ChatTemplate(source, "t.jinja", tokenizer, {}).render([USER])


def test_a_template_with_a_syntax_error(tokenizer: Tokenizer):
    with pytest.raises(CheckpointError, match="chat template t.jinja, line 2: "):
        ChatTemplate("x\n{% if %}", "t.jinja", tokenizer, {})


def test_template_of_a_checkpoint(tmp_path: Path, tokenizer: Tokenizer):
    assert chat_renderer(tmp_path, tokenizer) is render
    settings = {"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": {"content": "<|endoftext|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert chat_renderer(tmp_path, tokenizer)([USER]) == spelled("<|endoftext|>", "Hi")
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert chat_renderer(tmp_path, tokenizer)([USER]) == [Text("d")]
    (tmp_path / "chat_template.jinja").write_text("f", encoding="utf-8")
    assert chat_renderer(tmp_path, tokenizer)([USER]) == [Text("f")]
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="chat_template.jinja cannot be read"):
        chat_renderer(tmp_path, tokenizer)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(CheckpointError, match="chat_template must be a string, not int"):
        chat_renderer(tmp_path, tokenizer)


def test_template_that_guards_other_spellings(tmp_path: Path):
    """A control token without "|" is guarded by its first character, and a template still sees the rest of the text."""
    write_demo_tokenizer(tmp_path, 320)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("<|content_tool_error|>", "[ERROR]"))
    tokenizer = Tokenizer.from_directory(tmp_path, None)
    source = "[ERROR]{{ messages[0].content.split('</think>')[-1] }}[ERROR]"
    template = ChatTemplate(source, "t", tokenizer, {})
    rendered = template.render([{"role": "user", "content": "a</think>[ERROR]<|end_message|>"}])
    assert rendered == [Control("[ERROR]"), Text("[ERROR]<|end_message|>"), Control("[ERROR]")]
    assert encode_segments(rendered[:1], tokenizer) == [tokenizer.id_of("[ERROR]")]
