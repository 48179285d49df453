"""Inkling models in Flax NNX on JAX.

    llm = inkling_jax.load("path/to/checkpoint")
    print(llm.generate("The capital of France is")[0].text)

Light to import: jax is loaded, and a device touched, by the first name that needs it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from inkling_jax.errors import CapacityError, CheckpointError, ConfigError, InklingError, InputError

if TYPE_CHECKING:
    from inkling_jax.completion import Completion, Delta
    from inkling_jax.conversation import ChatCompletion, ChatDelta, ChatStream
    from inkling_jax.engine.request import SamplingParams
    from inkling_jax.inputs.prompt import Prompt
    from inkling_jax.llm import LLM, load

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CapacityError",
    "ChatCompletion",
    "ChatDelta",
    "ChatStream",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "Delta",
    "InklingError",
    "InputError",
    "Prompt",
    "SamplingParams",
    "__version__",
    "load",
]

_HOMES = {
    "load": "inkling_jax.llm",
    "LLM": "inkling_jax.llm",
    "ChatCompletion": "inkling_jax.conversation",
    "ChatDelta": "inkling_jax.conversation",
    "ChatStream": "inkling_jax.conversation",
    "Completion": "inkling_jax.completion",
    "Delta": "inkling_jax.completion",
    "Prompt": "inkling_jax.inputs.prompt",
    "SamplingParams": "inkling_jax.engine.request",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names, those not imported yet included."""
    return sorted({*globals(), *__all__})
