"""Every kernel on a small case: the reference against its definition in float64, and Hopper's against the reference.

A process of its own, `python -m inkling_jax.self_check`, since a kernel that faults or hangs takes its process with it. It prints
a JSON line as each check begins and another when it has ended.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from inkling_jax.command_line import start_jax
from inkling_jax.config import preset
from inkling_jax.expert_storage import kernels_refused
from inkling_jax.kernels import expert_matmul, kv_append, paged_attention, residual, router
from inkling_jax.kernels.expert_matmul import cases as expert_cases
from inkling_jax.kernels.kv_append import cases as append_cases
from inkling_jax.kernels.paged_attention import cases as attention_cases
from inkling_jax.kernels.residual import cases as residual_cases
from inkling_jax.kernels.router import cases as router_cases

EXACT, ROUNDED = 1e-4, 2e-2  # relative errors (2-norm) allowed in float32, and of bfloat16 kernels
PAGE_SIZE = 64

Answer = Float[np.ndarray, "..."]


@dataclasses.dataclass(frozen=True)
class Check:
    """One kernel in one implementation, compared."""

    kernel: str
    implementation: str  # "reference" or "sm90"
    case: str
    error: float | None = None  # relative; None: it did not come so far
    allowed: float = EXACT
    seconds: float = 0.0  # compiling included
    failure: str | None = None  # what was raised

    @property
    def ok(self) -> bool:
        """Whether it ran and agreed."""
        return self.failure is None and self.error is not None and self.error <= self.allowed


@dataclasses.dataclass(frozen=True)
class Subject:
    """A kernel on its small case: the inputs, and what computes the answer in three ways."""

    case: str
    inputs: Callable[[], Mapping[str, Any]]  # arrays, in bfloat16 where the model is
    reference: Callable[[Mapping[str, Any]], Any]
    sm90: Callable[[Mapping[str, Any]], Any]
    definition: Callable[[Mapping[str, Any]], Answer]  # in float64


def experts() -> Subject:
    """Five tokens, three of eight NVFP4 experts each (spec 2.6, 7.4)."""
    case = expert_cases.Case(256, 256, 8, 8, 5, 3)

    def sm90(given: Mapping[str, Any]) -> Any:
        from inkling_jax.kernels.expert_matmul.pack import pack

        packed: dict[str, Any] = {name: pack(given[name], name) for name in ("w13", "w2")}
        return expert_matmul.expert_matmul(**(dict(given) | packed))

    return Subject(
        case.name, lambda: expert_cases.inputs(case), lambda given: expert_matmul.expert_matmul(**given), sm90, _experts
    )


def _experts(given: Mapping[str, Any]) -> Answer:
    """Token by token, choice by choice."""

    def unpacked(weight: expert_matmul.Nvfp4) -> np.ndarray:
        values, scale, scale2 = (np.asarray(a) for a in weight)
        codes = np.stack([values & 15, values >> 4], axis=-1).reshape(*values.shape[:-1], -1)
        numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes >= 8, -1.0, 1.0)
        return numbers * np.repeat(scale.astype(np.float64), 16, axis=-1) * scale2.astype(np.float64)[..., None, None]

    w13, w2 = unpacked(given["w13"]), unpacked(given["w2"])
    x, weights, chosen = (np.asarray(given[name]).astype(np.float64) for name in ("x", "weights", "experts"))
    out = np.zeros(x.shape)
    for token, choice in np.argwhere(chosen < len(w13)):
        expert = int(chosen[token, choice])
        gate, up = w13[expert] @ x[token]
        out[token] += weights[token, choice] * (w2[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def attention() -> Subject:
    """A token each of four sequences, one idle, over a window of 512 keys in shuffled pages (spec 2.3)."""
    case = attention_cases.Case((700, 0, 64, 900), (1, 0, 1, 1), window=512, extent=512)
    statics: dict[str, Any] = {"window": case.window, "longest": case.longest, "context": case.context}

    def sm90(given: Mapping[str, Any]) -> Any:
        rows = [given[name] for name in ("start", "count", "length")]
        bias = paged_attention.prepare_bias(given["rel_bias"])
        heads: dict[str, Any] = {"heads": case.heads, "kv_heads": case.kv_heads, "window": case.window, "longest": case.longest}
        plan = paged_attention.plan_attention(bias, *rows, tokens=len(case.counts), **heads)
        assert plan is not None
        return paged_attention.paged_attention(**(dict(given) | {"rel_bias": bias}), plan=plan, **statics)

    return Subject(
        case.name,
        lambda: attention_cases.inputs(case),
        lambda given: paged_attention.paged_attention(**given, **statics),
        sm90,
        lambda given: attention_cases.expected(case, dict(given)),
    )


def routing() -> Subject:
    """Weights of the experts that eight tokens choose, all scales applied, in a table of all experts (spec 2.6)."""
    case = router_cases.CASES[2]
    statics: dict[str, Any] = {"chosen": case.chosen, "route_scale": 8.0}

    def table(made: router.Routing) -> jax.Array:
        every = jnp.zeros((case.tokens, case.experts)).at[jnp.arange(case.tokens)[:, None], made.experts].set(made.weights)
        return jnp.concatenate([every, made.shared], axis=1)

    def sm90(given: Mapping[str, Any]) -> Any:
        from inkling_jax.kernels.expert_matmul.group import Grouping
        from inkling_jax.kernels.router import sm90 as kernel

        wanted = Grouping(experts=case.held, rows=8, counters=1)
        everything: dict[str, Any] = {"valid": jnp.ones(case.tokens, bool), "first": jnp.int32(0), "wanted": wanted}
        return table(kernel.route(**given, **statics, **everything)[0])

    def inputs() -> dict[str, Any]:
        return {name: value for name, value in router_cases.inputs(case).items() if name not in statics}

    def reference(given: Mapping[str, Any]) -> Any:
        return table(router.route(**given, **statics))

    return Subject(case.name, inputs, reference, sm90, lambda given: _routing(given, **statics))


def _routing(given: Mapping[str, Any], chosen: int, route_scale: float) -> Answer:
    x, weight, bias = (np.asarray(given[name]).astype(np.float64) for name in ("x", "weight", "bias"))
    sigmoid = 1 / (1 + np.exp(-x @ weight.T))
    scale = route_scale * float(given["global_scale"])
    out = np.zeros_like(sigmoid)
    for row, values in enumerate(sigmoid):
        best = np.argsort(-(values[: len(bias)] + bias), kind="stable")[:chosen]
        taken = [*best, *range(len(bias), len(values))]
        out[row, taken] = values[taken] / values[taken].sum() * scale
    return out


def stream() -> Subject:
    """Nine rows of which two idle, at the begin of a sequence and far in one: h + conv(y), normed (spec 2.2, 2.4)."""
    case, eps = residual_cases.CASES[0], residual_cases.EPS

    def sm90(given: Mapping[str, Any]) -> Any:
        from inkling_jax.kernels.residual import sm90 as kernel

        return _flat(kernel.add_conv_norm(**given, eps=eps))

    return Subject(
        case.name,
        lambda: {name: value for name, value in residual_cases.inputs(case).items() if name != "eps"},
        lambda given: _flat(residual.add_conv_norm(**given, eps=eps)),
        sm90,
        lambda given: np.asarray(_flat(residual_cases.expected(given))),
    )


def appending() -> Subject:
    """The same rows, eight queries a key head, log scaling: queries, pages and what convolutions keep (spec 2.3, 2.4)."""
    case = dataclasses.replace(append_cases.CASES[1], columns=1)  # few pages, among which what is written counts
    statics: dict[str, Any] = {"rank": append_cases.RANK, "eps": residual_cases.EPS}

    def sm90(given: Mapping[str, Any]) -> Any:
        from inkling_jax.kernels.kv_append import sm90 as kernel

        return _flat(kernel.append(**given, **statics))

    return Subject(
        case.name,
        lambda: {name: value for name, value in append_cases.inputs(case).items() if name not in statics},
        lambda given: _flat(kv_append.append(**given, **statics)),
        sm90,
        lambda given: np.asarray(_flat(list(append_cases.expected(case, given).values()))),
    )


def _flat(arrays: Any) -> jax.Array:
    """All numbers of a tree of arrays, zero for those that never were."""
    return jnp.concatenate([jnp.nan_to_num(array).reshape(-1) for array in jax.tree.leaves(arrays)])


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "expert_matmul": experts,
    "kv_append": appending,
    "paged_attention": attention,
    "residual": stream,
    "router": routing,
}


def check(kernel: str, implementation: str) -> Check:
    """Run one check. What it raises is its failure, whatever it is."""
    start = time.monotonic()
    found = Check(kernel, implementation, "", allowed=EXACT if implementation == "reference" else ROUNDED)
    try:
        subject = SUBJECTS[kernel]()
        found = dataclasses.replace(found, case=subject.case)
        inputs = jax.jit(subject.inputs)()
        wide = {name: jax.tree.map(_widened, value) for name, value in inputs.items()}
        with jax.default_matmul_precision("highest"):
            got = np.asarray(jax.jit(subject.reference)(wide))
        want = subject.definition(wide)
        if implementation == "sm90":
            want, got = got, np.asarray(subject.sm90(inputs)).astype(np.float64)
        error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
        return dataclasses.replace(found, error=error, seconds=time.monotonic() - start)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        failure = f"{type(error).__name__}: {lines[0]}"
        return dataclasses.replace(found, failure=failure, seconds=time.monotonic() - start)


def _widened(value: Any) -> Any:
    """A bfloat16 array as float32; anything else as it is."""
    return value.astype(jnp.float32) if getattr(value, "dtype", None) == jnp.bfloat16 else value


def refused() -> str | None:
    """Why the kernels for Hopper do not run on the first device here; None where they do."""
    kind = jax.devices()[0].device_kind
    return kernels_refused(preset("inkling-small").text, jnp.dtype(jnp.bfloat16), kind, {}, PAGE_SIZE)


def main() -> None:
    """Run all checks, each implementation that runs here."""
    start_jax()
    implementations = ("reference",) if refused() else ("reference", "sm90")
    for implementation in implementations:
        for kernel in SUBJECTS:
            print(json.dumps({"begins": [kernel, implementation]}), flush=True)
            found = check(kernel, implementation)
            print(json.dumps(dataclasses.asdict(found) | {"ok": found.ok}), flush=True)


if __name__ == "__main__":
    main()
