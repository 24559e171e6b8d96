"""MNIST and Fashion-MNIST, from the IDX files in which they are published.

LeCun, Bottou, Bengio and Haffner, "Gradient-based learning applied to document recognition", Proceedings of the IEEE
1998; Xiao, Rasul and Vollgraf, "Fashion-MNIST: a novel image dataset for benchmarking machine learning algorithms",
arXiv:1708.07747.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hansa.core.registry import register
from hansa.data.dataset import Data, Dataset, locate, read_bytes
from hansa.plumbing.errors import DataError

UNSIGNED_BYTE = 8  # the only IDX element type that these two data sets use


@register("mnist")
@dataclass(frozen=True)
class Mnist(Dataset):
    """Handwritten digits, 28 by 28 pixels: 60,000 and 10,000 images of 10 classes.

    LeCun et al. 1998. The four IDX files lie in the folder mnist/, plain or gzipped.
    """

    def load(self, data_dir: str | None = None) -> Data:
        return _load(data_dir, "mnist", "yann.lecun.com/exdb/mnist or one of its mirrors (four IDX files)")


@register("fashion-mnist")
@dataclass(frozen=True)
class FashionMnist(Dataset):
    """Articles of clothing, 28 by 28 pixels: 60,000 and 10,000 images of 10 classes.

    Xiao et al. 2017. The four IDX files lie in the folder fashion-mnist/, plain or gzipped.
    """

    def load(self, data_dir: str | None = None) -> Data:
        source = "the Debian package dataset-fashion-mnist or github.com/zalandoresearch/fashion-mnist (four IDX files)"
        return _load(data_dir, "fashion-mnist", source)


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an array of unsigned bytes from an IDX file; raise DataError if the file is invalid or incomplete."""
    raw = read_bytes(path)
    start = 4 + 4 * dimensions
    if len(raw) < start or raw[:4] != bytes((0, 0, UNSIGNED_BYTE, dimensions)):
        raise DataError(f"{path} is not an IDX file of unsigned bytes with {dimensions} dimension(s)")
    shape = tuple(int(size) for size in np.frombuffer(raw, dtype=">u4", count=dimensions, offset=4))
    if len(raw) - start != math.prod(shape):
        raise DataError(
            f"{path} should hold {math.prod(shape)} bytes after its header and holds {len(raw) - start}; fetch it again"
        )
    return np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(shape)


def _load(data_dir: str | None, dataset: str, source: str) -> Data:
    x, y = _images(data_dir, dataset, "train", source)
    return Data(x, y, _images(data_dir, dataset, "t10k", source), None, None, 10, "cross_entropy")


def _images(data_dir: str | None, dataset: str, part: str, source: str) -> tuple[Tensor, Tensor]:
    image_path = locate(data_dir, dataset, f"{part}-images-idx3-ubyte", source)
    label_path = locate(data_dir, dataset, f"{part}-labels-idx1-ubyte", source)
    images, labels = read_idx(image_path, 3), read_idx(label_path, 1)
    if images.shape[1:] != (28, 28):
        raise DataError(f"{image_path} holds images of {images.shape[1]} by {images.shape[2]} pixels, not 28 by 28")
    if len(images) != len(labels):
        raise DataError(f"{image_path} holds {len(images)} images and {label_path} {len(labels)} labels")
    if len(labels) and labels.max() > 9:
        raise DataError(f"{label_path} holds the label {labels.max()}, and the classes are 0 to 9")
    x = torch.from_numpy(images[:, None].astype(np.float32) / np.float32(255))
    return x, torch.from_numpy(labels.astype(np.int64))
