import gzip
import tracemalloc

import pyarrow as pa
import pytest

from headscope import unpack
from headscope.errors import DataError
from headscope.sources import read


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content)
        return str(path)

    return write


def zstd(content):
    return pa.compress(content, "zstd", asbytes=True)


def test_packed_files(write):
    plain = read(write("a.csv", b"text,label\na,1\n"))
    for name, content in (("a.csv.gz", gzip.compress(b"text,label\na,1\n")), ("a.csv.zst", zstd(b"text,label\na,1\n"))):
        assert read(write(name, content)).rows == plain.rows
    with pytest.raises(DataError, match="no examples"):
        read(write("b.csv.zst", b""))


@pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("zst", zstd)])
def test_bombs_are_refused_in_little_memory(write, suffix, pack):
    path = write(f"a.txt.{suffix}", pack(bytes(100 * 2**20)))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"unpacks to more than 6\d MiB from|unpacks to more than 9\d MiB from"):
        read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20


def test_the_absolute_limit_on_unpacked_bytes(write, monkeypatch):
    monkeypatch.setattr(unpack, "MOST_BYTES", 10)
    with pytest.raises(DataError, match="unpacks to more than 0 MiB from 31 bytes"):
        read(write("a.txt.gz", gzip.compress(b"abcdefghijk", mtime=0)))


def test_two_packed_parts_are_one_file(write):
    for name, pack in (("a.txt.gz", gzip.compress), ("a.txt.zst", zstd)):
        assert read(write(name, pack(b"a\n") + pack(b"b\n"))).rows == [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("x/A.CSV.Gz", ("csv", "gz")),
        ("a.b.jsonl", ("jsonl", "")),
        (".txt", ("txt", "")),
        ("a.gz", ("", "gz")),
        ("a.d/b", ("", "")),
        ("gz", ("", "")),
    ],
)
def test_suffix_and_packing_of_a_name(name, expected):
    assert unpack.split_suffix(name) == expected


def test_unprintable_characters_are_escaped():
    assert unpack.printable("é\x1b\u2028\udc80\U000e0001\n") == r"é\x1b\u2028\udc80\U000e0001\x0a"


def test_a_packed_file_under_another_name_is_recognised(write):
    with pytest.raises(DataError, match="not utf-8 at byte 1") as caught:
        read(write("a.txt", gzip.compress(b"abc")))
    assert caught.value.hint == "it looks like a .gz file with another name"
