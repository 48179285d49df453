"""Write the tables of docs/benchmarks.md from the rows in bench/results, or check that they agree.

    python scripts/make_tables.py            # after a benchmark has written its rows
    python scripts/make_tables.py --check    # changes nothing; an error where a table and its rows differ

A table stands between `<!-- table: NAME WORD ... -->` and `<!-- end -->`: the rows of bench/results/NAME.json whose case begins
with the words. Every row must be in some table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from documents import write_or_check

from inkling_jax.benchmarks.rows import Row, read_rows
from inkling_jax.command_line import run
from inkling_jax.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- table: (?P<name>\w+)(?P<words>[^>]*) -->\n).*?(<!-- end -->)", re.DOTALL)
SHARE = "bound / time"  # where a table has this column, the line above it names the ceiling
WHO = "implementation"  # where a table has this column, implementations stand side by side
# Rows that agree in these, and under a bound in its ceiling, share a table and the line above it.
RUN, CEILING = ("device", "devices", "date", "jax"), ("ceiling", "ceiling_gbs")

Column = tuple[str, Callable[[Row], str]]


def _number(field: str, digits: int = 0, scale: float = 1.0) -> Callable[[Row], str]:
    """A field in other units, with `digits` decimals; a dash where the row has none."""
    return lambda row: "-" if row.get(field) is None else f"{row[field] * scale:,.{digits}f}"


def _percent(field: str) -> Callable[[Row], str]:
    return lambda row: f"{row[field]:.1%}"


def _error(field: str) -> Callable[[Row], str]:
    return lambda row: f"{row[field]:.1e}"


COLUMNS: dict[str, list[Column]] = {
    "step": [
        ("batch", _number("batch")),
        ("context", _number("context")),
        ("ms a step", _number("time_us", 2, 1e-3)),
        ("bound ms", _number("bound_us", 2, 1e-3)),
        (SHARE, _percent("ratio")),
        ("kernels run ms", _number("busy_us", 2, 1e-3)),
        ("kernels launched", _number("launches")),
        ("GB to read", _number("bytes", 2, 1e-9)),
        ("of experts", _number("expert_bytes", 2, 1e-9)),
        ("of KV cache", _number("kv_bytes", 2, 1e-9)),
        ("experts a layer", _number("experts", 1)),
    ],
    "serve": [
        ("at once", _number("concurrency")),
        ("context", _number("context")),
        ("ms a step", _number("time_us", 2, 1e-3)),
        ("bound ms", _number("bound_us", 2, 1e-3)),
        (SHARE, _percent("ratio")),
        ("waits for the host", _percent("host_share")),
        ("tokens/s, decoding", _number("decode_tokens_per_s")),
        ("answered/s, traffic", _number("requests_per_s", 1)),
        ("tokens/s, traffic", _number("output_tokens_per_s")),
        *((f"first token ms, p{p}", _number(f"ttft_p{p}_ms")) for p in (50, 90, 99)),
        *((f"ms a token, p{p}", _number(f"tpot_p{p}_ms", 1)) for p in (50, 90, 99)),
    ],
    "paged_attention": [
        ("case", lambda row: f"`{row['case']}`"),
        ("us a layer", _number("time_us", 1)),
        ("bound us", _number("bound_us", 1)),
        (SHARE, _percent("ratio")),
        ("plan us a step", _number("plan_us", 1)),
    ],
    "expert_matmul": [
        ("case", lambda row: f"`{row['case']}`"),
        ("us a call", _number("time_us", 1)),
        ("kernels run us", _number("kernels_us", 1)),
        ("bound us", _number("bound_us", 1)),
        (SHARE, _percent("ratio")),
        ("error", _error("rel_err")),
    ],
    "compare_transformers": [
        ("batch", _number("batch")),
        (WHO, lambda row: row["kernels"] if row["bench"].endswith("_rival") else f"inkling_jax, {row['kernels']}"),
        ("tokens/s", _number("tokens_per_s", 1)),
        ("ms a step", _number("time_us", 2, 1e-3)),
        ("bound ms", _number("bound_us", 2, 1e-3)),
        (SHARE, _percent("ratio")),
        ("bfloat16 logits", _error("rel_err")),
    ],
    "towers": [
        ("case", lambda row: row["case"]),
        ("items/s", _number("items_per_s", 1)),
        ("ms a call", _number("time_us", 2, 1e-3)),
        ("bound ms", _number("bound_us", 2, 1e-3)),
        (SHARE, _percent("ratio")),
        ("error", _error("rel_err")),
    ],
    "nano_transformers": [
        ("case", lambda row: row["case"]),
        ("logits", _error("rel_err")),
        ("worst", lambda row: max(row["rel_err_by_task"], key=row["rel_err_by_task"].get)),
        ("Transformers", lambda row: row["transformers"]),
    ],
    "load": [
        ("case", lambda row: row["case"]),
        ("GB", _number("bytes", 2, 1e-9)),
        ("loaded in s", _number("time_us", 2, 1e-6)),
        ("GB/s", _number("gbs", 2)),
        ("the files alone, GB/s", lambda row: f"{row['ceiling_gbs']:.2f} ({row['ceiling']})"),
        ("of that", _percent("ratio")),
        ("first token after s", _number("first_token_s", 2)),
        ("of which compiling", _number("compile_s", 2)),
        ("converted in s", _number("convert_s", 1)),
    ],
    "memory": [
        ("case", lambda row: row["case"]),
        ("planned GB", _number("planned_bytes", 3, 1e-9)),
        ("of it a step", _number("planned_step_bytes", 3, 1e-9)),
        ("taken GB", _number("peak_bytes", 3, 1e-9)),
        ("compiler's GB", _number("compiled_bytes", 3, 1e-9)),
        ("planned / taken - 1", lambda row: f"{row['error']:+.1%}"),
        ("ms a chunk", _number("time_us", 1, 1e-3)),
    ],
    "oracle": [
        ("case", lambda row: row["case"]),
        ("logits", _error("rel_err")),
        ("logits, median token", _error("rel_err_median_token")),
        ("hidden, worst layer", _error("rel_err_hidden")),
        ("routing weights", _error("rel_err_routing")),
        ("routed otherwise", _percent("routed_otherwise")),
    ],
    "parity": [
        ("case", lambda row: row["case"]),
        ("tokens in chunks", _number("chunks_tokens")),
        ("otherwise", _number("chunks_otherwise")),
        ("clear", _number("chunks_clear")),
        ("clear, otherwise", _number("chunks_clear_otherwise")),
        ("tokens decoded", _number("decoded_tokens")),
        ("otherwise", _number("decoded_otherwise")),
        ("clear", _number("decoded_clear")),
        ("clear, otherwise", _number("decoded_clear_otherwise")),
    ],
}


def tables(name: str, rows: Sequence[Row]) -> str:
    """Rows in Markdown: for each run a line that says where, when and against what, then a table."""
    columns = COLUMNS[name]
    headings = [heading for heading, _ in columns]
    bounded, apart = SHARE in headings, WHO not in headings
    fields = (*RUN, *(("kernels",) if apart else ()), *(CEILING if bounded else ()))
    runs: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        runs.setdefault(tuple(row.get(field) for field in fields), []).append(row)
    lines = []
    for together in runs.values():
        first = together[0]
        who = f", implementation: {first['kernels']}" if apart else ""
        ceiling = f"; read ceiling {first['ceiling_gbs']:,.0f} GB/s ({first['ceiling']})" if bounded else ""
        lines += [
            "",
            f"{first['devices']} x {first['device']}, {first['date']}, jax {first['jax']}{who}{ceiling}",
            "",
            "| " + " | ".join(headings) + " |",
            "|" + "---|" * len(headings),
            *("| " + " | ".join(cell(row) for _, cell in columns) + " |" for row in together),
        ]
    return "\n".join([*lines, "", ""])


def fill(text: str, results: Path) -> str:
    """The document with its tables made from the files in `results`.

    Raises InputError for a table without rows, and for rows without a table.
    """
    files = {path.stem: read_rows(path) for path in sorted(results.glob("*.json"))}
    shown: set[tuple[str, int]] = set()

    def block(match: re.Match[str]) -> str:
        name, words = match["name"], match["words"].strip()
        if name not in COLUMNS:
            raise InputError(f"table {name!r}: its columns are not known, COLUMNS of this script names {', '.join(COLUMNS)}")
        chosen = [i for i, row in enumerate(files.get(name, [])) if f"{row['case']} ".startswith(f"{words} ".lstrip())]
        if not chosen:
            raise InputError(f"table {name} {words!r}: no row of {results / name}.json begins so")
        shown.update((name, i) for i in chosen)
        return match[1] + tables(name, [files[name][i] for i in chosen]) + match[4]

    text = BLOCK.sub(block, text)
    for name, rows in files.items():
        for i, row in enumerate(rows):
            if (name, i) not in shown:
                raise InputError(f"{results / name}.json: no table holds the row {row['case']!r}")
    return text


def main(argv: Sequence[str] | None = None, document: Path = ROOT / "docs/benchmarks.md", results: Path | None = None) -> int:
    """Write the tables, or with --check compare them; 0 where all is well."""
    folder = results or ROOT / "bench/results"
    return write_or_check("make_tables.py", __doc__ or "", argv, document, lambda text: fill(text, folder))


if __name__ == "__main__":
    sys.exit(run(main))
