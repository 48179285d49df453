"""Pack the reference answers that the tests compare with into tests/data, one archive a checkpoint.

    python scripts/pack_test_data.py SRC [--fmt nvfp4|bf16] [--preset tiny ...] [--out tests/data]

SRC holds, for each preset, PRESET/FMT (a checkpoint directory in the published layout) and PRESET/expected-FMT.safetensors, and
beside them chat.json. The same sources give the same bytes. tests/data/README.md says what is left out of which archive.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import lzma
import shutil
import struct
import tarfile
from pathlib import Path
from typing import Any

# Two-byte values dominate: telling xz so (lp=1, pb=1) saves 6% over its defaults. Preset 6 is as small as 9 here.
XZ_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1}]


@dataclasses.dataclass(frozen=True)
class Trim:
    """What one preset's archive leaves out."""

    tensors: tuple[str, ...] = ()  # prefixes of checkpoint tensors
    sections: tuple[str, ...] = ()  # of config.json: a section stays only while its tensors do
    expected: tuple[str, ...] = ()  # prefixes of expected tensors


TRIMS = {
    "tiny": Trim(),
    "wide": Trim(("model.audio.", "model.visual."), ("audio_config", "vision_config"), ("audio", "image")),
    "gpu": Trim(
        ("model.audio.", "model.visual.", "model.mtp."),
        ("audio_config", "vision_config", "mtp_config"),
        ("audio", "image", "len33.draft.", "len255."),
    ),
}


def trim_safetensors(data: bytes, prefixes: tuple[str, ...]) -> bytes | None:
    """The same file without tensors whose names start with one of `prefixes`; None when nothing would be left."""
    (header_size,) = struct.unpack("<Q", data[:8])
    header: dict[str, Any] = json.loads(data[8 : 8 + header_size])
    body = data[8 + header_size :]
    metadata = header.pop("__metadata__", None)
    kept = {name: entry for name, entry in header.items() if not name.startswith(prefixes)}
    if not kept:
        return None
    if len(kept) == len(header):
        return data
    chunks: list[bytes] = []
    offset = 0
    new_header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    for name, entry in sorted(kept.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        chunks.append(body[begin:end])
        new_header[name] = {**entry, "data_offsets": [offset, offset + end - begin]}
        offset += end - begin
    text = json.dumps(new_header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format asks for the tensor bytes to start at a multiple of 8
    return struct.pack("<Q", len(text)) + text + b"".join(chunks)


def trim_checkpoint(directory: Path, trim: Trim) -> dict[str, bytes]:
    """Files of the checkpoint `directory` by name, with what `trim` names left out of shards, index and config.json."""
    files: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    for path in sorted(directory.iterdir()):
        data: bytes | None = path.read_bytes()
        if path.suffix == ".safetensors" and trim.tensors:
            data = trim_safetensors(data, trim.tensors)
            if data is not None:
                sizes[path.name] = len(data) - 8 - struct.unpack("<Q", data[:8])[0]
        if data is not None:
            files[path.name] = data
    if trim.tensors:
        index = json.loads(files["model.safetensors.index.json"])
        index["metadata"]["total_size"] = sum(sizes.values())
        index["weight_map"] = {k: v for k, v in index["weight_map"].items() if not k.startswith(trim.tensors)}
        config = {k: v for k, v in json.loads(files["config.json"]).items() if k not in trim.sections}
        files["model.safetensors.index.json"] = json.dumps(index, indent=1).encode()
        files["config.json"] = json.dumps(config, indent=1).encode()
    return files


def write_archive(path: Path, files: dict[str, bytes]) -> None:
    """Write a .tar.xz whose bytes depend on nothing but names and contents (no times, owners or order of a disk)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(files):
            info = tarfile.TarInfo(name)
            info.size = len(files[name])
            info.mode = 0o644
            tar.addfile(info, io.BytesIO(files[name]))
    path.write_bytes(lzma.compress(buffer.getvalue(), format=lzma.FORMAT_XZ, filters=XZ_FILTERS))


def pack(source: Path, preset: str, fmt: str, out: Path) -> None:
    """Write OUT/PRESET-FMT.tar.xz: FMT/* is the checkpoint, beside it every expected*.safetensors of that format."""
    trim = TRIMS[preset]
    folder = source / preset
    files = {f"{fmt}/{name}": data for name, data in trim_checkpoint(folder / fmt, trim).items()}
    for path in sorted(folder.glob("expected-*.safetensors")):
        if path.stem == f"expected-{fmt}" or path.stem == "expected-tower":
            data = path.read_bytes()
            kept = trim_safetensors(data, trim.expected) if trim.expected else data
            if kept is not None:
                files[path.name] = kept
    target = out / f"{preset}-{fmt}.tar.xz"
    write_archive(target, files)
    print(f"{target}: {len(files)} files, {target.stat().st_size / 1e6:.2f} MB")


def main() -> None:
    """Read the command line and pack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("--fmt", choices=["nvfp4", "bf16"], default="nvfp4")
    parser.add_argument("--preset", choices=list(TRIMS), nargs="+", default=list(TRIMS))
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "tests" / "data")
    args = parser.parse_args()
    if not args.source.is_dir():
        parser.error(f"{args.source}: no such directory")
    for preset in args.preset:
        if not (args.source / preset / args.fmt).is_dir():
            parser.error(f"{args.source / preset / args.fmt}: no such directory")
        pack(args.source, preset, args.fmt, args.out)
    shutil.copyfile(args.source / "chat.json", args.out / "chat.json")


if __name__ == "__main__":
    main()
