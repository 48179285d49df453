"""A small stand-in tokenizer for checkpoints with random weights: bytes, letter merges and the published control tokens."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from inkling_jax.errors import InputError
from inkling_jax.inputs.control import CONTROL_TOKENS

_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"  # by frequency in English, so that the first merges are of use


def write_byte_tokenizer(directory: str | Path, usable_vocab_size: int) -> dict[str, int]:
    """Write tokenizer.json and tokenizer_config.json with exactly `usable_vocab_size` ids, control tokens being the last ones.

    Returns the fields that config.json needs: "eos_token_id", "image_token_id", "audio_token_id". Raises InputError when the size
    has no room for the 256 bytes and the control tokens.
    """
    spellings = [token.spellings[0] for token in CONTROL_TOKENS.values()]
    text_size = usable_vocab_size - len(spellings)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if text_size < len(alphabet):
        least = len(alphabet) + len(spellings)
        raise InputError(f"usable_vocab_size {usable_vocab_size} is too small for a tokenizer: it takes at least {least}")
    merges = list(itertools.islice(_letter_merges(), text_size - len(alphabet)))
    vocab = {token: n for n, token in enumerate([*alphabet, *(left + right for left, right in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(s, special=True, normalized=False) for s in spellings])
    directory = Path(directory)
    backend.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    ids = {role: text_size + n for n, role in enumerate(CONTROL_TOKENS)}
    return {
        "eos_token_id": ids["content_model_end_sampling"],
        "image_token_id": ids["image_slot"],
        "audio_token_id": ids["audio_slot"],
    }


def _letter_merges() -> Iterator[tuple[str, str]]:
    """Every pair of letters, then every pair and a third letter, and so on without end: enough for any vocabulary."""
    words = list(_LETTERS)
    while True:
        longer = []
        for word, letter in itertools.product(words, _LETTERS):
            longer.append(word + letter)
            yield word, letter
        words = longer
