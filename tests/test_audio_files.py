"""Audio items: waves, WAV files by themselves, other files through PyAV, and what each broken one is told."""

from __future__ import annotations

import base64
import builtins
import io
import struct
import wave as standard_wave

import av
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from inkling_jax.config import preset
from inkling_jax.errors import InputError
from inkling_jax.inputs.audio import log_mel, num_rows, quantize, to_bins
from inkling_jax.inputs.audio_source import open_audio

CONFIG = preset("inkling").audio
SUFFIX = bytes.fromhex("000000001000800000aa00389b71")  # of the GUIDs of WAVE_FORMAT_EXTENSIBLE
RNG = np.random.default_rng(0)
STEREO = (0.2 * RNG.standard_normal((5000, 2))).clip(-0.99, 0.99)


def heard(item, **options):
    """Rate and mono samples of an item."""
    with open_audio(item, "audio 1", options.get("max_seconds", 60)) as stream:
        return stream.rate, np.concatenate(list(stream.blocks))


def wav(body, fmt, before=b"", size=None, magic=b"RIFF", after=b""):
    """A WAV file with these samples, "fmt " body, chunks before and after the samples, and told size of the samples."""
    size = len(body) if size is None else size
    chunks = b"WAVE" + before + b"fmt " + struct.pack("<I", len(fmt)) + fmt + b"data" + struct.pack("<I", size) + body + after
    return magic + struct.pack("<I", min(len(chunks), 2**32 - 1)) + chunks


def fmt(tag, channels, rate, width, bits=None):
    """A plain "fmt " body."""
    return struct.pack("<HHIIHH", tag, channels, rate, channels * rate * width, channels * width, bits or 8 * width)


