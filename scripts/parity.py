"""Count the tokens for which two implementations choose otherwise, teacher forced, by how clear the choice was.

    # Hopper kernels against plain JAX on the set `gpu` of tests/data; then on any checkpoint
    python scripts/parity.py --output bench/results/parity.json
    python scripts/parity.py --model DIR --prompts FILE --mesh tensor=8

Every prompt is read twice: in chunks, as prompts are, and token by token through the cache, as tokens are decoded; there each
step takes the prompt's next token, whatever was chosen. A choice is clear where the reference's best logit is `--clear` or more
above its second. Exits with 1 where a clear choice differs, with 2 where an implementation cannot run here.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from gpu_oracle import DATA, prompt_time
from jaxtyping import Float, Int
from safetensors.numpy import load_file

import inkling_jax
from inkling_jax.benchmarks.ceilings import read_ceiling
from inkling_jax.benchmarks.rows import make_row, save_rows
from inkling_jax.command_line import Parser, run
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.errors import InputError
from inkling_jax.llm import LLM

# On the set `gpu` plain JAX in bfloat16 chooses one token in ten otherwise than in float32, since rounding moves its routers too;
# the widest gap among them is 1.5. In probabilities 2 is a factor of 7.
CLEAR = 2.0
EDGES = (0.0, 0.1, 0.5, 1.0)  # where bands of unclear gaps begin
SLOTS = 8
WAYS = ("chunks", "decoded")

Ids = Sequence[int]


class Choices(NamedTuple):
    """For each token, of all prompts end to end: the best next token, and how far its logit is above the second's."""

    best: Int[np.ndarray, " N"]
    gap: Float[np.ndarray, " N"]


