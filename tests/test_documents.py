"""What the documents tell a reader to type fits the code, and their links lead somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest

import inkling_jax
from inkling_jax import LLM, ChatDelta, Completion, Delta, bench, doctor, generate_options, plan
from inkling_jax.convert import __main__ as convert
from inkling_jax.loading import load_model

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PARSERS = {
    "generate": generate_options.make_parser,
    "convert": convert._parser,
    "bench": bench._parser,
    "plan": plan._parser,
    "doctor": doctor._parser,
}


def commands(text: str) -> list[list[str]]:
    """Words of every `python ...` command of a document: its indented lines and its inline code, comments and pipes cut."""
    found = re.findall(r"^    (.*\bpython .*)$|`(python [^`]*)`", text, re.MULTILINE)
    lines = ["".join(pair).rpartition("| ")[2].removesuffix("\\") for pair in found]
    return [words[1:] for line in lines if "..." not in (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_fit_the_code(path: Path) -> None:
    """Scripts exist, options of the two command lines parse, what is told to `make` is a target, links lead to files."""
    text = path.read_text()
    for words in commands(text):
        if words[0] != "-m":
            assert (ROOT / words[0]).is_file(), words
            continue
        module = ROOT / words[1].replace(".", "/")
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), words
        parser: Callable[[], Any] | None = PARSERS.get(words[1].removeprefix("inkling_jax."))
        if parser is not None:
            parser().parse_args(words[2:])
    for target in re.findall(r"(?:^    |`)make ([\w-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
    for link in re.findall(r"\]\(([^):]+)\)", text):
        assert (path.parent / link).is_file(), link


def test_commands_are_found() -> None:
    """The search above sees what it is to check."""
    text = '    echo "a b" | python -m x.y --z "c d"  # e\n`python s.py --k`, `python -m x ...`\nplain python\n'
    assert commands(text) == [["-m", "x.y", "--z", "c d"], ["s.py", "--k"]]
    assert len(commands(DOCUMENTS[0].read_text())) >= 6


def test_the_snippet_fits_the_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It runs on a model that has the real one's methods and takes its arguments, and no others."""
    (snippet,) = re.findall(r"```python\n(.*?)```", DOCUMENTS[0].read_text(), re.DOTALL)
    llm = create_autospec(LLM, instance=True)
    llm.generate.return_value = [Completion((1,), "made", "stop", None, 5)]
    llm.stream.return_value = iter([Delta("stre", (1,)), Delta("amed", (2,), "stop")])
    llm.chat.side_effect = [SimpleNamespace(message={"role": "assistant"}), iter([ChatDelta(content="answered")])]
    monkeypatch.setattr(inkling_jax, "load", create_autospec(load_model, return_value=llm))
    exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out == "made\nstreamedanswered"
    llm.close.assert_called_once_with()
