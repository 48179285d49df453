"""The options of `python -m inkling_jax.generate`, and its examples. Light to import: `--help` must not wait for jax."""

from __future__ import annotations

import argparse
import functools
import re

from inkling_jax.command_line import EXIT_CODES, Parser, add_kernels_option, add_kv_dtype_option, add_message_options
from inkling_jax.sources import own_model

MAX_TOKENS = 512
OWN = "a small invented world, sums, drawn shapes and tones"  # of the package's own model
SLOTS = 32

BATCH = """\
Each line of --input ("-": standard input) is a request: {"id": ..., "prompt": TEXT or [ids]} or
{"id": ..., "messages": [...]}, with "tools", "effort" and sampling settings such as "max_tokens"
beside it, or a line of an OpenAI batch file ({"custom_id", "url", "body"}). Media are paths,
file:// or data: URLs. What a line does not say is as the options say; one without a seed gets it
from --seed (here 0 by default) and its id. "priority" (-100 to 100, else 0): lines of the highest
are taken first. "deadline" (seconds after a line's turn has come): what has not ended then is an
error. Each line leads to one line of --output with its id (or its number, where it has none) and
the answer, or an "error". Lines that have theirs are not run
again: after Ctrl-C, SIGTERM or a crash the same command goes on."""

EXAMPLES = f"""\
examples:
  # one turn of a chat, streamed as it is made
  python -m inkling_jax.generate --model ./Inkling-Small-NVFP4 --prompt "Why is the sky blue?" --effort low

  # what is seen and heard; what the model thinks before it answers
  python -m inkling_jax.generate --model ./ckpt --image cat.jpg --image dog.png --prompt "Which is larger?" --show-thinking
  python -m inkling_jax.generate --model ./ckpt --audio talk.mp3 --prompt "Summarise it."

  # tools that it may call (a JSON list in the OpenAI shape): its calls are in "tool_calls"
  python -m inkling_jax.generate --model ./ckpt --tools tools.json --prompt "Is it cold in Oslo?" --json

  # plain continuation of a text that comes through a pipe, always the likeliest token
  echo "The capital of France is" | python -m inkling_jax.generate --model ./ckpt --raw --temperature 0 --max-tokens 16

  # a conversation; in it, /help lists the commands, such as /image PATH
  python -m inkling_jax.generate --model ./ckpt --chat --system "Answer in one sentence."

  # for another program: one JSON object and nothing else
  python -m inkling_jax.generate --model ./ckpt --prompt "Name a prime." --seed 7 --json --quiet

  # a file of requests, a JSON object a line; the same command goes on where it was stopped
  python -m inkling_jax.generate --model ./ckpt --input in.jsonl --output out.jsonl --slots 64 --max-tokens 1000

  # eight GPUs; a checkpoint without a tokenizer; a released shape without its files
  python -m inkling_jax.generate --model ./ckpt --mesh tensor=8 --prompt "Hello"
  python -m inkling_jax.generate --model ./ckpt --ids 1,2,3
  python -m inkling_jax.generate --model inkling-small --weights random --mesh tensor=8 --ids 1,2,3 --max-context 4096

{EXIT_CODES} (143 by SIGTERM);
of a batch 0 when every line has its record
"""


def make_parser() -> Parser:
    """The parser of the command line."""
    parser = Parser(
        prog="python -m inkling_jax.generate",
        description="Generate text with an Inkling model: the text on standard output as it is made, all else on standard error.",
        epilog=EXAMPLES,
    )
    _add_prompt_options(parser)
    _add_batch_options(parser)
    _add_sampling_options(parser)
    _add_model_options(parser)
    _add_process_options(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--show-thinking",
        action=argparse.BooleanOptionalAction,
        help="show what the model thinks, on standard error, dimmed at a terminal (default: in a conversation at a terminal)",
    )
    output.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object at the end instead: text, token_ids, finish_reason, usage, timings (seconds); of a chat also"
        " reasoning, content (the same as text), tool_calls, malformed_calls",
    )
    add_message_options(parser)
    return parser


