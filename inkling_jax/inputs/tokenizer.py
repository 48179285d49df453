"""Text to token ids and back: tokenizer.json, its control tokens, and the guarantee that user text never becomes one."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers

from inkling_jax.config import ModelConfig
from inkling_jax.config_fields import read_json_object
from inkling_jax.errors import CheckpointError, InputError
from inkling_jax.inputs.control import CONTROL_FORM, CONTROL_TOKENS


class Tokenizer:
    """A checkpoint's byte-level tokenizer. Immutable after loading, so threads may share it.

    `control` maps a role of spec 6 ("end_message", "image_slot", ...) to its id, for the roles that this tokenizer has;
    `control_ids` holds every id that user text must never become and that visible text leaves out; `control_spellings` finds
    an id by its spelling here or by a published one.
    """

    def __init__(self, backend: tokenizers.Tokenizer, control: Mapping[str, int], usable_vocab_size: int | None):
        """Takes ownership of `backend`; `control` is as above; `usable_vocab_size` None stands for the tokenizer's own size."""
        self._backend = backend
        self.control: Mapping[str, int] = dict(control)
        added = backend.get_added_tokens_decoder()
        hidden = {i for i, token in added.items() if token.special or CONTROL_FORM.fullmatch(token.content)}
        self.control_ids: frozenset[int] = frozenset(hidden | set(self.control.values()))
        # The library spares only what it knows as special: a checkpoint may list a control token as an ordinary added one,
        # and an added token that is not spared matches user text (and eats the spaces around it if it strips).
        backend.add_special_tokens(
            [tokenizers.AddedToken(t.content, special=True, normalized=False) for i, t in added.items() if i in self.control_ids]
        )
        backend.encode_special_tokens = True  # set once, never again: the switch is shared state of the backend
        backend.no_truncation()  # a prompt is refused when too long, never cut in silence
        backend.no_padding()
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._id_limit = self.vocab_size if usable_vocab_size is None else usable_vocab_size
        self._bytes: dict[int, bytes] = {}
        # By any published spelling; the tokenizer's own word goes before an alias, and a resolved role before both.
        aliases = {s: i for role, i in self.control.items() for s in CONTROL_TOKENS[role].spellings}
        own = {token.content: i for i, token in added.items() if i in self.control_ids}
        usual = {CONTROL_TOKENS[role].spellings[0]: i for role, i in self.control.items()}
        self.control_spellings: Mapping[str, int] = aliases | own | usual

    @classmethod
    def from_directory(cls, path: str | Path, config: ModelConfig | None) -> Tokenizer:
        """Read `path`/tokenizer.json; control tokens are found by config, then spelling, then published id (spec 1.2, 6).

        Raises InputError when there is no tokenizer.json, CheckpointError when it is unreadable, is not byte-level, or gives a
        control token an id outside the model's usable vocabulary.
        """
        file = Path(path) / "tokenizer.json"
        if not file.is_file():
            raise InputError(f"this checkpoint has no tokenizer.json: give token ids (looked in {path})")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for every fault of the file
            raise CheckpointError(f"{file} is not a tokenizer that can be read: {error}") from None
        _require_byte_level(backend, file)
        control = _resolve_control(backend, Path(path), config)
        usable = config.text.usable_vocab_size if config else None
        for role, token_id in control.items():
            if usable is not None and not 0 <= token_id < usable:
                raise CheckpointError(
                    f"{file}: control token {role} has id {token_id}, outside the model's usable vocabulary of {usable}"
                )
        return cls(backend, control, usable)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; nothing in it is read as a control token. Raises InputError for what cannot be encoded."""
        if not isinstance(text, str):
            raise InputError(f"text must be a str, not {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"text holds a lone surrogate at character {error.start}, which is not valid Unicode") from None
        ids = self._encode_plain(text)
        largest = max(ids, default=0)
        if largest >= self._id_limit:
            raise InputError(
                f"text encodes to id {largest} ({self._backend.id_to_token(largest)!r}), outside the model's usable vocabulary"
                f" of {self._id_limit}: tokenizer.json does not belong to this model"
            )
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        if self.control_ids.isdisjoint(encoding.ids):
            return encoding.ids
        # A control id that is an entry of the model's own vocabulary is out of the library's guard: break its spelling apart.
        cuts = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self.control_ids:
                if end - start < 2:
                    raise InputError(f"text {text[start:end]!r} has no spelling but control token {token_id} in this tokenizer")
                cuts.append(start + 1)
        return [i for a, b in pairwise([0, *cuts, len(text)]) for i in self._encode_plain(text[a:b])]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD, ids without a spelling nothing.

        `skip_special` leaves control tokens out. Raises InputError for an id outside the usable vocabulary.
        """
        return b"".join(self.token_bytes(i, skip_special=skip_special) for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """UTF-8 bytes (perhaps part of a character) that one token stands for. Raises InputError as `decode` does."""
        token_id = operator.index(token_id)
        if skip_special and token_id in self.control_ids:
            return b""
        known = self._bytes.get(token_id)
        if known is None:
            if not 0 <= token_id < self._id_limit:
                raise InputError(f"token id {token_id} is outside the usable vocabulary of {self._id_limit}")
            known = self._bytes[token_id] = _spelled_bytes(self._backend.id_to_token(token_id) or "")
        return known

    def id_of(self, spelling: str) -> int | None:
        """The id of a token by its exact spelling in tokenizer.json, or None."""
        return self._backend.token_to_id(spelling)

    def control_id(self, role: str) -> int:
        """The id of a control role of spec 6. Raises InputError naming the spelling when the tokenizer has none."""
        if role not in self.control:
            raise InputError(f"this checkpoint's tokenizer has no {' or '.join(CONTROL_TOKENS[role].spellings)} token")
        return self.control[role]


def _require_byte_level(backend: tokenizers.Tokenizer, file: Path) -> None:
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": "none"}
    if decoder["type"] != "ByteLevel":
        raise CheckpointError(f"{file}: decoder {decoder['type']} is not supported; this family's is ByteLevel")


def _resolve_control(backend: tokenizers.Tokenizer, path: Path, config: ModelConfig | None) -> dict[str, int]:
    """Role -> id (spec 1.2, 6): config.json's id, else processor_config.json's spelling, else a published spelling or id."""
    processor = optional_json_object(path / "processor_config.json")
    slots = {"image_slot": ("image_token", config and config.image_token_id)}
    slots["audio_slot"] = ("audio_token", config and config.audio_token_id)
    found: dict[str, int] = {}
    for role, token in CONTROL_TOKENS.items():
        key, configured = slots.get(role, ("", None))
        named = processor.get(key)
        spellings = ([named] if isinstance(named, str) else []) + list(token.spellings)
        ids = [configured] + [backend.token_to_id(s) for s in spellings]
        # The published id counts only where the tokenizer has a control token there: a small vocabulary has text or nothing.
        if CONTROL_FORM.fullmatch(backend.id_to_token(token.published_id) or ""):
            ids.append(token.published_id)
        first = next((i for i in ids if i is not None), None)
        if first is not None:
            found[role] = first
    eos = config.eos_token_id if config else None
    if isinstance(eos, int):
        found.setdefault("content_model_end_sampling", eos)
    return found


def optional_json_object(file: Path) -> Mapping[str, Any]:
    """The JSON object in `file`, {} when there is no such file. Raises CheckpointError naming a broken one."""
    return read_json_object(file) if file.is_file() else {}


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the other bytes for U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _spelled_bytes(spelling: str) -> bytes:
    """Bytes of a vocabulary spelling; an added token with a character outside the byte alphabet is ordinary text."""
    if all(c in _ALPHABET for c in spelling):
        return bytes(_ALPHABET[c] for c in spelling)
    return spelling.encode("utf-8")
