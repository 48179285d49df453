"""Which token ids end a generation when the caller does not say: what the checkpoint's files name (spec 6)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from inkling_jax.config import ModelConfig
from inkling_jax.errors import CheckpointError
from inkling_jax.inputs.control import CONTROL_TOKENS
from inkling_jax.inputs.tokenizer import Tokenizer, optional_json_object

logger = logging.getLogger(__name__)


def resolve_stop_ids(directory: str | Path | None, tokenizer: Tokenizer | None, config: ModelConfig) -> tuple[int, ...]:
    """Stop ids, ascending: the union of what the files name. A request's own go before them (SamplingParams.stop_token_ids).

    The files are tokenizer_config.json and special_tokens_map.json (by spelling), generation_config.json and config.json (ids).
    The end of a message is no stop: an answer may hold several. Warns when nothing is found. Raises CheckpointError for a bad id.
    """
    usable = config.text.usable_vocab_size
    sources: dict[str, Any] = {"config.json": config.eos_token_id}
    if directory is not None:
        generation = Path(directory) / "generation_config.json"
        sources[str(generation)] = optional_json_object(generation).get("eos_token_id")
        if tokenizer is not None:
            for name in ("tokenizer_config.json", "special_tokens_map.json"):
                file = Path(directory) / name
                sources[str(file)] = _spelled_id(optional_json_object(file).get("eos_token"), tokenizer, file)
    found: set[int] = set()
    for source, value in sources.items():
        try:
            found |= _ids(value, usable)
        except ValueError as error:
            raise CheckpointError(f"{source}: eos_token_id: {error}") from None
    end_message = tokenizer.control.get("end_message") if tokenizer else CONTROL_TOKENS["end_message"].published_id
    found -= {end_message}
    if not found:
        logger.warning("no file of the checkpoint names an end token: generation runs to max_tokens (give stop_token_ids)")
    return tuple(sorted(found))


def _spelled_id(value: Any, tokenizer: Tokenizer, file: Path) -> int | None:
    """Id of an eos_token entry: a spelling, or an object with the spelling under "content"."""
    spelling = value.get("content") if isinstance(value, dict) else value
    if spelling is None:
        return None
    token_id = tokenizer.id_of(spelling) if isinstance(spelling, str) else None
    if token_id is None:
        raise CheckpointError(f"{file}: eos_token {spelling!r} is not a token of tokenizer.json")
    return token_id


def _ids(value: Any, usable: int) -> set[int]:
    """The ids of an int, list or tuple (None: nothing). Raises ValueError naming what is no id below `usable`."""
    ids: set[int] = set()
    for item in () if value is None else value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            raise ValueError(f"{item!r} is not a token id (an int, or a list of them)")
        if not 0 <= item < usable:
            raise ValueError(f"{item} is outside the usable vocabulary of {usable}")
        ids.add(int(item))
    return ids