class Band(NamedTuple):
    """Tokens whose gap is at least `least` and below the next band's, and how many are chosen otherwise."""

    least: float
    tokens: int
    otherwise: int


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print the table and keep the row; the exit code."""
    options = _parser().parse_args(argv)
    if (options.model is None) != (options.prompts is None):
        raise InputError("--model and --prompts go together: ids mean something in one vocabulary only")
    with tempfile.TemporaryDirectory() as folder:
        directory, prompts = (options.model, read_prompts(options.prompts)) if options.model else gpu_set(Path(folder))
        reference, tested = options.kernels
        # the tested one first: what cannot run here is refused before anything is computed
        with open_model(directory, tested, options) as llm:
            ids = [llm.requests(prompt, SamplingParams())[0].prompt_ids for prompt in prompts]
            found = choices(llm, ids)
            longest = max(ids, key=len)
            timed = prompt_time(llm, directory, longest, read_ceiling(jax.devices()[0])) if options.output else {}
        with open_model(directory, reference, options) as llm:
            bands = {way: compare(right, found[way], options.clear) for way, right in choices(llm, ids).items()}
    name = options.model.resolve().name if options.model else "gpu"
    print(table(bands))
    if options.output:
        save_rows(options.output, [row(f"{name} {options.dtype}", options, bands, timed)])
    return int(any(found[-1].otherwise for found in bands.values()))


def _parser() -> Parser:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint (default: the set gpu of tests/data)")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSON: a list of prompts, each a text or a list of token ids"
    )
    parser.add_argument(
        "--kernels",
        nargs=2,
        choices=("reference", "sm90"),
        default=("reference", "sm90"),
        metavar=("REFERENCE", "TESTED"),
        help="reference or sm90 each (default: reference sm90)",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default %(default)s")
    parser.add_argument("--mesh", metavar="AXIS=N,...", help="spread the model over so many devices")
    parser.add_argument("--max-context", type=int, default=1024, metavar="N", help="longest prompt (default %(default)s)")
    parser.add_argument(
        "--clear", type=float, default=CLEAR, metavar="GAP", help="least gap of a clear choice (default %(default)s)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file that the row is merged into")
    return parser


def gpu_set(folder: Path) -> tuple[Path, list[Ids]]:
    """The checkpoint of that set, unpacked into `folder`, and its prompts."""
    with tarfile.open(DATA / "gpu-nvfp4.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    answers = load_file(folder / "expected-nvfp4.safetensors")
    return folder / "nvfp4", [answers[name].tolist() for name in sorted(answers) if name.endswith(".ids")]


def read_prompts(file: Path) -> list[str | Ids]:
    """The prompts of a file. Raises InputError for one that holds no list."""
    try:
        prompts = json.loads(file.read_text())
    except ValueError as error:
        raise InputError(f"{file}: not JSON ({error})") from None
    if not isinstance(prompts, list) or not prompts:
        raise InputError(f"{file}: expected a list of prompts, each a text or a list of token ids")
    return prompts


def open_model(directory: Path, kernels: str, options: Any) -> LLM:
    """A step at a time, so that each token can be given. Raises InputError where these kernels cannot run."""
    wanted = {"dtype": options.dtype, "mesh": options.mesh, "max_context": options.max_context, "kernels": kernels}
    return inkling_jax.load(directory, **wanted, slots=SLOTS, tokens_per_call=1, ahead=0, quiet=True)


def choices(llm: LLM, prompts: Sequence[Ids]) -> dict[str, Choices]:
    """What the model chooses after each token by each of the `WAYS`; the first tokens of prompts are not decoded."""
    return dict(zip(WAYS, (in_chunks(llm, prompts), decoded(llm, prompts)), strict=True))


def in_chunks(llm: LLM, prompts: Sequence[Ids]) -> Choices:
    """After each token of each prompt."""
    logits = [chunk for ids in prompts for chunk, _ in llm.engine.evaluate(ids)]
    best_two = np.concatenate([np.sort(np.partition(chunk, -2)[:, -2:]) for chunk in logits])
    return Choices(np.concatenate([chunk.argmax(1) for chunk in logits]), best_two[:, 1] - best_two[:, 0])


def decoded(llm: LLM, prompts: Sequence[Ids]) -> Choices:
    """After each token of each prompt but its first, all of them given to decode steps, as many prompts at once as fit.

    Exits with 1 where logits are not finite.
    """
    engine, made = llm.engine, {}
    for ids in prompts:
        params = SamplingParams(temperature=0, max_tokens=len(ids), ignore_eos=True, logprobs=2)
        made[engine.add(Request(tuple(ids[:1]), params))] = (ids, [])
    while engine.busy:
        for output in engine.step():
            if output.error:
                raise SystemExit(f"a decode step failed: {output.error}")
            made[output.request_id][1].extend(output.logprobs)
        given = {s.slot: made[s.id][0][len(s.made)] for s in engine.scheduler.running if s.decoding and s.made}
        last = engine.state.last_token.at[np.array(list(given), int)].set(np.array(list(given.values()), np.int32))
        engine.state = dataclasses.replace(engine.state, last_token=last)
    tops = [token.top for _, tokens in made.values() for token in tokens[1:]]
    return Choices(np.array([top[0][0] for top in tops]), np.array([top[0][1] - top[1][1] for top in tops]))


def compare(reference: Choices, tested: Choices, clear: float) -> list[Band]:
    """Tokens by the reference's gap, the clear ones last."""
    edges = [*(edge for edge in EDGES if edge < clear), clear]
    band = np.searchsorted(edges, reference.gap, side="right") - 1
    otherwise = reference.best != tested.best
    return [Band(edge, int((band == i).sum()), int(otherwise[band == i].sum())) for i, edge in enumerate(edges)]


def table(bands: dict[str, list[Band]]) -> str:
    """A line for each band of gaps, and for each way how many tokens there are and how many are chosen otherwise."""
    lines = ["gap of the two best" + "".join(f"{way:>12} {'otherwise':>10}" for way in bands)]
    for together in zip(*bands.values(), strict=True):
        lines.append(
            f"at least {together[0].least:<10g}" + "".join(f"{band.tokens:>12,} {band.otherwise:>10,}" for band in together)
        )
    return "\n".join([*lines[:-1], lines[-1] + "  (clear)"])


def row(case: str, options: Any, bands: dict[str, list[Band]], timed: dict[str, Any]) -> dict[str, Any]:
    """The counts as a result row; its time is that of the longest prompt in chunks."""
    counts = {
        f"{way}_{name}": value
        for way, found in bands.items()
        for name, value in (
            ("tokens", sum(band.tokens for band in found)),
            ("otherwise", sum(band.otherwise for band in found)),
            ("clear", found[-1].tokens),
            ("clear_otherwise", found[-1].otherwise),
        )
    }
    reference, tested = options.kernels
    return make_row(
        "parity", case, "prefill", jax.devices()[0], kernels=tested, against=reference, clear_gap=options.clear, **timed, **counts
    )


if __name__ == "__main__":
    sys.exit(run(main))
