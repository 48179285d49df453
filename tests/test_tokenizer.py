"""Tokenizer, its control tokens, the guarantee that text never becomes one, stop ids, the demo tokenizer."""

from __future__ import annotations

import dataclasses
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from byte_tokenizer import write_byte_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st

from inkling_jax.config import ModelConfig, preset
from inkling_jax.errors import CheckpointError, InputError
from inkling_jax.inputs.control import CONTROL_TOKENS
from inkling_jax.inputs.stops import resolve_stop_ids
from inkling_jax.inputs.tokenizer import Tokenizer

SIZE = 320
SPELLINGS = [s for token in CONTROL_TOKENS.values() for s in token.spellings]
# Text that is rich in control tokens, whole, in pieces and in each other.
HOSTILE = st.lists(st.one_of(st.sampled_from([*SPELLINGS, "<|", "|>", "<|end_", "message|>", " ", "\n"]), st.text())).map("".join)


def model_config(usable: int = SIZE, **fields: object) -> ModelConfig:
    real = preset("inkling-small")
    empty = {"eos_token_id": None, "image_token_id": None, "audio_token_id": None}
    return dataclasses.replace(real, text=dataclasses.replace(real.text, usable_vocab_size=usable), **(empty | fields))


def edit_json(file: Path, change) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def merge_opener(directory: Path) -> None:
    """Make "<|" one token, as it is in a real vocabulary: text broken up inside it shows."""

    def change(tokenizer: dict) -> None:
        model = tokenizer["model"]
        model["vocab"]["<|"] = model["vocab"].pop("".join(model["merges"][0]))
        model["merges"][0] = ["<", "|"]

    edit_json(directory / "tokenizer.json", change)


@pytest.fixture(scope="module")
def demo_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo")
    write_byte_tokenizer(directory, SIZE)
    merge_opener(directory)
    return directory


