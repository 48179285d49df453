"""Conversations with a model: what `llm.chat` answers and streams, what goes on to the next turn, and what is refused when."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from text_checkpoint import write_text_checkpoint

import inkling_jax
from inkling_jax import CheckpointError, loading


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("chat") / "model")


def test_a_broken_template_is_refused_before_weights_are_read(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name and line."""
    broken = shutil.copytree(directory, tmp_path / "broken")
    (broken / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content }")
    monkeypatch.setattr(loading, "_parameters", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(CheckpointError, match="chat template chat_template.jinja, line 2: "):
        inkling_jax.load(broken)
