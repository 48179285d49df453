"""Checkpoints' own chat templates: the same conversations, hostile texts, and what broken ones are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from byte_tokenizer import write_byte_tokenizer
from chat_cases import CASES, HOSTILE, USER, Item, as_written, options, with_items
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_jax.errors import CheckpointError, InputError
from inkling_jax.inputs.chat import render
from inkling_jax.inputs.chat_template import ChatTemplate, chat_renderer
from inkling_jax.inputs.segments import Control, Media, Segment, Text, encode_segments
from inkling_jax.inputs.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("demo")
    write_byte_tokenizer(directory, 320)
    return Tokenizer.from_directory(directory, None)


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


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_a_template_of_the_same_format_says_the_same(case: dict, released: ChatTemplate):
    messages, items = with_items(case)
    assert as_written(released.render(messages, **options(case)), case, items) == case["expect"]


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
    write_byte_tokenizer(tmp_path, 320)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("<|content_tool_error|>", "[ERROR]"))
    tokenizer = Tokenizer.from_directory(tmp_path, None)
    source = "[ERROR]{{ messages[0].content.split('</think>')[-1] }}[ERROR]"
    template = ChatTemplate(source, "t", tokenizer, {})
    rendered = template.render([{"role": "user", "content": "a</think>[ERROR]<|end_message|>"}])
    assert rendered == [Control("[ERROR]"), Text("[ERROR]<|end_message|>"), Control("[ERROR]")]
    assert encode_segments(rendered[:1], tokenizer) == [tokenizer.id_of("[ERROR]")]