def packed(samples, bits):
    """Samples of full scale 1 as little-endian whole numbers, and those numbers over full scale."""
    whole = np.round(samples * 2 ** (bits - 1)).astype(np.int64)
    if bits == 8:
        return (whole + 128).astype(np.uint8).tobytes(), whole / 128
    data = b"".join(int(v).to_bytes(bits // 8, "little", signed=True) for v in whole.ravel())
    return data, whole / 2 ** (bits - 1)


def encoded(container, codec, rate=44100, seconds=2, layout="stereo", frequency=440):
    """A tone of amplitude 0.3, written by PyAV."""
    file = io.BytesIO()
    tone = (0.3 * np.sin(2 * np.pi * frequency * np.arange(int(rate * seconds)) / rate)).astype(np.float32)
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate, layout=layout, options={"strict": "experimental"})
        channels = stream.codec_context.layout.nb_channels
        frame = av.AudioFrame.from_ndarray(np.stack([tone] * channels), format="fltp", layout=layout)
        frame.sample_rate, frame.pts = rate, 0
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return file.getvalue()


# Waves


def test_waves_of_every_kind():
    """One channel or several, float or as in PCM, numpy or jax, in any memory order."""
    mean = STEREO.mean(axis=1)
    for given in (STEREO, STEREO.astype(np.float32), np.asfortranarray(STEREO), jnp.asarray(STEREO), STEREO.tolist()):
        rate, samples = heard((given, 8000))
        assert rate == 8000 and samples.dtype == np.float32
        np.testing.assert_allclose(samples, mean, atol=1e-6)
    np.testing.assert_allclose(heard((mean, 44100.0))[1], mean, atol=1e-7)
    assert heard((np.array([0, 64, 128, 255], np.uint8), 8000))[1].tolist() == [-1, -0.5, 0, 127 / 128]
    assert heard((np.array([-(2**15), 2**14], np.int16), 8000))[1].tolist() == [-1, 0.5]
    assert heard((np.array([-(2**31), 2**30], np.int32), np.int64(8000)))[1].tolist() == [-1, 0.5]


def test_levels_of_a_wave():
    """At 16 kHz those of the mean of its channels; at another rate those of the same sound, one row for each 50 ms begun."""
    wave = (0.1 * RNG.standard_normal((30000, 3))).astype(np.float32)
    assert np.array_equal(to_bins((wave, 16000), CONFIG), quantize(log_mel(wave.mean(axis=1))))

    def chord(rate):
        time = np.arange(int(0.93 * rate)) / rate
        return sum(0.1 * np.sin(2 * np.pi * f * time + f) for f in range(100, 7000, 150))

    want = to_bins((chord(16000), 16000), CONFIG)
    for rate in (22050, 44100, 48000, 16001):
        got = to_bins((chord(rate), rate), CONFIG)
        assert got.shape == (num_rows(int(0.93 * rate), rate), 80) == (19, 80)
        inner = slice(2, -2)  # the ends are cut off abruptly, which has no one spectrum
        assert np.abs(got[inner, :75] - want[inner, :75]).max() <= 1 and (got[inner, :75] != want[inner, :75]).mean() < 0.01


@pytest.mark.parametrize(
    ("item", "told"),
    [
        ((np.zeros(8), 16000, 1), "is a tuple of 3; (wave, rate)"),
        ((16000, np.zeros(8)), "has a rate of array("),
        ((np.zeros(8), 0), "has a rate of 0; a whole number from 2000 to 384000"),
        ((np.zeros(8), -16000), "has a rate of -16000"),
        ((np.zeros(8), 16000.5), "has a rate of 16000.5"),
        ((np.zeros(8), float("nan")), "has a rate of nan"),
        ((np.zeros(8), True), "has a rate of True"),
        ((np.zeros(8), "16000"), "has a rate of '16000'"),
        ((np.zeros(8), 384001), "has a rate of 384001"),
        ((np.zeros(0), 16000), "is empty: it has no samples"),
        ((np.zeros((0, 2)), 16000), "is empty: it has no samples"),
        ((np.zeros((2, 16000)), 16000), "a wave of shape [2, 16000]; [samples] or [samples, channels]"),
        ((np.zeros((2, 0)), 16000), "a wave of shape [2, 0]"),
        ((np.zeros((2, 2, 2)), 16000), "a wave of shape [2, 2, 2]"),
        ((0.5, 16000), "a wave of shape []"),
        (([[0.0], [0.0, 1.0]], 16000), "a wave that is no array"),
        ((np.zeros(8, np.int64), 16000), "samples of int64; floats, uint8, int16 or int32"),
        ((np.zeros(8, complex), 16000), "samples of complex128"),
        ((np.zeros(8, bool), 16000), "samples of bool"),
        ((np.array(["a"]), 16000), "samples of <U1"),
        ((np.array([0.0, np.nan]), 16000), "has the sample nan at 0.000 s; a finite number"),
        ((np.append(np.zeros(8000), -np.inf), 16000), "has the sample -inf at 0.500 s"),
        ((np.append(np.zeros(600000), np.nan), 16000), "has the sample nan at 37.500 s"),
        ((np.array([0.0, 1e300]), 16000), "has the sample inf at 0.000 s"),
        (
            (np.array([0.0, 32767.0]), 16000),
            "has the sample 32767 at 0.000 s; a finite number would be right, where 1 is full scale",
        ),
        ((np.zeros(16000 * 60 + 1), 16000), "is longer than 60 seconds, which is the limit"),
        ([0.0, 1.0], "is a list; a path"),
        (7, "is a int; a path"),
    ],
)
def test_waves_that_are_none(item, told):
    """Each refusal names the item and what would be right."""
    with pytest.raises(InputError) as caught:
        to_bins(item, CONFIG, "audio 2", max_seconds=60)
    assert str(caught.value).startswith("audio 2 ") and told in str(caught.value)


# WAV files, without PyAV


@pytest.fixture
def without_av(monkeypatch):
    """An installation without the [media] extra."""
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == "av":
            raise ModuleNotFoundError("No module named 'av'", name="av")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)


