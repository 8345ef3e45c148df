"""What a record is, where nobody says: an Example of any length, JSON with white space before it, or text."""

import pytest

from capibara.core.types import UserError
from capibara.data.shards.records import Fields, RecordFormat

FIELDS = Fields(record_format=RecordFormat.AUTO, text="text", inputs=None, domain=None, default_domain=None)


def delimited(tag: int, content: bytes) -> bytes:
    """A field of protobuf: its tag, its length as a varint, its bytes."""
    size, length = len(content), b""
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([tag << 3 | 2]) + length + bytes([size]) + content


def example(text: bytes) -> bytes:
    """tf.train.Example {features {feature {key: "text" value {bytes_list {value: text}}}}}"""
    return delimited(1, delimited(1, delimited(1, b"text") + delimited(2, delimited(1, delimited(1, text)))))


def test_an_example_of_any_length_is_none_of_json():
    # One of 123 bytes begins with "\n{", one of 32 with a line feed and a space.
    for size in range(400):
        assert FIELDS.example(example(b"x" * size), "x").text == "x" * size


def test_an_example_of_braces_is_none_of_json():
    for size in range(0, 200):
        text = "{" * size
        assert FIELDS.example(example(text.encode()), "x").text == text


@pytest.mark.parametrize("before", [b"", b" ", b"\n", b"\r\n\t "])
def test_json_may_follow_white_space(before):
    assert FIELDS.example(before + b'{"text": "the river"}', "x").text == "the river"
    for size in range(200):
        text = "y" * size
        assert FIELDS.example(before + b'{"text": "' + text.encode() + b'"}', "x").text == text
    with pytest.raises(UserError, match="is not JSON"):
        FIELDS.example(before + b"{the river", "x")


@pytest.mark.parametrize("text", ["", "the river", "\nthe river", "naïve 日本語"])
def test_anything_else_is_text(text):
    assert FIELDS.example(text.encode(), "x").text == text
