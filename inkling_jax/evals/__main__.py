"""How good a model is at the nano tasks, and whether another run of them differs: `python -m inkling_jax.evals nano`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from inkling_jax.command_line import (
    EXIT_CODES,
    OK,
    Parser,
    add_kernels_option,
    add_message_options,
    run,
    set_up_messages,
    start_jax,
)
from inkling_jax.errors import InputError
from inkling_jax.sources import own_model

CONTEXT = 1024  # tokens of a conversation and its answer at most
CHUNK = 256  # prompt tokens a step: a long conversation in three, and few sizes of steps to compile

EXAMPLES = f"""\
examples:
  # accuracy, perplexity and draft acceptance of a checkpoint
  python -m inkling_jax.evals nano --model ./nano-bf16 --output bf16.json --control

  # the same items with the weights in NVFP4, and what that changes
  python -m inkling_jax.evals nano --model ./nano-nvfp4 --baseline bf16.json

  # without their pictures and sounds, captions and names of tones are guesses
  python -m inkling_jax.evals nano --model ./nano-nvfp4 --tasks shapes,tones --media removed

{EXIT_CODES}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    args = _parser().parse_args(argv)
    return run(lambda: _run(args))


def _parser() -> Parser:
    parser = Parser(prog="python -m inkling_jax.evals", description=(__doc__ or "").splitlines()[0], epilog=EXAMPLES)
    parser.add_argument("suite", choices=("nano",), help="the tasks: those that the nano model is trained on")
    own = own_model()
    shown = f" (default {own}, the package's own)" if own else ""
    parser.add_argument("--model", default=own, required=own is None, metavar="M", help=f"checkpoint directory or hub id{shown}")
    items = parser.add_argument_group("items")
    items.add_argument("--tasks", metavar="NAME,...", help="which (default: all)")
    items.add_argument("--limit", type=int, default=100, metavar="N", help="items of each task (default %(default)s)")
    items.add_argument("--seed", type=int, default=0, metavar="S", help="other items (default %(default)s)")
    items.add_argument(
        "--media", choices=("kept", "removed", "replaced"), default="kept", help="pictures and sounds (default kept)"
    )
    model = parser.add_argument_group("model, as `load` takes it")
    model.add_argument("--dtype", choices=("bfloat16", "float32"), help="to compute in (default: the checkpoint's)")
    model.add_argument("--activations", choices=("nvfp4",), help="round inputs of packed experts to 4 bits (a simulation)")
    model.add_argument("--slots", type=int, default=32, metavar="N", help="sequences at once (default %(default)s)")
    add_kernels_option(model)
    found = parser.add_argument_group("results")
    found.add_argument("--control", action="store_true", help="answer every item twice, to see what flips without a change")
    found.add_argument(
        "--drafts", type=int, default=20, metavar="N", help="items of each task for draft acceptance (default %(default)s)"
    )
    found.add_argument("--baseline", type=Path, metavar="FILE", help="results to compare with, item by item")
    found.add_argument("--output", type=Path, metavar="FILE", help="where to keep the results")
    add_message_options(parser)
    return parser


def _run(args: argparse.Namespace) -> int:
    from inkling_jax.evals.nano.tasks import TASKS
    from inkling_jax.evals.results import read_baseline, save_results

    set_up_messages(args.verbose, args.quiet)
    tasks = list(TASKS) if args.tasks is None else args.tasks.split(",")
    for task in tasks:
        if task not in TASKS:
            raise InputError(f"--tasks: there is no task {task!r}; expected some of {', '.join(TASKS)}")
    for name in ("limit", "slots"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name} {getattr(args, name)}: expected at least 1")
    items = {"tasks": tasks, "seed": args.seed, "limit": args.limit}
    before = read_baseline(args.baseline, **items) if args.baseline is not None else None
    start_jax()
    from inkling_jax.evals.report import comparison_cells, print_cells, results_cells
    from inkling_jax.evals.run import run_tasks
    from inkling_jax.llm import load

    options = {name: getattr(args, name) for name in ("dtype", "activations", "kernels", "slots")}
    with load(args.model, max_context=CONTEXT, chunk=CHUNK, quiet=args.quiet, **options) as llm:
        drafts = args.drafts if llm.config.mtp is not None else 0
        results = run_tasks(llm, **items, media=args.media, control=args.control, drafts=drafts)
    results.about = {
        "model": Path(args.model).name,
        **{name: options[name] for name in ("activations", "kernels")},
    } | results.about
    if args.output is not None:
        save_results(args.output, results)
    print_cells(results_cells(results))
    if before is not None:
        print_cells(comparison_cells(before, results))
    return OK


if __name__ == "__main__":
    sys.exit(main())
