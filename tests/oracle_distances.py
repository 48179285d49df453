"""How far a loaded model is from the reference answers: shared by tests and scripts/gpu_oracle.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import inkling_jax
from inkling_jax.llm import LLM

KERNELS = "reference"
# Prompt tokens a step and tokens a page. A chunk bounds the number of programs, since each bucket of lengths has one; that of
# `tiny` takes its prompts in many pieces, and its pages are freed behind its window of 16.
SETTINGS = {"tiny": (16, 16), "wide": (32, 32), "gpu": (32, 64)}


def open_set(preset: str, directory: Path, dtype: str, kernels: str = KERNELS) -> LLM:
    """The checkpoint of a set, loaded as all measurements here load it."""
    chunk, page_size = SETTINGS[preset]
    return inkling_jax.load(
        str(directory), dtype=dtype, kernels=kernels, max_context=512, slots=4, chunk=chunk, page_size=page_size, quiet=True
    )


def distances(llm: LLM, answers: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Relative errors (2-norm) against the answers, on all prompts and inside the one of 33 tokens.

    "logits" over all tokens of all prompts; "token", the median over tokens; "hidden", of the worst layer; "weights", of the
    worst layer's routing weights among tokens routed alike, the shared experts' included; "experts", the share of tokens and
    layers routed otherwise.
    """
    prompts = sorted(name.removesuffix(".ids") for name in answers if name.startswith("len") and name.endswith(".ids"))
    # all by the program that traces, so that no second one need be compiled
    scored = {name: list(llm.engine.evaluate(answers[f"{name}.ids"].tolist(), trace=True)) for name in prompts}
    found = np.concatenate([logits for name in prompts for logits, _ in scored[name]])
    right = np.concatenate([answers[f"{name}.logits"] for name in prompts])
    by_token = np.linalg.norm(found - right, axis=1) / np.linalg.norm(right, axis=1)
    trace = {key: np.concatenate([tape[key] for _, tape in scored["len33"]]) for key in scored["len33"][0][1]}
    inside = {name.removeprefix("len33."): value for name, value in answers.items() if name.startswith("len33.")}
    layers = [name.removesuffix(".experts") for name in inside if name.endswith(".experts")]
    alike = {layer: (trace[f"{layer}.experts"] == inside[f"{layer}.experts"]).all(1) for layer in layers}
    routing = [
        relative(trace[name][alike[layer]], inside[name][alike[layer]])
        for layer in layers
        for name in (f"{layer}.weights", f"{layer}.shared")
    ]
    return {
        "logits": relative(found, right),
        "token": float(np.median(by_token)),
        "hidden": max(relative(trace[name], inside[name]) for name in inside if name.startswith("hidden.")),
        "weights": max(routing),
        "experts": 1 - float(np.mean([alike[layer].mean() for layer in layers])),
    }


def relative(found: np.ndarray, right: np.ndarray) -> float:
    """|found - right| / |right|, computed in float64."""
    right = np.asarray(right, np.float64)
    return float(np.linalg.norm(np.asarray(found, np.float64) - right) / np.linalg.norm(right))
