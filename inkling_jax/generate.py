"""Generate text from the command line: `python -m inkling_jax.generate`. One prompt, standard input,
a conversation, or a file of requests.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inkling_jax.command_line import is_terminal, print_error, run, set_up_messages, start_jax
from inkling_jax.config import PRESETS
from inkling_jax.errors import InputError
from inkling_jax.generate_options import SLOTS, make_parser
from inkling_jax.processes import Place, find_place, join, leave, only_first_speaks, together
from inkling_jax.sources import find_source

if TYPE_CHECKING:
    from inkling_jax.engine.request import SamplingParams
    from inkling_jax.inputs.prompt import Prompt
    from inkling_jax.llm import LLM
    from inkling_jax.terminal import Answer


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    args = make_parser().parse_args(argv)
    return leave(run(lambda: _generate(args)))


def _generate(args: argparse.Namespace) -> int:
    set_up_messages(args.verbose, args.quiet)
    place = find_place(args.coordinator, args.num_processes, args.process_id)
    _check_alone(args, place)
    if args.input is not None or args.output is not None:
        return _run_batch(args, place)
    _check(args)
    params = _sampling(args)
    source = _read_source(args)
    model = _find_model(args)
    start = time.monotonic()
    if place is not None:
        join(place)
    platform = start_jax()
    attachments = _attachments(args.media, model)
    # one sequence runs at a time; where a token takes long, each is shown as it comes
    tokens_per_call = 1 if platform == "cpu" else 8
    with together(place), _load(args, model, slots=1, tokens_per_call=tokens_per_call) as llm, only_first_speaks(place):
        load_s = time.monotonic() - start
        if args.chat:
            return _converse(llm, args, params, attachments)
        return _answer_once(llm, args, params, _prompt(llm, args, source, attachments), load_s)


def _run_batch(args: argparse.Namespace, place: Place | None) -> int:
    _check_batch(args)
    params, model = _sampling(args), _find_model(args)
    from inkling_jax.batch.request import Defaults
    from inkling_jax.batch.run import Batch
    from inkling_jax.batch.survey import Shard
    from inkling_jax.config import ModelConfig

    def load(media: bool) -> LLM:
        # on a CPU programs compile fast, one by one as they are needed
        accelerated = start_jax() != "cpu"
        return _load(args, model, slots=args.slots, tokens_per_call=8, warm_up=accelerated and (media or "text"))

    told = model if model in PRESETS else repr(ModelConfig.from_directory(model))
    defaults = Defaults(dataclasses.replace(params, seed=None), args.effort, args.seed or 0, told)
    name, shard = Path(model).resolve().name, Shard(*args.shard)
    batch = Batch(args.input, args.output, defaults, name, load, args.slots, shard, args.quiet, place)
    if place is not None:
        join(place)
        start_jax()
    with together(place):
        return batch.run()


def _load(args: argparse.Namespace, model: str, *, slots: int, tokens_per_call: int, warm_up: bool | str = False) -> LLM:
    from inkling_jax.llm import load

    return load(
        model,
        weights=args.weights,
        dtype=args.dtype,
        mesh=args.mesh,
        experts_over=args.experts_over,
        max_context=args.max_context,
        kv_memory=args.kv_memory,
        kv_dtype=args.kv_dtype,
        prefix_memory=args.prefix_memory,
        kernels=args.kernels,
        page_size=args.page_size,
        slots=slots,
        tokens_per_call=tokens_per_call,
        deterministic=args.deterministic,
        warm_up=warm_up,
        quiet=args.quiet,
    )


def _converse(llm: LLM, args: argparse.Namespace, params: SamplingParams, attachments: list[dict[str, Any]]) -> int:
    from inkling_jax.chat_loop import ChatLoop

    people = is_terminal(sys.stdin) and is_terminal(sys.stderr)
    return ChatLoop(
        llm,
        params,
        effort=args.effort,
        tools=args.tools,
        show_thinking=people if args.show_thinking is None else args.show_thinking,
        quiet=args.quiet,
        history=_system(args),
        attachments=attachments,
    ).run()


def _answer_once(llm: LLM, args: argparse.Namespace, params: SamplingParams, prompt: Prompt, load_s: float) -> int:
    from inkling_jax import terminal

    display = terminal.Display(text=not args.json, thinking=bool(args.show_thinking), note=not args.quiet)
    answer = terminal.answer(llm, prompt, params, display, first_call=0 if _is_chat(args) else None)
    if args.json:
        print(json.dumps(_record(answer, load_s)))
    if not args.quiet:
        print(f"{answer.statistics()[:-1]}; loaded in {load_s:.1f} s]", file=sys.stderr)
    if answer.error:
        print_error(answer.error)
    return answer.exit_code


def _is_chat(args: argparse.Namespace) -> bool:
    return not args.raw and args.ids is None


def _check_alone(args: argparse.Namespace, place: Place | None) -> None:
    """Refuse what several processes could not do alike."""
    if place is None:
        return
    if args.chat:
        raise InputError("--chat is for one process: several have no standard input in common")
    if args.input == "-" or (args.input is None and args.prompt is None and args.ids is None):
        raise InputError("several processes have no standard input in common: give --prompt TEXT, or a file to --input")


def _check(args: argparse.Namespace) -> None:
    """Refuse what cannot work before weights are read, which may take minutes; read the tools."""
    for name, given in {"--slots": args.slots != SLOTS, "--shard": args.shard != (0, 1)}.items():
        if given:
            raise InputError(f"{name} belongs to --input")
    of_a_chat = {"--system": args.system, "--effort": args.effort, "--tools": args.tools, "--show-thinking": args.show_thinking}
    for name, given in of_a_chat.items():
        if given is not None and not _is_chat(args):
            raise InputError(f"{name} belongs to a chat, which {'--raw' if args.raw else '--ids'} is not")
    for name in ("raw", "json"):
        if args.chat and getattr(args, name):
            raise InputError(f"--{name} and --chat exclude each other")
    if args.raw and args.ids is not None:
        raise InputError("--raw is for text, --ids are taken as they are anyway")
    for kind, source in args.media:
        if not _is_chat(args):
            raise InputError(f"--{kind} belongs to a chat, which {'--raw' if args.raw else '--ids'} is not")
        from inkling_jax.inputs.media_source import find_media

        find_media(source, f"--{kind}")
    if args.effort is not None:
        from inkling_jax.inputs.messages import parse_effort

        parse_effort(args.effort)
    if args.tools is not None:
        args.tools = _read_tools(args.tools)


def _check_batch(args: argparse.Namespace) -> None:
    """Refuse options that do not go with a batch, and those of it that make no sense."""
    for name in ("input", "output"):
        if getattr(args, name) is None:
            raise InputError(f"--input and --output belong together, and --{name} is missing")
    alone = {"--raw": args.raw, "--system": args.system, "--tools": args.tools, "--json": args.json}
    alone |= {f"--{kind}": source for kind, source in args.media} | {"--show-thinking": args.show_thinking}
    for name, given in alone.items():
        if given:
            raise InputError(f"{name} belongs to a single prompt; each line of --input says what it holds")
    if args.slots < 1:
        raise InputError(f"--slots must be at least 1, got {args.slots}")
    if args.effort is not None:
        from inkling_jax.inputs.messages import parse_effort

        parse_effort(args.effort)


def _read_tools(file: str) -> list[dict[str, Any]]:
    """The tools in a file, checked."""
    from inkling_jax.inputs.messages import check_tools

    try:
        tools = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"--tools {file}: {error}") from None
    try:
        return check_tools(tools)
    except InputError as error:
        raise InputError(f"--tools {file}: {error}") from None


def _attachments(media: list[tuple[str, str]], model: str) -> list[dict[str, Any]]:
    """Parts of the first message for the media options: what is broken in them is found before weights are read."""
    if not media:
        return []
    from inkling_jax.chat_loop import attached
    from inkling_jax.config import ModelConfig
    from inkling_jax.inputs.images import ImageConfig
    from inkling_jax.inputs.processor import Processor
    from inkling_jax.inputs.tokenizer import Tokenizer

    config = ModelConfig.from_directory(model)
    towers = frozenset(name for name in ("vision", "audio") if getattr(config, name) is not None)
    processor = Processor(config, Tokenizer.from_directory(model, config), towers, ImageConfig.from_directory(model))
    return attached(processor, media)


def _find_model(args: argparse.Namespace) -> str:
    """The model's directory or preset, downloaded if need be; refused where it cannot read the text that it is to be given."""
    found = find_source(args.model, args.weights)
    needs = None if args.input else "text" if args.ids is None else "--stop" if args.stop else None
    if needs and isinstance(found, str):
        raise InputError(f"{needs} needs a tokenizer, which the preset {found!r} has not: give token ids, such as --ids 1,2,3")
    # A directory that holds no model at all is for the loader to refuse.
    if needs and (Path(found) / "config.json").is_file() and not (Path(found) / "tokenizer.json").is_file():
        raise InputError(f"{needs} needs a tokenizer, and {found} has no tokenizer.json: give token ids, such as --ids 1,2,3")
    return str(found)


def _read_source(args: argparse.Namespace) -> str | list[int]:
    """The prompt as given: text or token ids ("" for a conversation, which reads its own)."""
    if args.chat:
        if sys.stdin is None:
            raise InputError("--chat reads the conversation from standard input, which is closed")
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


def _prompt(llm: LLM, args: argparse.Namespace, source: str | list[int], attachments: list[dict[str, Any]]) -> Prompt:
    from inkling_jax.chat_loop import user_message
    from inkling_jax.inputs.prompt import Prompt

    if not isinstance(source, str):
        return Prompt(source)
    if args.raw:
        assert llm.tokenizer is not None, "checked before the model was loaded"
        return Prompt(llm.tokenizer.encode(source))
    return llm.chat_prompt([*_system(args), user_message(source, attachments)], tools=args.tools, effort=args.effort)


def _system(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [{"role": "system", "content": args.system}] if args.system else []


def _record(answer: Answer, load_s: float) -> dict[str, Any]:
    """The object that --json prints."""
    from inkling_jax.conversation import answer_fields

    record: dict[str, Any] = {
        "text": answer.text,
        **(answer_fields(answer.chat) if answer.chat else {}),
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
