"""Video input: which frames are shown, files of every kind made here, sequences of images, and what each wrong one is told."""

from __future__ import annotations

import io
import struct
import sys
from fractions import Fraction
from pathlib import Path

import av
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from inkling_jax.errors import ConfigError, InputError
from inkling_jax.inputs import video
from inkling_jax.inputs.images import ImageConfig, image_patches
from inkling_jax.inputs.video import VideoConfig, frame_indices, pair_anchors, read_video

BIT = 16  # pixels of a block that is black or white for one bit of a frame's number


def numbered(index: int) -> np.ndarray:
    """A frame that says its number below 256, so that any codec keeps it."""
    bits = [255 * (index >> bit & 1) for bit in range(8)]
    return np.repeat(np.kron(np.array([bits, bits], np.uint8), np.ones((BIT, BIT), np.uint8))[..., None], 3, axis=2)


def number(frame: np.ndarray) -> int:
    """The number that a frame says."""
    assert frame.shape == (2 * BIT, 8 * BIT, 3) and frame.dtype == np.uint8
    return sum(int(frame[BIT, BIT * bit + BIT // 2, 1] > 127) << bit for bit in range(8))


def film(frames: list[np.ndarray], container: str, codec: str, rate: int, pixels: str = "yuv420p", **options: str) -> bytes:
    """A video file of these frames."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, options=options)
        stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], pixels
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode())
    return buffer.getvalue()


def clip(frames: int, rate: int = 10, container: str = "mp4", codec: str = "libx264", **options: str) -> bytes:
    """Numbered frames."""
    return film([numbered(i) for i in range(frames)], container, codec, rate, **options)


# Which frames


@pytest.mark.parametrize(
    ("total", "rate", "fps", "most", "expected"),
    [
        (100, 25, 5, 200, [0, 5, 10, 15, 20, 26, 31, 36, 41, 46, 52, 57, 62, 67, 72, 78, 83, 88, 93, 99]),
        (10, 10, 10, 5, [0, 2, 4, 6, 9]),
        (50, 10, 30, 768, list(range(50))),  # no more than there are
        (1, 25, 0, 0, [0]),  # at least one
        (3, 30, 1, 8, [0]),
        (7, Fraction(30000, 1001), 60, 100, list(range(7))),  # exact where a float rate would lose the last one
        (300, Fraction(30000, 1001), 2, 32, [299 * i // 19 for i in range(20)]),  # 10.01 seconds
    ],
)
def test_frames_are_evenly_spread(total: int, rate: int, fps: float, most: int, expected: list[int]) -> None:
    """The first and the last always, the rate asked for unless the video's own is lower, never more than the cap."""
    assert frame_indices(total, Fraction(rate), fps, most) == expected


@pytest.mark.parametrize(
    ("frames", "most", "anchors"),
    [
        (10, 16, [0, 2, 4, 6, 8]),
        (2, 16, [0, 0]),  # never fewer than two pairs
        (4, 1, [0, 2]),
        (100, 3, [0, 49, 98]),
        (8, 3, [0, 3, 6]),
    ],
)
def test_pairs_are_evenly_spread(frames: int, most: int, anchors: list[int]) -> None:
    """From the first two frames to the last two."""
    assert pair_anchors(frames, most) == anchors


# Files


@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [
        ("mp4", "libx264", {"bf": "3", "g": "12"}),  # frames are stored in another order than shown
        ("mov", "mjpeg", {"pixels": "yuvj420p"}),
        ("matroska", "libx264", {}),
        ("webm", "libvpx-vp9", {"deadline": "realtime", "cpu-used": "8"}),
        ("avi", "mpeg4", {}),
        ("mpegts", "mpeg2video", {}),
        ("gif", "gif", {"pixels": "rgb8"}),
    ],
)
def test_files(container: str, codec: str, options: dict[str, str]) -> None:
    """Of 50 frames at 25 a second, 5 a second, each with its time."""
    moments = read_video(clip(50, 25, container, codec, **options), VideoConfig(fps=5))
    want = [0, 5, 10, 16, 21, 27, 32, 38, 43, 49]
    assert [number(moment.image) for moment in moments] == want
    np.testing.assert_allclose([moment.seconds for moment in moments], np.array(want) / 25, atol=0.011)  # GIF counts 1/100 s


def test_every_way_to_give_a_file(tmp_path: Path) -> None:
    """A path, a Path whose name looks like a protocol, a URL, bytes."""
    data = clip(3)
    path = tmp_path / "concat:a.mp4"
    path.write_bytes(data)
    for source in (str(path), path, path.as_uri(), data, memoryview(data)):
        assert [number(moment.image) for moment in read_video(source, VideoConfig(fps=99))] == [0, 1, 2]


def test_the_cap_and_the_defaults() -> None:
    """Two a second and at most 32; the cap spreads over the whole video."""
    data = clip(200)
    assert [number(m.image) for m in read_video(data)] == [199 * i // 31 for i in range(32)]
    assert [number(m.image) for m in read_video(data, VideoConfig(max_frames=3))] == [0, 99, 199]
    assert [number(m.image) for m in read_video(data, VideoConfig(max_frames=1))] == [0]


def test_adjacent_pairs() -> None:
    """Ten frames of a clip at the rate asked for, and an odd one, whose last frame counts twice; the time is the first's."""
    even = read_video(clip(10), VideoConfig(fps=10, pairs=True))
    assert [tuple(map(number, m.image)) for m in even] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    np.testing.assert_allclose([m.seconds for m in even], [0, 0.2, 0.4, 0.6, 0.8], atol=1e-3)
    odd = read_video(clip(5), VideoConfig(fps=10, pairs=True))
    assert [tuple(map(number, m.image)) for m in odd] == [(0, 1), (2, 3), (4, 4)]
    capped = read_video(clip(100), VideoConfig(fps=10, max_frames=7, pairs=True))
    assert [tuple(map(number, m.image)) for m in capped] == [(0, 1), (49, 50), (98, 99)]
    slow = read_video(clip(40), VideoConfig(fps=2, pairs=True))  # 8 of 40: 0, 5, 11, 16, 22, 27, 33, 39
    assert [tuple(map(number, m.image)) for m in slow] == [(0, 5), (11, 16), (22, 27), (33, 39)]
    assert [tuple(map(number, m.image)) for m in read_video(clip(1), VideoConfig(pairs=True))] == [(0, 0), (0, 0)]


def test_colours_and_orientation() -> None:
    """Four colours, one a quadrant, as stored and filmed with the camera on its side: the track says to turn it."""
    quadrants = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 255]]], np.uint8)
    data = film([np.repeat(np.repeat(quadrants, 24, 0), 32, 1)], "mp4", "libx264", 10, crf="1")
    (moment,) = read_video(data)
    assert moment.image.shape == (48, 64, 3)
    assert np.abs(moment.image[12::24, 16::32].astype(int) - quadrants).max() < 24
    # x' = a x + c y + tx, y' = b x + d y + ty of the display matrix (a b u, c d v, tx ty w): the upper left goes to ...
    for (a, b, c, d), turned in (
        ((0, 1, -1, 0), np.rot90(quadrants, -1)),  # ... the upper right
        ((0, -1, 1, 0), np.rot90(quadrants)),  # ... the lower left
        ((-1, 0, 0, -1), quadrants[::-1, ::-1]),  # ... the lower right
    ):
        matrix = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
        at = data.index(b"tkhd") + 44
        (moment,) = read_video(data[:at] + matrix + data[at + 36 :])
        height, width = moment.image.shape[:2]
        assert (height, width) == ((48, 64) if a else (64, 48))
        got = moment.image[height // 4 :: height // 2, width // 4 :: width // 2].astype(int)
        assert np.abs(got - turned).max() < 24


def test_only_shown_frames_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are decoded, but their pixels are never asked for."""
    converted, upright = [], video._upright
    monkeypatch.setattr(video, "_upright", lambda frame: converted.append(frame.pts) or upright(frame))
    assert len(read_video(clip(120), VideoConfig(max_frames=4))) == len(converted) == 4


def test_packets_that_are_no_frames() -> None:
    """A recording from amid a broadcast begins with packets that cannot be decoded; the shown frames are spread over the rest."""
    data = clip(60, container="mpegts", g="20", bf="0", **{"x264-params": "scenecut=0"})
    data = data[len(data) // 188 // 4 * 188 :]  # whole packets of the transport
    with av.open(io.BytesIO(data)) as container:
        assert sum(packet.size > 0 for packet in container.demux(video=0)) > 40
    assert [number(m.image) for m in read_video(data, VideoConfig(max_frames=3))] == [20, 39, 59]


def test_a_cut_file_ends_where_it_is_cut() -> None:
    """A recording that was broken off is shown as far as it goes."""
    data = clip(60, container="matroska", g="10")
    moments = read_video(data[: len(data) * 2 // 3], VideoConfig(fps=10))
    shown = [number(m.image) for m in moments]
    assert 10 < len(shown) < 60 and shown == sorted(set(shown)) and shown[0] == 0


# Sequences of images


def test_sequences() -> None:
    """Lists, tuples and arrays of anything that is an image count as frames at the rate asked for; the cap spreads over them."""
    frames = [numbered(i) for i in range(10)]
    stacked = np.stack(frames)
    for source in (frames, tuple(map(Image.fromarray, frames)), stacked, stacked / 255, jnp.asarray(stacked)):
        moments = read_video(source, VideoConfig(fps=4, max_frames=5))
        assert [number(m.image) for m in moments] == [0, 2, 4, 6, 9]
        assert [m.seconds for m in moments] == [0, 0.5, 1, 1.5, 2.25]
    assert len(read_video(frames)) == 10
    paired = read_video(frames[:5], VideoConfig(pairs=True))
    assert [tuple(map(number, m.image)) for m in paired] == [(0, 1), (2, 3), (4, 4)]
    mixed = read_video([frames[0], np.zeros((5, 7), np.uint8)])
    assert [m.image.shape for m in mixed] == [(2 * BIT, 8 * BIT, 3), (5, 7, 3)]


def test_moments_are_images() -> None:
    """A frame fills both time slots of its patches, a pair one slot each."""
    config = ImageConfig(rescale_frac=None)
    frames = [numbered(i) for i in range(4)]
    (still, *_) = read_video(frames)
    np.testing.assert_array_equal(image_patches(still.image, config), image_patches(frames[0], config))
    first, second = read_video(frames, VideoConfig(pairs=True))
    for pair, (a, b) in ((first, frames[:2]), (second, frames[2:])):
        want = np.stack([image_patches(frame, config)[:, 0] for frame in (a, b)], axis=1)
        np.testing.assert_array_equal(image_patches(pair.image, config), want)


# What is refused


def song() -> bytes:
    """A file with sound and a cover, which is stored as a video of one frame."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        cover, track = output.add_stream("mjpeg", rate=1), output.add_stream("aac", rate=8000)
        cover.height, cover.width, cover.pix_fmt = 32, 128, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.rate = 8000
        for stream, first in ((cover, av.VideoFrame.from_ndarray(numbered(0), format="rgb24")), (track, frame)):
            output.mux(stream.encode(first))
            output.mux(stream.encode())
    return buffer.getvalue()


AVI, MKV = clip(3, container="avi", codec="mpeg4"), clip(3, container="matroska")
PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("", "is an empty string"),
        (b"", "has no bytes"),
        ("https://host/a.mp4", "https://host/a.mp4 is not fetched: download it"),
        ("nowhere.mp4", "nowhere.mp4: no such file"),
        (Path("."), "is a directory"),
        (b"not a video", "is no video that can be decoded: Invalid data found when processing input"),
        (PLAYLIST, "is no video that can be decoded"),
        (clip(3)[:200], "is no video that can be decoded"),
        (film([numbered(0)], "image2pipe", "png", 1, "rgb24"), "is no video that can be decoded"),
        (song(), "has no video stream"),
        (AVI[: AVI.index(b"movi") + 4], "has no frame that can be decoded"),
        (MKV.replace(b"V_MPEG4/ISO/AVC", b"V_NOBODY/KNOWS/"), "is no video that can be decoded: its codec is not known"),
        (None, "is a NoneType"),
        ([], "has no frames"),
        (np.zeros((0, 4, 4, 3), np.uint8), "has no frames"),
        (np.zeros((4, 4, 3), np.uint8), "is an array of shape [4, 4, 3]; [frames, height, width, 3] would be right"),
        ([numbered(0), "nowhere.png"], ", frame 1: nowhere.png: no such file"),
        ([numbered(0), numbered(0)[..., :1]], ", frame 1 is an array of shape [32, 128, 1]"),
        (
            [np.broadcast_to(np.uint8(0), (5000, 5000))] * 32,
            ", frame 0: 32 frames of 5000 x 5000 pixels are more than the 536870912",
        ),
    ],
)
def test_what_is_refused(source: object, told: str) -> None:
    """Each refusal names the item and what is wrong with it."""
    with pytest.raises(InputError) as caught:
        read_video(source, name="video 3")
    message = str(caught.value)
    assert message.startswith("video 3") and told in message and len(message) < 400


