"""Generate text from the command line: `python -m inkling_jax.generate`. One prompt, standard input, or a conversation."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inkling_jax.command_line import (
    EXIT_CODES,
    Parser,
    add_kernels_option,
    add_message_options,
    print_error,
    run,
    set_up_messages,
    start_jax,
)
from inkling_jax.errors import InputError
from inkling_jax.sources import find_source

if TYPE_CHECKING:
    from inkling_jax.engine.request import SamplingParams
    from inkling_jax.inputs.prompt import Prompt
    from inkling_jax.llm import LLM
    from inkling_jax.terminal import Answer

MAX_TOKENS = 512

EXAMPLES = f"""\
examples:
  # one turn of a chat, streamed as it is made
  python -m inkling_jax.generate --model ./Inkling-Small-NVFP4 --prompt "Why is the sky blue?" --effort low

  # plain continuation of a text that comes through a pipe, always the likeliest token
  echo "The capital of France is" | python -m inkling_jax.generate --model ./ckpt --raw --temperature 0 --max-tokens 16

  # a conversation
  python -m inkling_jax.generate --model ./ckpt --chat --system "Answer in one sentence."

  # for another program: one JSON object and nothing else
  python -m inkling_jax.generate --model ./ckpt --prompt "Name a prime." --seed 7 --json --quiet

  # eight GPUs; a checkpoint without a tokenizer; a released shape without its files
  python -m inkling_jax.generate --model ./ckpt --mesh tensor=8 --prompt "Hello"
  python -m inkling_jax.generate --model ./ckpt --ids 1,2,3
  python -m inkling_jax.generate --model inkling-small --weights random --mesh tensor=8 --ids 1,2,3 --max-context 4096

{EXIT_CODES}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    args = _parser().parse_args(argv)
    return run(lambda: _generate(args))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m inkling_jax.generate",
        description="Generate text with an Inkling model: the text on standard output as it is made, all else on standard error.",
        epilog=EXAMPLES,
    )
    _add_prompt_options(parser)
    _add_sampling_options(parser)
    _add_model_options(parser)
    parser.add_argument_group("output").add_argument(
        "--json",
        action="store_true",
        help="print one JSON object at the end instead: text, token_ids, finish_reason, usage, timings (seconds)",
    )
    add_message_options(parser)
    return parser


def _add_prompt_options(parser: Parser) -> None:
    group = parser.add_argument_group(
        "prompt", "Without --prompt, --ids or --chat it is read from standard input, less one last newline."
    )
    source = group.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="what the user says: one turn of a chat")
    source.add_argument("--ids", metavar="1,2,3", help="token ids, taken as they are; without a tokenizer ids are printed too")
    source.add_argument("--chat", action="store_true", help="hold a conversation: each line read is a turn, until the input ends")
    group.add_argument("--raw", action="store_true", help="take the text as it is, not as a turn of a chat")
    group.add_argument("--system", metavar="TEXT", help="system message of the chat")
    group.add_argument(
        "--effort", metavar="E", help="thinking effort: none, minimal, low, medium, high, xhigh, or 0 to 0.99 (default 0.9)"
    )


def _add_sampling_options(parser: Parser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=MAX_TOKENS, metavar="N", help="end after N tokens (default %(default)s)")
    group.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="0: always the likeliest token (default %(default)s)"
    )
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="of the likeliest that make up P together (default %(default)s)"
    )
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="of the K likeliest (default 0: all)")
    group.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="of those with P times the best's probability (default 0)"
    )
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same tokens (default: another each time)")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given more than once"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on past the model's end token")


def _add_model_options(parser: Parser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", required=True, metavar="M", help="checkpoint directory, preset (inkling, inkling-small) or hub id"
    )
    group.add_argument(
        "--weights", choices=("checkpoint", "random"), default="checkpoint", help="random: the shape alone, for trials"
    )
    group.add_argument("--dtype", choices=("bfloat16", "float32"), help="to compute in (default: the checkpoint's)")
    group.add_argument("--mesh", metavar="AXIS=N,...", help="devices to spread over, such as tensor=8 (default: one device)")
    group.add_argument(
        "--max-context", type=int, metavar="N", help="longest prompt and answer in tokens (default: what memory holds)"
    )
    group.add_argument("--kv-memory", metavar="SIZE", help="cache on each device, such as 40GB (default: what is left)")
    group.add_argument(
        "--page-size", type=int, default=64, metavar="N", help="tokens a cache page, a power of two (default %(default)s)"
    )
    add_kernels_option(group)