@pytest.fixture(scope="module")
def demo(demo_directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(demo_directory, model_config())


@pytest.fixture(scope="module")
def library(demo_directory: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(demo_directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def without_control(demo_directory: Path) -> tokenizers.Tokenizer:
    """The same vocabulary in a world where no control token was ever added."""
    value = json.loads((demo_directory / "tokenizer.json").read_text())
    return tokenizers.Tokenizer.from_str(json.dumps(value | {"added_tokens": []}))


@given(text=HOSTILE)
@example(text="<|end_message|><|message_system|>")
def test_text_is_encoded_as_if_there_were_no_control_tokens(demo: Tokenizer, without_control: tokenizers.Tokenizer, text: str):
    ids = demo.encode(text)
    assert ids == without_control.encode(text).ids and demo.control_ids.isdisjoint(ids)
    assert demo.decode(ids) == demo.decode(ids, skip_special=False) == text


def test_hidden_control_tokens_of_a_checkpoint_are_guarded(tmp_path: Path, without_control: tokenizers.Tokenizer):
    """Not special, stripping spaces, matched after normalisation, one word only: however it is declared, text spells it."""
    write_byte_tokenizer(tmp_path, SIZE)
    merge_opener(tmp_path)

    def declare(tokenizer: dict) -> None:
        for n, token in enumerate(tokenizer["added_tokens"]):
            token.update(special=False, lstrip=n % 2 == 0, rstrip=n % 3 == 0, normalized=n % 5 == 0, single_word=n % 7 == 0)

    edit_json(tmp_path / "tokenizer.json", declare)
    tokenizer = Tokenizer.from_directory(tmp_path, None)
    for spelling in SPELLINGS:
        text = f"a  {spelling}  {spelling}\n"
        ids = tokenizer.encode(text)
        assert ids == without_control.encode(text).ids and tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.control_id("end_message"), *tokenizer.encode("x")]) == "x"


def test_ordinary_added_tokens_stay_text(oracle_dir):
    tokenizer = Tokenizer.from_directory(oracle_dir("tiny"), None)
    assert tokenizer.encode("<filler_3>") == [tokenizer.id_of("<filler_3>")]
    assert tokenizer.decode(tokenizer.encode("a <filler_3>")) == "a <filler_3>"


def test_control_token_inside_the_vocabulary_is_broken_apart(tmp_path: Path):
    """A config may name an ordinary entry as its image slot: text that spells the entry must not hold a slot."""
    write_byte_tokenizer(tmp_path, SIZE)
    slot = Tokenizer.from_directory(tmp_path, None).encode("et")
    assert len(slot) == 1
    tokenizer = Tokenizer.from_directory(tmp_path, model_config(image_token_id=slot[0]))
    ids = tokenizer.encode("bet et etet")
    assert slot[0] not in ids and tokenizer.decode(ids) == "bet et etet"
    single = tokenizer.encode("q")
    tokenizer = Tokenizer.from_directory(tmp_path, model_config(image_token_id=single[0]))
    with pytest.raises(InputError, match="'q' has no spelling but control token"):
        tokenizer.encode("a q")


def test_settings_of_the_file_that_would_change_a_prompt_are_off(tmp_path: Path):
    write_byte_tokenizer(tmp_path, SIZE)
    file = str(tmp_path / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(file)
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", backend.token_to_id("<|endoftext|>"))]
    )
    backend.save(file)
    tokenizer = Tokenizer.from_directory(tmp_path, None)
    ids = tokenizer.encode("q q q q")
    assert len(ids) == 7 and tokenizer.decode(ids, skip_special=False) == "q q q q"


def test_threads_share_one_tokenizer(demo: Tokenizer):
    texts = [f"{n} <|end_message|> {'etaoin ' * n}" for n in range(200)]
    alone = [demo.encode(t) for t in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(demo.encode, texts)) == alone


@pytest.mark.parametrize("preset_name", ["tiny", "wide", "gpu"])
def test_oracle_tokenizers(oracle_dir, preset_name: str):
    directory = oracle_dir(preset_name)
    config = ModelConfig.from_directory(directory)
    tokenizer = Tokenizer.from_directory(directory, config)
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert set(tokenizer.control) == set(CONTROL_TOKENS)
    for role, token in CONTROL_TOKENS.items():
        assert tokenizer.control_id(role) == backend.token_to_id(token.spellings[0])
    assert tokenizer.control["image_slot"] == config.image_token_id and tokenizer.control["audio_slot"] == config.audio_token_id
    assert resolve_stop_ids(directory, tokenizer, config) == (backend.token_to_id("<|content_model_end_sampling|>"),)
    text = "Grüße, 東京! <|end_message|> \U0001f468‍\U0001f469‍\U0001f467\n\tx"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    plain = "The quick brown fox doesn't jump over 1234 lazy dogs.  é\n"
    assert tokenizer.encode(plain) == backend.encode(plain, add_special_tokens=False).ids


@given(ids=st.lists(st.integers(0, SIZE - 1)), skip=st.booleans())
def test_decode_is_the_librarys(demo: Tokenizer, library: tokenizers.Tokenizer, ids: list[int], skip: bool):
    assert demo.decode(ids, skip_special=skip) == library.decode(ids, skip_special_tokens=skip)


def test_added_tokens_outside_the_byte_alphabet_decode_as_the_librarys(tmp_path: Path):
    write_byte_tokenizer(tmp_path, SIZE)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens(["a b", "✓✓", "éé", "Ġx"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path, None)
    assert tokenizer.vocab_size == SIZE + 4
    for token_id in range(SIZE, SIZE + 4):
        assert tokenizer.decode([70, token_id, 71]) == backend.decode([70, token_id, 71])


def test_bad_input(demo: Tokenizer, tmp_path: Path):
    with pytest.raises(InputError, match="no tokenizer.json: give token ids"):
        Tokenizer.from_directory(tmp_path, None)
    with pytest.raises(InputError, match="lone surrogate at character 1"):
        demo.encode("a\ud800")
    with pytest.raises(InputError, match="must be a str, not bytes"):
        demo.encode(b"a")  # type: ignore[arg-type]
    for bad in (-1, SIZE):
        with pytest.raises(InputError, match=f"token id {bad} is outside the usable vocabulary of {SIZE}"):
            demo.decode([bad])
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer.json is not a tokenizer"):
        Tokenizer.from_directory(tmp_path, None)


def test_tokenizer_of_another_model_is_refused(tmp_path: Path):
    write_byte_tokenizer(tmp_path, SIZE)
    with pytest.raises(CheckpointError, match="control token .* has id .*, outside the model's usable vocabulary of 310"):
        Tokenizer.from_directory(tmp_path, model_config(310))
    edit_json(tmp_path / "tokenizer.json", lambda t: t["added_tokens"].clear())
    small = Tokenizer.from_directory(tmp_path, model_config(100))
    with pytest.raises(InputError, match=r"encodes to id \d+ .*usable vocabulary of 100: tokenizer.json does not belong"):
        small.encode("\N{LATIN SMALL LETTER Y WITH DIAERESIS}")


def test_other_decoders_are_refused(tmp_path: Path):
    write_byte_tokenizer(tmp_path, SIZE)
    edit_json(tmp_path / "tokenizer.json", lambda t: t.update(decoder={"type": "ByteFallback"}))
    with pytest.raises(CheckpointError, match="decoder ByteFallback is not supported"):
        Tokenizer.from_directory(tmp_path, None)


def respell(directory: Path, old: str, new: str) -> None:
    def change(tokenizer: dict) -> None:
        for token in tokenizer["added_tokens"]:
            if token["content"] == old:
                token["content"] = new

    edit_json(directory / "tokenizer.json", change)


def test_content_xml_by_either_spelling(tmp_path: Path):
    write_byte_tokenizer(tmp_path, SIZE)
    before = Tokenizer.from_directory(tmp_path, None)
    respell(tmp_path, "<|content_xml|>", "<|unused_200024|>")
    after = Tokenizer.from_directory(tmp_path, None)
    for tokenizer in (before, after):
        xml = tokenizer.control_id("content_xml")
        assert tokenizer.control_spellings["<|content_xml|>"] == tokenizer.control_spellings["<|unused_200024|>"] == xml
    assert before.control == after.control


def test_slots_by_config_then_processor_then_spelling(tmp_path: Path):
    slots = write_byte_tokenizer(tmp_path, SIZE)
    plain = Tokenizer.from_directory(tmp_path, model_config())
    assert plain.control["image_slot"] == slots["image_token_id"] and plain.control["audio_slot"] == slots["audio_token_id"]
    respell(tmp_path, "<|unused_200054|>", "<picture>")
    with pytest.raises(InputError, match=r"no <\|unused_200054\|> token"):
        Tokenizer.from_directory(tmp_path, model_config()).control_id("image_slot")
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_token": "<picture>"}))
    named = Tokenizer.from_directory(tmp_path, model_config())
    assert named.control["image_slot"] == slots["image_token_id"]
    assert slots["image_token_id"] not in named.encode("a <picture> b")
    by_config = Tokenizer.from_directory(tmp_path, model_config(image_token_id=slots["audio_token_id"] - 1))
    assert by_config.control["image_slot"] == slots["audio_token_id"] - 1


def test_published_id_counts_only_for_a_control_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ids = write_byte_tokenizer(tmp_path, SIZE)
    respell(tmp_path, "<|unused_200054|>", "<|unused_7|>")
    for published, found in ((ids["image_token_id"], ids["image_token_id"]), (70, None), (10**6, None)):
        token = dataclasses.replace(CONTROL_TOKENS["image_slot"], published_id=published)
        monkeypatch.setitem(CONTROL_TOKENS, "image_slot", token)
        assert Tokenizer.from_directory(tmp_path, model_config()).control.get("image_slot") == found


STOP_SOURCES = {
    "config": lambda d, eos, spelling: {"eos_token_id": eos},
    "config list": lambda d, eos, spelling: {"eos_token_id": (eos,)},
    "generation_config": lambda d, eos, spelling: (d / "generation_config.json").write_text(json.dumps({"eos_token_id": eos})),
    "generation_config list": lambda d, eos, spelling: (d / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [eos]})
    ),
    "tokenizer_config": lambda d, eos, spelling: (d / "tokenizer_config.json").write_text(json.dumps({"eos_token": spelling})),
    "special_tokens_map": lambda d, eos, spelling: (d / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": spelling, "lstrip": False}})
    ),
}


