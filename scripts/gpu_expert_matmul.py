"""Try the expert kernels on a GPU, each variant in a process of its own that is stopped if it hangs.

`python scripts/gpu_expert_matmul.py check` compares the grouping and small cases; `... bench CASE...` times cases. A line `STEP
... rc=` follows each step; words joined by commas share a process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time


def check_groups() -> None:
    """The one-launch grouping must agree with the plain one in all that is promised."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from inkling_jax.kernels.expert_matmul.group import group
    from inkling_jax.kernels.expert_matmul.grouping import group_on_device

    shapes = ((1, 6, 32, 0, 1), (64, 6, 32, 224, 1), (50, 3, 300, 9, 8), (1000, 6, 12, 3, 8))
    for tokens, choices, experts, beyond, align in shapes:
        chosen = jax.random.randint(jax.random.key(tokens), (tokens, choices), 0, experts + beyond, jnp.int32)
        want, got = (jax.tree.map(np.asarray, f(chosen, experts, 32, 70, align)) for f in (group, group_on_device))
        slots, row = int(want.count[0]), want.place[want.place >= 0]
        same = {
            "count": slots == int(got.count[0]),
            "place": (want.place == got.place).all(),
            "token": (want.token[row] == got.token[row]).all(),
            "counters": not got.counters.any(),
        }
        same |= {name: (getattr(want, name)[:slots] == getattr(got, name)[:slots]).all() for name in ("expert", "first", "used")}
        wrong = [name for name, ok in same.items() if not ok]
        print("group", tokens, choices, experts, "ok" if not wrong else f"WRONG {wrong}", flush=True)


def check_cases(variant: str) -> None:
    """Errors of small cases against the reference in float32."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from inkling_jax.benchmarks.expert_matmul import VARIANTS
    from inkling_jax.kernels.expert_matmul import cases, reference, sm90
    from inkling_jax.kernels.expert_matmul.pack import pack

    for case in reversed(cases.SMALL):  # the newest kinds first, should time run out
        options = VARIANTS[variant] or sm90.regime(case.tokens * case.choices / case.routed)
        if options["kernel"] == "batch" and case.tokens < 13 or options["kernel"] == "decode" and case.tokens > 64:
            continue
        given = cases.inputs(case)
        x, experts, weights, w13, w2 = given.values()
        with jax.default_matmul_precision("highest"):
            want = np.asarray(reference.expert_matmul(x.astype(jnp.float32), experts, weights, w13, w2))
        args = (x, experts, weights, pack(w13, "w13"), pack(w2, "w2"))
        try:
            results = [np.asarray(sm90.run(*args, processors=sm90.processors(), **options)).astype(np.float32) for _ in range(3)]
        except Exception as error:
            print("case", variant, case.name, "FAILED", str(error)[:300], flush=True)
            continue
        error = np.linalg.norm(results[0] - want) / max(np.linalg.norm(want), 1e-30)
        same = all((r == results[0]).all() for r in results)
        print("case", variant, case.name, f"{error:.5f}", "same bits" if same else "DIFFERENT BITS", flush=True)


def main() -> None:
    """Run one step, or all in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["check", "bench", "groups", "case"])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--variants", nargs="+", default=["auto"])
    parser.add_argument("--timeout", type=int, default=60)
    options = parser.parse_args()
    if options.mode == "groups":
        return check_groups()
    if options.mode == "case":
        return check_cases(options.words[0])
    if options.mode == "check":
        steps = [[__file__, "groups"], *([__file__, "case", v] for v in options.variants)]
    else:
        base = ["-m", "inkling_jax.benchmarks.expert_matmul", "--detail", "--variants", *options.variants]
        steps = [[*base, "--cases", *word.split(",")] for word in options.words]
    for step in steps:
        start = time.time()
        try:
            rc = subprocess.run([sys.executable, *step], timeout=options.timeout, check=False).returncode
        except subprocess.TimeoutExpired:
            rc = "timeout"
        print(f"STEP {' '.join(step)[-80:]} rc={rc} {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
