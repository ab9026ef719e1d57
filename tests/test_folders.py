import os
import re

import pytest
from PIL import Image

from headscope.errors import DataError
from headscope.sources import read


@pytest.fixture
def put(tmp_path):
    def put(*names):
        for name in names:
            path = tmp_path / "set" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix.lower() in {".png", ".jpg"}:
                Image.new("RGB", (2, 3)).save(path)
            else:
                path.write_text("x")
        return str(tmp_path / "set")

    return put


def test_subfolders_are_labels_in_sorted_order(put):
    path = put("dog/b.png", "cat/z.PNG", "cat/a.jpg", "README.md", "cat/.hidden.png", ".ipynb/x.png")
    rows = read(path)
    assert rows.rows == [
        {"image": os.path.join(path, "cat", "a.jpg"), "label": "cat"},
        {"image": os.path.join(path, "cat", "z.PNG"), "label": "cat"},
        {"image": os.path.join(path, "dog", "b.png"), "label": "dog"},
    ]
    assert (rows.columns, rows.numbers, rows.name) == (["image", "label"], [1, 2, 3], path)


def test_files_of_the_folder_itself_have_no_label(put):
    path = put("b.png", "a.jpg", "empty.csv")
    rows = read(path)
    assert rows.rows == [{"image": os.path.join(path, "a.jpg")}, {"image": os.path.join(path, "b.png")}]
    assert rows.columns == ["image"]


def test_sounds_are_audio(put):
    path = put("yes/1.wav", "no/2.flac")
    assert [(os.path.basename(row["audio"]), row["label"]) for row in read(path).rows] == [
        ("2.flac", "no"),
        ("1.wav", "yes"),
    ]


def test_the_digest_follows_names_and_bytes_but_not_the_place(put, tmp_path):
    path = put("cat/a.png", "dog/b.png")
    first = read(path).digest
    os.rename(path, tmp_path / "moved")
    assert read(str(tmp_path / "moved")).digest == first
    os.rename(tmp_path / "moved" / "dog" / "b.png", tmp_path / "moved" / "cat" / "b.png")
    second = read(str(tmp_path / "moved")).digest
    Image.new("RGB", (3, 3)).save(tmp_path / "moved" / "cat" / "b.png")
    assert len({first, second, read(str(tmp_path / "moved")).digest}) == 3


def test_a_folder_of_data_files_is_an_error_that_lists_them(put):
    with pytest.raises(DataError, match="set is a folder, not a data file$") as caught:
        read(put("train.csv", "test.jsonl.gz", "notes.md"))
    assert caught.value.hint == "name one of its files: test.jsonl.gz, train.csv"


def test_a_long_list_is_cut(put):
    with pytest.raises(DataError) as caught:
        read(put(*(f"{number}.csv" for number in range(12))))
    assert caught.value.hint.endswith(" and 2 more")


@pytest.mark.parametrize(
    ("names", "message", "hint"),
    [
        (["README.md"], "no examples in .*: no data file, image or sound", "^None$"),
        (["train/cat/a.png", "test/cat/b.png"], "no examples in", "name one of its subfolders, if .*: test, train"),
        (["a.png", "b.wav"], "holds both images and sounds", "keep each kind"),
        (["a.png", "cat/b.png"], "holds image files of its own and in subfolders", "subfolders: cat"),
    ],
)
def test_folders_that_cannot_be_read_as_examples(put, names, message, hint):
    with pytest.raises(DataError, match=message) as caught:
        read(put(*names))
    assert re.search(hint, str(caught.value.hint))


def test_a_broken_link_is_told(put):
    path = put("a.png")
    os.symlink("/nowhere/x.png", os.path.join(path, "b.png"))
    with pytest.raises(DataError, match=r"^cannot read .*b\.png: No such file"):
        read(path)


def test_a_folder_that_cannot_be_listed(put, monkeypatch):
    path = put("a.png")

    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(DataError, match="^cannot read the folder .*set: Permission denied"):
        read(path)