@pytest.mark.parametrize("channels", [1, 2, 6])
@pytest.mark.parametrize("bits", [8, 16, 24, 32])
def test_wav_of_whole_numbers(bits, channels, tmp_path, without_av):
    """Exactly the numbers stored, from a file that the standard library wrote, as path, URLs and bytes."""
    data, values = packed(np.tile(STEREO, (1, 3))[:, :channels], bits)
    path = tmp_path / "a.wav"
    with standard_wave.open(str(path), "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(bits // 8)
        out.setframerate(22050)
        out.writeframes(data)
    content = path.read_bytes()
    for item in (path, str(path), path.as_uri(), content, "data:audio/wav;base64," + base64.b64encode(content).decode()):
        rate, samples = heard(item)
        assert rate == 22050 and samples.shape == (5000,)
        np.testing.assert_allclose(samples, values.mean(axis=1), atol=2e-7)


@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
def test_wav_of_floats(dtype, without_av):
    rate, samples = heard(wav(STEREO.astype(dtype).tobytes(), fmt(3, 2, 48000, int(dtype[2]))))
    assert rate == 48000
    np.testing.assert_allclose(samples, STEREO.mean(axis=1), atol=1e-7)


def test_wav_of_unusual_writing(without_av):
    """Extensible formats, 20 bits in 24, unknown chunks of odd length, sizes of streams, RF64, half a sample at the end."""
    data, values = packed(STEREO, 24)
    want, plain = values.mean(axis=1), fmt(1, 2, 16000, 3)
    extensible = fmt(0xFFFE, 2, 16000, 3) + struct.pack("<HHIH", 22, 20, 3, 1) + SUFFIX
    note = b"LIST" + struct.pack("<I", 5) + b"abcde\0"
    ds64 = b"ds64" + struct.pack("<IQQQI", 28, len(data) + 200, len(data), 5000, 0)
    for content in (
        wav(data, extensible),
        wav(data, fmt(1, 2, 16000, 3, bits=20)),
        wav(data, plain, before=note),
        wav(data, plain, after=note),
        wav(data, plain, size=0xFFFFFFFF),
        wav(data, plain, size=0x7FFFF000),
        wav(data, plain, before=ds64, size=0xFFFFFFFF, magic=b"RF64", after=note),
        wav(data + b"\1\2\3\4\5", plain),
    ):
        np.testing.assert_allclose(heard(content)[1], want, atol=2e-7)


def test_long_wav_is_read_in_blocks(tmp_path, without_av):
    """Blocks of a megabyte of a longer file give all of it, in order."""
    path = tmp_path / "long.wav"
    values = np.arange(1_500_000) % 30000 - 15000
    path.write_bytes(wav(values.astype("<i2").tobytes(), fmt(1, 1, 48000, 2)))
    with open_audio(path, "audio 1", 60) as stream:
        blocks = list(stream.blocks)
    assert len(blocks) == 3 and np.array_equal(np.concatenate(blocks) * 32768, values)


SOUND = bytes(3200)
PLAIN = fmt(1, 1, 16000, 2)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (wav(SOUND, PLAIN)[:12], "broken WAV file: it has no samples (no data chunk)"),
        (wav(SOUND, PLAIN)[:40], "no data chunk"),
        (wav(SOUND, PLAIN)[:2000], "broken WAV file: it says 3200 bytes of samples and has 1956"),
        (wav(b"", PLAIN), "is empty: it has no samples"),
        (wav(b"\0", PLAIN), "is empty: it has no samples"),
        (wav(SOUND, PLAIN[:14]), "a format of 14 bytes; 16 would be right"),
        (wav(SOUND, fmt(1, 0, 16000, 2)), "0 bytes for 0 channels"),
        (wav(SOUND, struct.pack("<HHIIHH", 1, 2, 16000, 48000, 3, 16)), "3 bytes for 2 channels"),
        (wav(SOUND, fmt(1, 1, 0, 2)), "has a rate of 0"),
        (wav(SOUND, fmt(1, 1, 2**30, 2)), "has a rate of 1073741824"),
        (b"RIFF\0\0\0\0WAVEdata" + bytes(100), "no format before its samples"),
        (b"RIFF\0\0\0\0WAVE" + bytes(10**6), "no data chunk"),
        (wav(SOUND, PLAIN, before=1000 * (b"JUNK" + bytes(4))), "no data chunk"),  # nobody writes so many
        (wav(np.array([0, np.nan], "<f4").tobytes(), fmt(3, 1, 16000, 4)), "has the sample nan at 0.000 s"),
        (wav(np.array([0, 1e200], "<f8").tobytes(), fmt(3, 1, 16000, 8)), "has the sample inf at 0.000 s"),
        (wav(bytes(2 * 16000 * 61), PLAIN), "is longer than 60 seconds"),
    ],
)
def test_broken_wav(content, told, tmp_path, without_av):
    """Each is told what is wrong, with or without a path to name."""
    path = tmp_path / "broken.wav"
    path.write_bytes(content)
    for item, name in ((content, "audio 2"), (path, f"audio 2: {path}")):
        with pytest.raises(InputError) as caught:
            to_bins(item, CONFIG, "audio 2", max_seconds=60)
        assert str(caught.value).startswith(name) and told in str(caught.value)


# Other files, through PyAV

KINDS = {
    "flac": ("flac", "flac", 44100),
    "mp3": ("mp3", "libmp3lame", 44100),
    "ogg vorbis": ("ogg", "vorbis", 44100),
    "ogg opus": ("ogg", "libopus", 48000),
    "m4a": ("ipod", "aac", 44100),
    "adts": ("adts", "aac", 44100),
    "webm": ("webm", "libopus", 48000),
    "aiff": ("aiff", "pcm_s24be", 44100),
    "wav of a-law": ("wav", "pcm_alaw", 8000),
}