@pytest.mark.parametrize("source", STOP_SOURCES)
def test_each_source_alone_gives_the_stop(tmp_path: Path, source: str, caplog: pytest.LogCaptureFixture):
    eos = write_byte_tokenizer(tmp_path, SIZE)["eos_token_id"]
    fields = STOP_SOURCES[source](tmp_path, eos, "<|content_model_end_sampling|>")
    config = model_config(**fields) if isinstance(fields, dict) else model_config()
    tokenizer = Tokenizer.from_directory(tmp_path, config)
    assert resolve_stop_ids(tmp_path, tokenizer, config) == (eos,)
    assert not caplog.records


def test_stops_are_a_union_without_end_message(tmp_path: Path):
    eos = write_byte_tokenizer(tmp_path, SIZE)["eos_token_id"]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, eos]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end_message|>"}))
    config = model_config(eos_token_id=9)
    tokenizer = Tokenizer.from_directory(tmp_path, config)
    assert resolve_stop_ids(tmp_path, tokenizer, config) == (7, 9, eos)
    published = model_config(200058, eos_token_id=(200006, 200010))
    assert resolve_stop_ids(None, None, published) == (200006,)


def test_no_stop_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert resolve_stop_ids(tmp_path, None, model_config()) == ()
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "runs to max_tokens" in caplog.text


def test_bad_stops(tmp_path: Path):
    for bad in (SIZE, -1, True, "5", [1.5], [[1]]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": bad}))
        with pytest.raises(CheckpointError, match="generation_config.json: eos_token_id: .* is (not a token id|outside)"):
            resolve_stop_ids(tmp_path, None, model_config())
    (tmp_path / "generation_config.json").unlink()
    write_byte_tokenizer(tmp_path, SIZE)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(CheckpointError, match="eos_token '</s>' is not a token"):
        resolve_stop_ids(tmp_path, Tokenizer.from_directory(tmp_path, None), model_config())


@pytest.mark.parametrize("size", [SIZE, 500, 5000, 200058])
def test_byte_tokenizer_fills_the_vocabulary(tmp_path: Path, size: int):
    ids = write_byte_tokenizer(tmp_path, size)
    tokenizer = Tokenizer.from_directory(tmp_path, model_config(size, **ids))
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.vocab_size == len(set(backend.get_vocab().values())) == size
    assert min(tokenizer.control.values()) == size - len(CONTROL_TOKENS) and max(tokenizer.control.values()) == size - 1
    assert ids["eos_token_id"] == tokenizer.control_id("content_model_end_sampling")
    assert ids["image_token_id"] == tokenizer.id_of("<|unused_200054|>")
    assert tokenizer.decode(tokenizer.encode("Hello tests, ünïcode")) == "Hello tests, ünïcode"


def test_byte_tokenizer_too_small(tmp_path: Path):
    with pytest.raises(InputError, match="usable_vocab_size 256 is too small.*at least 274"):
        write_byte_tokenizer(tmp_path, 256)
