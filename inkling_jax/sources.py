"""What a model's name means: a checkpoint directory, a preset or a hub id, tried in this order."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from inkling_jax.config import PRESETS
from inkling_jax.errors import CheckpointError, InputError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
NANO = Path(__file__).parent / "nano"  # the small model that comes with the package, under this name
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def own_model() -> str | None:
    """The name of the model that comes with the package; None in a copy without it."""
    return NANO.name if (NANO / "config.json").is_file() else None


def find_directory(source: str) -> Path | None:
    """The directory here that `source` names, a path or the package's own model; None where it names none."""
    path = Path(os.path.expanduser(source))
    if os.path.exists(path):  # False, not an exception, for a name that no file can have
        return path
    return NANO if source == own_model() else None


def unknown(source: str) -> InputError:
    """What to say of a name that is nothing known."""
    own = f"the package's own ({NANO.name})" if own_model() else None
    kinds = ["a directory", own, f"a preset ({', '.join(PRESETS)})", "a hub id (owner/name)"]
    return InputError(f"unknown model {source!r}: neither {' nor '.join(kind for kind in kinds if kind)}")


def find_source(source: str, weights: str) -> Path | str:
    """The checkpoint directory that `source` names, downloaded if need be, or the name of a preset.

    Raises CheckpointError where there is no such directory or the hub cannot give it, InputError for a name that is nothing known
    or does not go with `weights` ("checkpoint" or "random").
    """
    if weights not in ("checkpoint", "random"):
        raise InputError(f"weights={weights!r}: expected 'checkpoint' or 'random'")
    directory = find_directory(source)
    if directory is not None:
        _refuse_adapter(directory)
        return directory
    if source in PRESETS:
        if weights != "random":
            raise InputError(
                f"{source!r} is a preset, which is a shape without weights: give a checkpoint directory, or weights='random'"
            )
        return source
    if HUB_ID.fullmatch(source):
        return _download(source)
    if "/" in source or source.startswith(("~", ".")):
        raise CheckpointError(f"{source}: no such directory; expected a checkpoint directory with config.json")
    raise unknown(source)


def _refuse_adapter(directory: Path) -> None:
    """Refuse a LoRA adapter, which has no model's files, by what it is."""
    file = directory / "adapter_config.json"
    if not file.exists():
        return
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        base = None
    named = f" ({base})" if isinstance(base, str) else ""
    raise CheckpointError(
        f"{directory}: LoRA adapter layout is not supported: found adapter_config.json; "
        f"merge it into the model that it belongs to{named}, and give that"
    )


def _download(repo_id: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=_HUB_FILES))
    except (OSError, ValueError, HfHubHTTPError, huggingface_hub.errors.HFValidationError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{repo_id}: no such directory, and the hub could not give it ({reason})") from None