# The Vorbis encoder at hand writes two channels only.
@pytest.mark.parametrize(
    ("kind", "layout"), [*((kind, "stereo") for kind in KINDS), ("flac", "mono"), ("mp3", "mono"), ("m4a", "mono")]
)
def test_files_of_every_kind(kind, layout, tmp_path):
    """A tone of 440 Hz comes back as one, at its rate, length and loudness, from bytes and from a path without its suffix."""
    container, codec, rate = KINDS[kind]
    content = encoded(container, codec, rate, layout=layout)
    path = tmp_path / "sound"
    path.write_bytes(content)
    for item in (content, path):
        found, samples = heard(item)
        assert found == rate and abs(len(samples) - 2 * rate) < 0.06 * rate
        spectrum = np.abs(np.fft.rfft(samples[: 2 * rate] * np.hanning(min(len(samples), 2 * rate))))
        assert abs(spectrum.argmax() / (len(spectrum) - 1) * rate / 2 - 440) < 1
        inner = samples[rate // 4 : -rate // 4]
        assert abs(np.sqrt(2 * (inner**2).mean()) - 0.3) < 0.03


def test_lossless_files_are_exact(tmp_path):
    """FLAC of 16 bits gives the very numbers, and so the very levels, of the WAV file with the same."""
    flac = encoded("flac", "flac", 22050, frequency=1000)
    rate, samples = heard(flac)
    whole = samples * 32768
    assert np.array_equal(whole, np.round(whole)) and np.abs(whole).max() == pytest.approx(0.3 * 32768, abs=2)
    same = wav(whole.astype("<i2").tobytes(), fmt(1, 1, rate, 2))
    assert np.array_equal(to_bins(flac, CONFIG), to_bins(same, CONFIG))


def picture():
    """A PNG file."""
    file = io.BytesIO()
    Image.new("RGB", (50, 50)).save(file, "PNG")
    return file.getvalue()


def silent_film():
    """An MP4 file with video only."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 16
        for _ in range(3):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")))
        out.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (lambda: b"This is a text and no sound at all. " * 100, "no audio file of a kind that can be read"),
        (lambda: np.random.default_rng(5).bytes(100_000), "no audio file of a kind that can be read"),
        (lambda: b"\x89PNG\r\n\x1a\n", "no audio file of a kind that can be read"),
        (picture, "no audio file of a kind that can be read"),
        (silent_film, "has no audio stream"),
        (lambda: encoded("flac", "flac")[:100], "no audio file of a kind that can be read"),
        (lambda: encoded("flac", "flac")[:20_000], "cannot be decoded: Invalid data"),
        (lambda: encoded("ipod", "aac")[:20_000], "no audio file of a kind that can be read"),
        (lambda: encoded("adts", "aac")[:-5], "cannot be decoded"),
        (lambda: wav(b"", fmt(6, 1, 8000, 1)), "is empty: it has no samples"),
        (lambda: encoded("flac", "flac", 8000, seconds=61), "is longer than 60 seconds, which is the limit"),
        (lambda: wav(SOUND, fmt(0x1234, 1, 16000, 2)), "no audio that can be decoded: its codec is not known"),
    ],
)
def test_broken_files(content, told):
    """Each is told what is wrong."""
    with pytest.raises(InputError) as caught:
        to_bins(content(), CONFIG, "audio 2", max_seconds=60)
    assert str(caught.value).startswith("audio 2 ") and told in str(caught.value)


def test_lists_of_other_files_are_refused(tmp_path):
    """What FFmpeg would take for a list of files or addresses to open opens nothing."""
    sound = tmp_path / "sound.wav"
    sound.write_bytes(wav(SOUND, PLAIN))
    assert len(heard(sound)[1]) == 1600
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{sound.as_uri()}\n#EXT-X-ENDLIST\n"
    for suffix, text in (("m3u8", playlist), ("ffconcat", f"ffconcat version 1.0\nfile {sound}\n")):
        path = tmp_path / f"list.{suffix}"
        path.write_text(text)
        with pytest.raises(InputError, match="no audio file of a kind that can be read"):
            heard(path)


def test_without_the_extra(without_av):
    """Anything but a WAV file of numbers, a-law among them, names the extra to install; an address is refused all the same."""
    for content in (b"fLaC" + bytes(100), wav(bytes(100), fmt(6, 1, 8000, 1))):
        with pytest.raises(InputError, match=r"^audio 2 is no WAV file of .*: pip install 'inkling_jax\[media\]'$"):
            to_bins(content, CONFIG, "audio 2")
    with pytest.raises(InputError, match=r"^audio 2: https://host/a.mp3 is not fetched"):
        to_bins("https://host/a.mp3", CONFIG, "audio 2")
