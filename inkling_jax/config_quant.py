"""The quantisation file hf_quant_config.json (spec 1.3): refuses what cannot be read, and says for reports what is packed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inkling_jax.config_fields import Fields
from inkling_jax.errors import ConfigError

QUANT_FILE = "hf_quant_config.json"
NVFP4_BLOCK = 16  # values that share one block scale
_MIXED = "MIXED_PRECISION"  # the algorithm is then named an entry of quantized_layers


def read_quant(quant: Mapping[str, Any] | None) -> str | None:
    """The algorithm of the routed experts, "NVFP4" or None (spec 1.3). Raises ConfigError for any other, naming the value."""
    if quant is None:
        return None
    if not isinstance(quant, Mapping):
        raise ConfigError(f"{QUANT_FILE}: expected a JSON object, found {type(quant).__name__}")
    fields = Fields(quant, QUANT_FILE).section("quantization")
    if fields is None:
        raise ConfigError(f"{QUANT_FILE}: quantization is missing, expected an object with quant_algo and group_size")
    entries = fields.section("quantized_layers")
    sections = [entries.section(name) for name in entries.values] if entries is not None else []
    algos = {_algo(fields, "NVFP4", _MIXED) if entries is not None else _algo(fields, "NVFP4")}
    algos |= {_algo(section, "NVFP4") for section in sections if section is not None}
    return "NVFP4" if "NVFP4" in algos else None


def refuse_embedded(fields: Fields) -> None:
    """Raise ConfigError for a quantisation described inside config.json: compressed-tensors, MLX and the like (spec 1.4)."""
    for name in ("quantization_config", "quantization"):
        section = fields.section(name)
        if section is None or not section.values:
            continue
        method = section.values.get("quant_method") or ("MLX affine" if "bits" in section.values else "unnamed")
        raise ConfigError(
            f"{fields.source}: {fields.path}{name} describes the layout {method!r}, which is not supported; "
            f"expected none (BF16), or NVFP4 described by {QUANT_FILE}"
        )


def _algo(fields: Fields, *known: str) -> str | None:
    """The algorithm that one object names, None where it spells "none"; its block size and KV-cache type are checked too."""
    if not _is_none(fields.values.get("kv_cache_quant_algo")):
        raise fields.error("kv_cache_quant_algo", 'null or "none" (checkpoints hold no KV-cache scales)')
    algo = fields.values.get("quant_algo")
    if _is_none(algo):
        return None
    if algo not in known:
        raise fields.error("quant_algo", '"NVFP4", null or "none"')
    if algo == "NVFP4" and fields.integer("group_size", default=NVFP4_BLOCK) != NVFP4_BLOCK:
        raise fields.error("group_size", f"{NVFP4_BLOCK}, the block of NVFP4")
    return algo


def _is_none(value: Any) -> bool:
    """Whether a file's value means unquantised; writers spell it null, "none", "None", "null" or ""."""
    return value is None or (isinstance(value, str) and value.strip().lower() in ("", "none", "null"))
