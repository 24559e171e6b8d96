"""Next-character prediction on Shakespeare's plays; each speaker is a party.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, section 3,
and LEAF (Caldas et al., arXiv:1812.01097) introduced this task. The text is the 1.1 MB of char-rnn (Karpathy 2015, from
Project Gutenberg, public domain). It does not mark where a play ends, so a name that occurs in two plays is one party.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from hansa.core.fields import Advice
from hansa.core.quantities import Count
from hansa.core.registry import register
from hansa.data.dataset import Data, Dataset, locate, read_text
from hansa.plumbing.errors import DataError

SOURCE = "github.com/karpathy/char-rnn, data/tinyshakespeare/input.txt, saved as tinyshakespeare.txt"
TEST_PART = 5  # the last fifth of a speaker's windows, at least one


@register("shakespeare")
@dataclass(frozen=True)
class Shakespeare(Dataset):
    """Shakespeare, speaker by speaker: predict the next character.

    McMahan et al. 2017; text of char-rnn. The file tinyshakespeare.txt lies in the folder shakespeare/, plain or
    gzipped. Samples are windows of `length` characters that do not overlap, targets are the same windows shifted by
    one. Speakers with fewer than `min_windows` windows are dropped. The last fifth of each speaker's windows is in the
    test set.
    """

    length: Count = 80
    min_windows: Annotated[int, Meta(ge=2), Advice("one to train on and one to test on")] = 2

    def load(self, data_dir: str | None = None) -> Data:
        path = locate(data_dir, "shakespeare", "tinyshakespeare.txt", SOURCE)
        text = read_text(path).replace("\r\n", "\n")
        vocabulary = np.array(sorted(set(text)))
        train, test, parties, names = [], [], [], []
        rows = 0
        for speaker, speech in speeches(text).items():
            windows = self._windows(np.searchsorted(vocabulary, np.array(list(speech))))
            if len(windows) < self.min_windows:
                continue
            cut = len(windows) - max(1, len(windows) // TEST_PART)
            train.append(windows[:cut])
            test.append(windows[cut:])
            parties.append(np.arange(rows, rows + cut))
            names.append(speaker)
            rows += cut
        if not train:
            raise DataError(f"{path} holds no speaker with {self.min_windows} windows of {self.length} characters")
        x, y = _shifted(np.concatenate(train))
        held_out = _shifted(np.concatenate(test))
        return Data(x, y, held_out, tuple(parties), tuple(names), len(vocabulary), "cross_entropy")

    def _windows(self, codes: np.ndarray) -> np.ndarray:
        """Rows of length + 1 characters; the last character of a row is the first of the next."""
        count = max(0, len(codes) - 1) // self.length
        starts = self.length * np.arange(count)
        windows: np.ndarray = codes[starts[:, None] + np.arange(self.length + 1)].astype(np.int64)
        return windows


def speeches(text: str) -> dict[str, str]:
    """The text of each speaker, in order of first appearance; a speech begins with a separate line `NAME:`."""
    spoken: dict[str, list[str]] = {}
    speaker: str | None = None
    for block in re.split(r"\n{2,}", text.strip("\n")):
        opening = re.match(r"([^\n:]+):(?:\n|$)", block)
        if opening:
            speaker = opening[1]
            block = block[opening.end() :]
        if speaker is not None and block:
            spoken.setdefault(speaker, []).append(block)
    return {name: "\n".join(blocks) for name, blocks in spoken.items()}


def _shifted(windows: np.ndarray) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())
