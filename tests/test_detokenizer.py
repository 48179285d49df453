"""The incremental detokenizer against the decoding of the whole, at every split."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from byte_tokenizer import write_byte_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from inkling_jax.errors import InputError
from inkling_jax.inputs.tokenizer import Tokenizer
from inkling_jax.outputs.detokenizer import IncrementalDetokenizer

SIZE = 320
IDS = st.lists(st.integers(0, SIZE - 1), max_size=40)
CUTS = st.lists(st.integers(0, 40), max_size=8)
# Few letters, so that stop strings begin, fail, overlap and nest all the time.
STOPS = st.lists(st.text("abé€", min_size=1, max_size=4), max_size=3)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo")
    write_byte_tokenizer(directory, SIZE)
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory, None)


@pytest.fixture(scope="module")
def library(directory: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(c, len(ids)) for c in cuts), len(ids)]
    return [ids[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def run(detokenizer: IncrementalDetokenizer, pieces: list[list[int]]) -> list[str]:
    return [*(detokenizer.push(p) for p in pieces), detokenizer.finish()]


def byte_ids(library: tokenizers.Tokenizer, text: str) -> list[int]:
    """One token a byte, merges or not."""
    pieces = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    ids = [library.token_to_id(c) for piece, _ in pieces for c in piece]
    assert len(ids) == len(text.encode())
    return ids


@settings(deadline=None)  # the machine may be busy
@given(ids=IDS, cuts=CUTS)
def test_joined_pushes_are_the_decoding(tokenizer, library, ids: list[int], cuts: list[int]):
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join(run(detokenizer, split(ids, cuts))) == library.decode(ids, skip_special_tokens=True)
    assert detokenizer.stopped is None and detokenizer.kept_tokens == len(ids)


@settings(deadline=None)
@given(text=st.text(), cuts=CUTS)
@example(text="\U0001f468‍\U0001f469 é€", cuts=[])
def test_no_half_characters(tokenizer, library, text: str, cuts: list[int]):
    """Every push of bytes that are UTF-8 as a whole is text without U+FFFD, and what is complete is not held back."""
    ids = byte_ids(library, text)
    detokenizer = IncrementalDetokenizer(tokenizer)
    seen = ""
    for n, token_id in enumerate(ids, start=1):
        seen += detokenizer.push([token_id])
        assert seen == text.encode()[:n].decode("utf-8", "ignore")
    assert seen + detokenizer.finish() == text
    assert "".join(run(IncrementalDetokenizer(tokenizer), split(ids, cuts))) == text


def test_a_character_left_incomplete_is_replaced_at_the_end(tokenizer, library):
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = byte_ids(library, "a€")[:3]
    assert [detokenizer.push([i]) for i in ids] == ["a", "", ""] and detokenizer.finish() == "\ufffd"


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(start, stop string) by looking at every beginning of the whole text: the first that ends with one; the longest one."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return None


@settings(deadline=None)
@given(text=st.text("abé€x", max_size=25), stops=STOPS, cuts=CUTS, merged=st.booleans())
@example(text="aaab", stops=["aab"], cuts=[1, 2, 3], merged=False)
@example(text="abab€", stops=["ab€", "b"], cuts=[], merged=False)
@example(text="xab€", stops=["b€", "ab€", "€"], cuts=[], merged=False)
def test_stop_strings(tokenizer, library, text: str, stops: list[str], cuts: list[int], merged: bool):
    ids = tokenizer.encode(text) if merged else byte_ids(library, text)
    detokenizer = IncrementalDetokenizer(tokenizer, stop=stops)
    pushed = run(detokenizer, split(ids, cuts))
    found = first_stop(text, stops)
    if found is None:
        assert ("".join(pushed), detokenizer.stopped, detokenizer.kept_tokens) == (text, None, len(ids))
        return
    kept = text[: found[0]]
    assert ("".join(pushed), detokenizer.stopped) == (kept, found[1])
    fewest = next(n for n in range(len(ids) + 1) if library.decode(ids[:n]).startswith(kept))
    assert detokenizer.kept_tokens == fewest
    assert detokenizer.push(ids) == "" == detokenizer.finish() and detokenizer.kept_tokens == fewest


def test_text_is_held_back_only_while_it_may_be_a_stop_string(tokenizer, library):
    detokenizer = IncrementalDetokenizer(tokenizer, stop="<END>")
    assert [detokenizer.push([i]) for i in byte_ids(library, "a<EN<E b")] == ["a", "", "", "", "<EN", "", "<E ", "b"]
    assert detokenizer.push(byte_ids(library, "<EN")) == "" and detokenizer.finish() == "<EN"


def test_a_token_that_text_and_stop_string_share_is_kept(tokenizer):
    shared = tokenizer.encode("et")  # one token: a merge
    assert len(shared) == 1
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["t!"])
    ids = [*tokenizer.encode("q"), *shared, *tokenizer.encode("!")]
    assert detokenizer.push(ids) == "qe" and (detokenizer.stopped, detokenizer.kept_tokens) == ("t!", 2)


def test_control_tokens_are_no_text_but_count(tokenizer):
    end = tokenizer.control_id("end_message")
    q, w = tokenizer.encode("q")[0], tokenizer.encode("w")[0]
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["w"])
    assert detokenizer.push([end, q, end]) == "q" and detokenizer.kept_tokens == 3
    assert detokenizer.push([end, w]) == "" and detokenizer.kept_tokens == 4
    ids = [end, q, end, end, w, end]
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["w"])
    assert detokenizer.push(ids) == "q" and detokenizer.kept_tokens == 4


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, SIZE - 1), max_size=12), stops=STOPS, cuts=CUTS)
def test_tokens_are_kept_when_all_their_text_is_out(tokenizer, library, ids: list[int], stops: list[str], cuts: list[int]):
    """However the ids are cut: never fewer than before, none that has bytes held back, and in the end the same."""
    detokenizer = IncrementalDetokenizer(tokenizer, stop=stops)
    before, text = 0, ""
    for piece in split(ids, cuts):
        text += detokenizer.push(piece)
        kept = detokenizer.kept_tokens
        assert kept >= before
        if detokenizer.stopped is None:
            assert text.startswith(library.decode(ids[:kept], skip_special_tokens=True).rstrip("\ufffd"))
        before = kept
    detokenizer.finish()
    whole = IncrementalDetokenizer(tokenizer, stop=stops)
    run(whole, [ids])
    assert (detokenizer.kept_tokens, detokenizer.stopped) == (whole.kept_tokens, whole.stopped)


def test_a_token_half_held_back_is_not_kept_yet(tokenizer):
    shared, x = tokenizer.encode("et"), tokenizer.encode("x")
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["t!"])
    assert detokenizer.push(shared) == "e" and detokenizer.kept_tokens == 0
    assert detokenizer.push(x) == "tx" and detokenizer.kept_tokens == 2


def test_broken_bytes_before_a_stop_string(tokenizer, library):
    """A lead byte without its followers is U+FFFD, and belongs to the text before the stop string."""
    euro = byte_ids(library, "€")
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["ab"])
    ids = [*euro[:2], *byte_ids(library, "abc")]
    assert "".join(run(detokenizer, [[i] for i in ids])) == "\ufffd" and detokenizer.kept_tokens == 2


def test_nothing_is_decoded_twice(tokenizer, library, monkeypatch: pytest.MonkeyPatch):
    looked_up = []
    original = Tokenizer.token_bytes
    monkeypatch.setattr(Tokenizer, "token_bytes", lambda self, i, **kw: looked_up.append(i) or original(self, i, **kw))
    monkeypatch.setattr(Tokenizer, "decode", None)
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["<never>"])
    ids = byte_ids(library, "the rest <neve" * 100)
    assert "".join(run(detokenizer, [[i] for i in ids])) == "the rest <neve" * 100
    assert looked_up == ids


def test_bad_input(tokenizer):
    for bad in ("", None, 5):
        with pytest.raises(InputError, match="stop string .* must be a non-empty str"):
            IncrementalDetokenizer(tokenizer, stop=["x", bad])  # type: ignore[list-item]
    with pytest.raises(InputError, match="token id 320 is outside"):
        IncrementalDetokenizer(tokenizer).push([SIZE])
