"""What there is to run on, and whether it works: `python -m inkling_jax.doctor`. Kernels are tried in a process of their own."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from inkling_jax.command_line import FAILED, OK, Parser, add_message_options, run, set_up_messages, start_jax

TIME_LIMIT_S = 300  # of all kernels' checks together, compiling included
COPY_BYTES = 1 << 28  # between two devices
PACKAGES = ("inkling_jax", "jax", "jaxlib", "flax", "numpy", "tokenizers", "jax-cuda13-plugin", "jax-cuda12-plugin")

EXAMPLES = """\
examples:
  python -m inkling_jax.doctor
  python -m inkling_jax.doctor --json --quiet

exit codes: 0 healthy, 1 a check failed, 2 no device, 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    args = _parser().parse_args(argv)
    return run(lambda: _examine(args))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m inkling_jax.doctor",
        description="Report versions, devices, links, where compiled programs are kept, and whether each kernel is right.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    add_message_options(parser)
    return parser


def _examine(args: argparse.Namespace) -> int:
    set_up_messages(args.verbose, args.quiet)
    checks = run_checks()  # first: this process would take the memory of a GPU
    report: dict[str, Any] = {"platform": start_jax()}
    report |= {"versions": versions(), "devices": devices(), "links": _guarded(links), "kernels": _guarded(kernels)}
    report |= {"compilation_cache": compilation_cache(), "checks": checks}
    report["healthy"] = bool(checks) and all(check["ok"] for check in checks)
    if args.json:
        print(json.dumps(report))
    else:
        _print_report(report)
    return OK if report["healthy"] else FAILED


def versions() -> dict[str, str | None]:
    """Of Python, and of the packages that matter; None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def devices() -> list[dict[str, Any]]:
    """Each device with its memory in bytes: what jax may use, and how much is taken. A CPU has the machine's."""
    import jax

    from inkling_jax.memory import memory_of

    found = []
    for device in jax.devices():
        limit, taken = memory_of(device, len(jax.devices()))
        found.append(
            {"id": device.id, "kind": device.device_kind, "process": device.process_index, "memory": limit, "taken": taken}
        )
    return found


def links() -> list[dict[str, Any]]:
    """GB/s of a copy from the first GPU of this process to each other one; empty where there is none."""
    import jax
    import jax.numpy as jnp

    first, *others = (device for device in jax.local_devices())
    if first.platform != "gpu":
        return []
    data = jax.block_until_ready(jnp.zeros(COPY_BYTES, jnp.uint8, device=first))
    found = []
    for other in others:
        seconds = []
        for _ in range(4):  # the first sets up the way
            start = time.monotonic()
            jax.block_until_ready(jax.device_put(data, other))
            seconds.append(time.monotonic() - start)
        found.append({"from": first.id, "to": other.id, "gb_per_s": round(COPY_BYTES / min(seconds) / 1e9, 1)})
    return found


def kernels() -> dict[str, str | None]:
    """Why those for Hopper do not run here; None where they do."""
    from inkling_jax.self_check import refused

    return {"sm90_refused": refused()}


def compilation_cache() -> dict[str, Any]:
    """Where compiled programs are kept, how many they are and how large; no place where it cannot be written."""
    import jax

    place = jax.config.jax_compilation_cache_dir
    files = [file for file in Path(place).rglob("*") if file.is_file()] if place else []
    return {"place": place, "files": len(files), "bytes": sum(file.stat().st_size for file in files)}


def run_checks(command: Sequence[str] = ("-m", "inkling_jax.self_check"), limit_s: float = TIME_LIMIT_S) -> list[dict[str, Any]]:
    """Results of the kernels' checks. One that ends the process, or does not end, is a failure, and the last."""
    root = Path(__file__).resolve().parents[1]
    try:
        done = subprocess.run([sys.executable, *command], capture_output=True, timeout=limit_s, cwd=root, check=False)
        out, how = done.stdout, f"the process ended with exit code {done.returncode}: {_last_line(done.stderr)}"
        ended_well = done.returncode == 0
    except subprocess.TimeoutExpired as expired:
        out, how, ended_well = expired.stdout or b"", f"not done after {limit_s:g} s", False
    lines = [json.loads(line) for line in out.decode().splitlines()]
    found = [line for line in lines if "begins" not in line]
    if not ended_well:
        last = lines[-1] if lines else {}
        kernel, implementation = last.get("begins", ("start", "none"))
        found.append({"kernel": kernel, "implementation": implementation, "case": "", "failure": how, "ok": False})
    return found


def _last_line(text: bytes) -> str:
    return next(reversed(text.decode(errors="replace").strip().splitlines()), "")


def _guarded(look: Callable[[], Any]) -> Any:
    """What `look` finds, or what it raised: a report is for machines where something is wrong."""
    try:
        return look()
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}"}


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from inkling_jax.convert.progress import size_text

    rows: list[tuple[str, str, str]] = []
    rows += [(name, "version", version or "not installed") for name, version in report["versions"].items()]
    for device in report["devices"]:
        memory = f"{size_text(device['memory'])} of memory for jax, {size_text(device['taken'])} taken"
        rows.append((f"device {device['id']}", device["kind"], memory))
    rows += _link_rows(report["links"])
    refused = report["kernels"].get("failure") or report["kernels"]["sm90_refused"]
    rows.append(("kernels for Hopper", "do not run" if refused else "run", refused or "--kernels sm90 asks for them"))
    cache = report["compilation_cache"]
    kept = f"{cache['place']}: {cache['files']} files, {size_text(cache['bytes'])}" if cache["place"] else "nowhere"
    rows.append(("compiled programs", "kept", kept))
    for check in report["checks"]:
        told = check["failure"] or f"relative error {check['error']:.1e}, at most {check['allowed']:.0e} allowed; {check['case']}"
        rows.append((f"{check['kernel']}, {check['implementation']}", "ok" if check["ok"] else "WRONG", told))
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, state, what in rows:
        table.add_row(name, state, what)
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)
    print("healthy" if report["healthy"] else "not healthy: see the lines marked WRONG")


def _link_rows(found: Any) -> list[tuple[str, str, str]]:
    if isinstance(found, dict):
        return [("links", "unknown", found["failure"])]
    if not found:
        return [("links", "none", "there are no two GPUs in this process")]
    return [(f"link {link['from']} to {link['to']}", "copies", f"{link['gb_per_s']} GB/s") for link in found]


if __name__ == "__main__":
    sys.exit(main())
