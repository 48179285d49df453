"""Write docs/support.md from the table below, or check that they agree.

    python scripts/make_support.py            # after the table has changed
    python scripts/make_support.py --check    # changes nothing; an error where the document and the table differ

tests/test_support.py holds each line to the code: what is refused, which options there are, what divides.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from documents import write_or_check

from inkling_jax.command_line import run

ROOT = Path(__file__).resolve().parents[1]
YES, NO = "yes", "no"
HOPPER = "by default, H100 or H200, bfloat16"


@dataclasses.dataclass(frozen=True)
class Feature:
    """A line of the document: yes, no or on which condition, for each model."""

    key: str  # of its check in tests/test_support.py
    name: str
    inkling: str
    small: str


def both(key: str, name: str, cell: str) -> Feature:
    """The same for both models."""
    return Feature(key, name, cell, cell)


FEATURES: dict[str, tuple[Feature, ...]] = {
    "Checkpoints": (
        both("bf16", "BF16, as published", YES),
        both("nvfp4", "NVFP4, as published: stays packed on the device, activations are not quantised", YES),
        both("converted", "converted by `python -m inkling_jax.convert SRC DST`", YES),
        both("quantise", "BF16 to NVFP4: `python -m inkling_jax.convert SRC DST --quantize nvfp4`", YES),
        both("hf_dialect", "`config.json` in the dialect of Transformers, tensors named as published", YES),
        both("hf_names", "tensors renamed by Transformers", NO),
        both("mlx", "MLX, 4 bits", NO),
        both("compressed", "compressed-tensors", NO),
        both("gguf", "GGUF", NO),
        both("lora", "LoRA adapters", NO),
        both("random", 'random weights in the released shape (`weights="random"`)', YES),
    ),
    "What it does": (
        both("generate", "generate and stream text: greedy, temperature, top-k, top-p, min-p, penalties, biases, logprobs", YES),
        both("chat", "chat with reasoning and tool calls (`llm.chat`)", YES),
        both("score", "logits and hidden states of a prompt (`llm.score`, `llm.trace`)", YES),
        both("media", "images, audio and video in prompts (`Prompt`, `llm.chat`)", YES),
        both("media_cli", "images, audio and video at the terminal (`--image`, `--audio`, `--video`)", YES),
        both("batch", "a file of requests, OpenAI's batch files among them (`--input`)", YES),
        both("draft", "logits of the draft head (`llm.draft_logits`), read when first asked or, planned, by `draft=True`", YES),
        both("speculative", "speculative decoding", NO),
        both("prefix", "reuse of a common prefix, its media included (`prefix_memory`)", "yes; not with replicas (`data=N`)"),
        both("kv_quantised", "keys and values quantised by calibrated scales of a checkpoint", NO),
        both(
            "kv_fp8",
            'keys and values in fp8 (e4m3) with a scale a token and head: `kv_dtype="fp8"`, `--kv-dtype fp8`',
            "yes; by kernels for Hopper that were compiled and interpreted, and have not run on a GPU yet",
        ),
        both("context", "contexts of up to 1,048,576 tokens", "as memory allows: the planner says how long"),
    ),
    "Where it runs": (
        both("cpu", "CPU", YES),
        both("float32", "float32", YES),
        both("float16", "float16", NO),
        both("reference", "plain JAX on any device", YES),
        both(
            "sm90", "kernels for Hopper: attention, of prompts and in decode, router, experts, cache and residual stream", HOPPER
        ),
        both("pages", "tokens a cache page", "any power of two; 64 or 128 with the kernels for Hopper"),
        Feature("mesh", "`tensor=N,expert=M`", "N x M = 1, 2, 4, 8, 16, 32 or 64", "N x M = 1, 2, 4, 8, 16 or 32"),
        both("kv_copies", "more devices than key heads, each with those of its queries", YES),
        both("auto_mesh", '`mesh="auto"`: all devices here', YES),
        both("data", "replicas (`data=N`), which step together", YES),
        both("experts_over_data", "experts spread over replicas (`--experts-over data`)", "plain JAX, N = 2, 4, 8, ... 256"),
        both("processes", "several processes or hosts", "but for conversations (`--chat`): [multihost.md](multihost.md)"),
        Feature("one_gpu", "NVFP4 on one GPU with 141 GB for jax", NO, NO),
        Feature("two_gpus", "NVFP4 on two GPUs with 141 GB for jax", NO, YES),
        Feature("eight_gpus", "NVFP4 on eight GPUs with 60 GB for jax, 8 sequences of 16,384 tokens", NO, YES),
        Feature("eight_large", "NVFP4 on eight GPUs with 141 GB for jax, 32 sequences of 131,072 tokens", YES, YES),
    ),
}

HEAD = """\
# What is supported
Written by `python scripts/make_support.py` from its table, which `tests/test_support.py` holds to the code. What is not supported
is refused by name before a weight is read; a condition is told where it is not met. `python -m inkling_jax.plan --model inkling`
says what fits and `python -m inkling_jax.doctor` what works here. Of a GPU's memory jax takes three quarters, unless
XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
"""


def document() -> str:
    """The whole of docs/support.md."""
    lines = [HEAD]
    for title, features in FEATURES.items():
        lines += [f"## {title}", "| | Inkling | Inkling-Small |", "|---|---|---|"]
        lines += [f"| {feature.name} | {feature.inkling} | {feature.small} |" for feature in features]
        lines.append("")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, path: Path = ROOT / "docs/support.md") -> int:
    """Write the document, or with --check compare it; 0 where all is well."""
    return write_or_check("make_support.py", __doc__ or "", argv, path, lambda text: document())


if __name__ == "__main__":
    sys.exit(run(main))