def _add_prompt_options(parser: Parser) -> None:
    group = parser.add_argument_group(
        "prompt", "Without --prompt, --ids, --input or --chat it is read from standard input, less one last newline."
    )
    source = group.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="what the user says: one turn of a chat")
    source.add_argument("--ids", metavar="1,2,3", help="token ids, taken as they are; without a tokenizer ids are printed too")
    source.add_argument("--input", metavar="F.jsonl", help="a file of requests, for whose results --output is: see batch")
    source.add_argument("--chat", action="store_true", help="hold a conversation: each line read is a turn, until the input ends")
    group.add_argument("--raw", action="store_true", help="take the text as it is, not as a turn of a chat")
    group.add_argument("--system", metavar="TEXT", help="system message of the chat")
    for kind, text in (
        ("image", "picture before what the user says first: a file, or a file:// or data: URL; may be given more than once"),
        ("audio", "sound, likewise"),
        ("video", "video, likewise: the model sees frames of it"),
    ):
        read = functools.partial(_of_kind, kind)
        group.add_argument(f"--{kind}", action="append", default=[], dest="media", metavar="F", type=read, help=text)
    group.add_argument("--tools", metavar="FILE", help="tools that the model may call: a JSON list in the OpenAI shape")
    group.add_argument(
        "--effort", metavar="E", help="thinking effort: none, minimal, low, medium, high, xhigh, or 0 to 0.99 (default 0.9)"
    )


def _add_batch_options(parser: Parser) -> None:
    group = parser.add_argument_group("batch", BATCH)
    group.add_argument(
        "--output", metavar="F.jsonl", help="where the results go, a JSON object a line, in the order that they end"
    )
    group.add_argument(
        "--slots", type=int, default=SLOTS, metavar="N", help="requests that run at once, a replica (default %(default)s)"
    )
    group.add_argument(
        "--shard",
        type=_shard,
        default=(0, 1),
        metavar="I/N",
        help="run only each N-th line, from line I + 1 on, I being 0 to N - 1: N hosts share a file, each with its own --output;"
        " what they write is the whole when put together with cat",
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
    names, own = "checkpoint directory, preset (inkling, inkling-small) or hub id", own_model()
    about = f"{names}; {own}, the default: the package's own, of 6.7 million parameters, which knows {OWN}" if own else names
    group.add_argument("--model", required=own is None, default=own, metavar="M", help=about)
    group.add_argument(
        "--weights", choices=("checkpoint", "random"), default="checkpoint", help="random: the shape alone, for trials"
    )
    group.add_argument("--dtype", choices=("bfloat16", "float32"), help="to compute in (default: the checkpoint's)")
    group.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help="devices to spread over, such as tensor=8 or data=2,tensor=4, or auto: all here (default: one device)",
    )
    group.add_argument(
        "--experts-over", choices=("data",), help="spread the experts over the replicas of data=N as well (default: within each)"
    )
    group.add_argument(
        "--max-context", type=int, metavar="N", help="longest prompt and answer in tokens (default: what memory holds)"
    )
    add_kv_dtype_option(group)
    group.add_argument("--kv-memory", metavar="SIZE", help="cache on each device, such as 40GB (default: what is left)")
    group.add_argument(
        "--prefix-memory",
        default="1GB",
        metavar="SIZE",
        help="host memory for beginnings of prompts that others may share; 0: each prompt is read in full (default %(default)s)",
    )
    group.add_argument(
        "--page-size", type=int, default=64, metavar="N", help="tokens a cache page, a power of two (default %(default)s)"
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="what an answer is does not depend on what runs beside it, to the bit: slower, and each prompt is read in full",
    )
    add_kernels_option(group)


def _add_process_options(parser: Parser) -> None:
    group = parser.add_argument_group(
        "several processes",
        "Each runs the same command, and the first prints. srun and mpirun (Open MPI) say which is which without options.",
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where the first process waits for the others")
    group.add_argument("--num-processes", type=int, metavar="N", help="how many there are")
    group.add_argument("--process-id", type=int, metavar="I", help="which of them this is, from 0 to N - 1")


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    index, count = map(int, found.groups()) if found else (0, 0)
    if index >= count:
        raise argparse.ArgumentTypeError(f"{text!r} is no part of a whole: 0/4 to 3/4 are the four of one")
    return index, count


def _of_kind(kind: str, source: str) -> tuple[str, str]:
    return kind, source
