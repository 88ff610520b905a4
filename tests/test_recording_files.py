"""What is no recording, or none any more, is refused with the reason."""

import random

import pytest
from recordings import INPUTS, write

from cbjax import __version__
from cbjax.recording import RecordingError, read_recording
from cbjax.recording.writer import header, sealed


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.cbjax"


# What is no recording.


def test_a_changed_byte_is_noticed_wherever_it_is(path):
    content = write(path).read_bytes()
    rng = random.Random(0)
    for place in [*range(len(header()), len(content) - 1, 3), len(content) - 1]:
        changed = bytearray(content)
        changed[place] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        if place == len(content) - 1:  # without its last newline it is a file that was cut
            assert not read_recording(path).is_complete
        else:
            with pytest.raises(RecordingError, match="is damaged, or one before it was changed"):
                read_recording(path)


@pytest.mark.parametrize("edit", ["taken out", "doubled", "swapped"])
def test_a_record_that_was_moved_is_noticed_and_named(path, edit):
    lines = write(path).read_bytes().splitlines(keepends=True)
    for number in range(1, len(lines) - 1):
        line = lines[number]
        inserted = {"taken out": [], "doubled": [line, line], "swapped": [lines[number + 1], line]}[edit]
        rest = lines[number + 2 :] if edit == "swapped" else lines[number + 1 :]
        path.write_bytes(b"".join([*lines[:number], *inserted, *rest]))
        with pytest.raises(RecordingError, match=rf"record {number + (edit == 'doubled')} is damaged"):
            read_recording(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: nothing was recorded"),
        (b"hello\nworld\n", "is no recording of cbjax"),
        (b"\x00\xff\x80" * 100, "is no recording of cbjax"),
        (b"[" * 100_000, "is no recording of cbjax"),
        (b'{"a": 1}\n', "is no recording of cbjax"),
        (b'["cbjax recording", 1, "0.1.0"]', "is no recording of cbjax"),
        (b'["cbjax recording", 1, "0.9.0"]\n', r"of format 1, made by cbjax 0\.9\.0; cbjax \S+ reads format 2"),
    ],
)
def test_another_file_is_refused_with_the_reason(path, content, message):
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=message):
        read_recording(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'["add",{"request":{"uid":1}}]', "Request lacks"),
        (b'["cancel",{"uid":1,"why":"x"}]', r"Cancel has no field \['why'\] in this version"),
        (b'["cancel"]', r"Cancel lacks \['uid'\]"),
        (b'["explode"]', "explode"),
        (b"[]", "no input of the scheduler"),
        (b'["update",{"tokens":{"<f4":"4AAAA"}}]', "an array of <f4"),
        (b'["update",{"tokens":{"<i4":"3AAA*"}}]', "no input of the scheduler"),
        (b'["start",{"config":{"policy":"lottery"}}]', "lacks"),
        (b"nonsense", "record 2 cannot be used"),
    ],
)
def test_a_record_of_another_version_is_refused_with_its_number(path, text, message):
    write(path, INPUTS[:1], is_complete=False)
    content = path.read_bytes()
    path.write_bytes(content + sealed(text, len(content)))
    with pytest.raises(RecordingError, match=message) as error:
        read_recording(path)
    assert f"{path}: record 2 cannot be used" in str(error.value)


def test_a_recording_begins_with_a_start(path):
    write(path, INPUTS[1:3])
    with pytest.raises(RecordingError, match="its first record is no start of a scheduler but a Add"):
        read_recording(path)


def test_a_recording_of_another_cbjax_says_so(path):
    content = write(path).read_bytes()
    # As long as this one, since records are bound to their places.
    other = "9" * len(__version__)
    path.write_bytes(content.replace(__version__.encode(), other.encode(), 1))
    (note,) = read_recording(path).notes
    assert f"was made by cbjax {other}; this is {__version__}, which may plan otherwise" in note