def _generate(args: argparse.Namespace) -> int:
    set_up_messages(args.verbose, args.quiet)
    _check(args)
    params = _sampling(args)
    source = _read_source(args)
    model = _find_model(args)
    start = time.monotonic()
    platform = start_jax()
    from inkling_jax import terminal
    from inkling_jax.llm import load

    with load(
        model,
        weights=args.weights,
        dtype=args.dtype,
        mesh=args.mesh,
        max_context=args.max_context,
        kv_memory=args.kv_memory,
        kernels=args.kernels,
        page_size=args.page_size,
        slots=1,  # one sequence runs at a time
        tokens_per_call=1 if platform == "cpu" else 8,  # where a token takes long, show each as it comes
        quiet=args.quiet,
    ) as llm:
        load_s = time.monotonic() - start
        if args.chat:
            return terminal.converse(llm, params, system=args.system, effort=args.effort, quiet=args.quiet)
        display = terminal.Display(text=not args.json, note=not args.quiet)
        answer = terminal.answer(llm, _prompt(llm, args, source), params, display)
        if args.json:
            print(json.dumps(_record(answer, load_s)))
        if not args.quiet:
            print(f"{answer.statistics()[:-1]}; loaded in {load_s:.1f} s]", file=sys.stderr)
        if answer.error:
            print_error(answer.error)
        return answer.exit_code


def _check(args: argparse.Namespace) -> None:
    """Refuse what cannot work before weights are read, which may take minutes."""
    for name, given in (("--system", args.system), ("--effort", args.effort)):
        if given is not None and (args.raw or args.ids is not None):
            raise InputError(f"{name} belongs to a chat, which {'--raw' if args.raw else '--ids'} is not")
    for name in ("raw", "json"):
        if args.chat and getattr(args, name):
            raise InputError(f"--{name} and --chat exclude each other")
    if args.raw and args.ids is not None:
        raise InputError("--raw is for text, --ids are taken as they are anyway")
    if args.effort is not None:
        from inkling_jax.inputs.messages import parse_effort

        parse_effort(args.effort)


def _find_model(args: argparse.Namespace) -> str:
    """The model's directory or preset, downloaded if need be; refused where it cannot read the text that it is to be given."""
    found = find_source(args.model, args.weights)
    needs = "text" if args.ids is None else "--stop" if args.stop else None
    if needs and isinstance(found, str):
        raise InputError(f"{needs} needs a tokenizer, which the preset {found!r} has not: give token ids, such as --ids 1,2,3")
    # A directory that holds no model at all is for the loader to refuse.
    if needs and (Path(found) / "config.json").is_file() and not (Path(found) / "tokenizer.json").is_file():
        raise InputError(f"{needs} needs a tokenizer, and {found} has no tokenizer.json: give token ids, such as --ids 1,2,3")
    return str(found)


def _read_source(args: argparse.Namespace) -> str | list[int]:
    """The prompt as given: text or token ids ("" for a conversation, which reads its own)."""
    if args.chat:
        return ""
    if args.ids is not None:
        return _parse_ids(args.ids)
    name, text = "--prompt", args.prompt
    if text is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("no prompt: give --prompt TEXT or --chat, or pipe a text into standard input")
        name, text = "standard input", sys.stdin.read().removesuffix("\n")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name} is not text in UTF-8 at character {error.start}") from None
    if not text:
        raise InputError(f"the prompt is empty ({name}): give at least one character")
    return text


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in re.split(r"[,\s]+", text.strip(", \t\n"))]
    except ValueError:
        raise InputError(f"--ids {text!r}: expected token ids separated by commas, such as 1,2,3") from None


def _sampling(args: argparse.Namespace) -> SamplingParams:
    from inkling_jax.engine.request import SamplingParams

    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos")
    try:
        return SamplingParams(**{name: getattr(args, name) for name in names})
    except InputError as error:
        raise InputError(re.sub(r"SamplingParams\.(\w+)", lambda field: "--" + field[1].replace("_", "-"), str(error))) from None


def _prompt(llm: LLM, args: argparse.Namespace, source: str | list[int]) -> Prompt:
    from inkling_jax.inputs.prompt import Prompt

    if not isinstance(source, str):
        return Prompt(source)
    if args.raw:
        assert llm.tokenizer is not None, "checked before the model was loaded"
        return Prompt(llm.tokenizer.encode(source))
    system = [{"role": "system", "content": args.system}] if args.system else []
    return llm.chat_prompt([*system, {"role": "user", "content": source}], effort=args.effort)


def _record(answer: Answer, load_s: float) -> dict[str, Any]:
    """The object that --json prints."""
    record: dict[str, Any] = {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "usage": {"prompt_tokens": answer.prompt_tokens, "completion_tokens": len(answer.token_ids)},
        "timings": {
            "load_s": round(load_s, 3),
            "first_token_s": round(answer.first_token_s, 3),
            "compile_s": round(answer.compile_s, 3),
            "decode_s": round(answer.decode_s, 3),
            "decode_tokens_per_s": answer.tokens_per_second and round(answer.tokens_per_second, 2),
        },
    }
    return record | ({"error": answer.error} if answer.error else {})


if __name__ == "__main__":
    sys.exit(main())
