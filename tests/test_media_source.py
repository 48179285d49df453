"""What a media item may be given as, and what each wrong one is told."""

from __future__ import annotations

import base64
import errno
import os
from pathlib import Path

import pytest

from inkling_jax.errors import InputError
from inkling_jax.inputs.media_source import find_media


@pytest.fixture
def file(tmp_path) -> Path:
    """A file whose name needs percent-encoding in a URL."""
    path = tmp_path / "a b#1?é%41.bin"
    path.write_bytes(b"abc")
    return path


def test_paths_and_file_urls(file, monkeypatch):
    """A string, a Path, a relative path and both spellings of a file URL name the same file."""
    assert find_media(str(file), "audio 1") == file
    assert find_media(file, "audio 1") == file
    assert find_media(file.as_uri(), "audio 1") == file
    assert find_media(file.as_uri().replace("file://", "FILE://localhost"), "audio 1") == file
    monkeypatch.chdir(file.parent)
    assert find_media(file.name, "audio 1") == Path(file.name)


def test_bytes_and_data_urls():
    """Bytes-like objects are taken as they are; base64 with any type, percent-encoded, in lines or neither, is decoded."""
    data = bytes(range(256))
    text = base64.b64encode(data).decode()
    for source in (data, bytearray(data), memoryview(data)):
        assert find_media(source, "image 1") == data
    for head in ("data:;base64,", "data:audio/wav;base64,", "DATA:text/plain;charset=utf-8;BASE64,"):
        assert find_media(head + text, "image 1") == data
    assert find_media("data:;base64," + text.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D"), "image 1") == data
    assert find_media("data:;base64," + base64.encodebytes(data).decode(), "image 1") == data


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("", "is an empty string"),
        ("   ", "is an empty string"),
        (b"", "has no bytes"),
        ("data:audio/wav;base64,", "has no bytes"),
        ("http://host/a.wav", "http://host/a.wav is not fetched: download it"),
        ("HTTPS://host/a.wav", "is not fetched: download it"),
        ("s3://bucket/a.wav", "is not fetched"),
        ("file://other/a.wav", "another host (other)"),
        ("file://[/a.wav", "is no file:// URL"),
        ("data:audio/wav,abc", "is no data: URL with base64"),
        ("data:audio/wav;base64", "is no data: URL with base64"),
        ("data:audio/wav;base64,a b=", "base64 of data:audio/wav;base64,a b= is broken"),
        ("data:audio/wav;base64,aé==", "is broken"),
        ("data:audio/wav;base64,YWJ", "is broken: Incorrect padding"),
        ("nowhere/a.wav", "nowhere/a.wav: no such file"),
        ("file:///nowhere/a.wav", "/nowhere/a.wav: no such file"),
        ("a\0.wav", "is no path"),
        ("a" * 5000, "no such file (the name is too long)"),
        (Path("."), "is a directory"),
        ("/dev/zero", "is not a regular file"),
        (7, "is a int; a path"),
        (None, "is a NoneType; a path"),
    ],
)
def test_what_is_refused(source, told):
    """Each refusal names the item and what is wrong, in a message of bounded length."""
    with pytest.raises(InputError) as caught:
        find_media(source, "audio 2")
    assert str(caught.value).startswith("audio 2") and told in str(caught.value)
    assert len(str(caught.value)) < 400


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    """An empty file and one without permission are the input's fault; too many open files is not."""
    empty = tmp_path / "empty.wav"
    empty.touch()
    with pytest.raises(InputError, match=r"audio 2: .*empty.wav is empty \(0 bytes\)"):
        find_media(empty, "audio 2")
    empty.write_bytes(b"x")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(InputError, match="may not be read"):
        find_media(empty, "audio 2")

    def crowded(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "stat", crowded)
    with pytest.raises(OSError, match="Too many open files"):
        find_media("a.wav", "audio 2")