def test_absurd_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's frames are counted in pixels before one is decoded."""
    monkeypatch.setattr(video, "_decode", lambda *_: pytest.fail("decoded"))
    monkeypatch.setattr(video, "MAX_KEPT_PIXELS", 20 * 32 * 128 - 1)
    with pytest.raises(
        InputError, match=r"video: 20 frames of 128 x 32 pixels are more than the 81919 pixels .* lower max_frames"
    ):
        read_video(clip(100))


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files ask for it by name; sequences need none."""
    data = clip(2)
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setitem(sys.modules, "av.error", None)
    with pytest.raises(InputError, match=r"video 1 is read by PyAV, which is not installed: pip install 'inkling_jax\[media\]'"):
        read_video(data, name="video 1")
    assert len(read_video([numbered(0)])) == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"fps": 0}, "fps is 0; a finite number above 0"),
        ({"fps": float("nan")}, "fps is nan"),
        ({"fps": "2"}, "fps is '2'"),
        ({"fps": True}, "fps is True"),
        ({"max_frames": 0}, "max_frames is 0; an integer of at least 1"),
        ({"max_frames": 2.0}, "max_frames is 2.0"),
        ({"pairs": "no"}, "pairs is 'no'; True or False would be right"),
    ],
)
def test_wrong_options_are_named(options: dict, told: str) -> None:
    """By field and value."""
    with pytest.raises(ConfigError, match=told):
        VideoConfig(**options)
