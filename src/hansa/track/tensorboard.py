"""TensorBoard: scalars per round, the configuration as hyper-parameters, the partition as a picture."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hansa.core.registry import register
from hansa.track.tracker import Line, Log, RunInfo, Say, Tracker, draw_partition, numbers, params, tags

MARK = "replies"  # a scalar that every round has


@register("tensorboard")
@dataclass(frozen=True)
class TensorBoard(Tracker):
    """Event files in `folder`/RUN, by default in the folder `tensorboard` of the run: `tensorboard --logdir runs`."""

    folder: str | None = None
    separate_process: ClassVar[bool] = True
    needs: ClassVar[str | None] = "tensorboard"
    takes: ClassVar[str | None] = "folder"
    wait = 30.0

    def open(self, info: RunInfo, state: dict[str, Any], say: Say) -> Log:
        if info.parent is not None:
            folder = Path(info.parent["folder"]) / info.run
        elif self.folder is None and info.folder is not None:
            folder = Path(info.folder) / "tensorboard"
        else:
            folder = Path(self.folder or "runs/tensorboard") / info.run
        return TensorBoardLog(info, Path(state.get("folder") or folder.resolve()))


class TensorBoardLog(Log):
    """A run in a folder of TensorBoard event files."""

    def __init__(self, info: RunInfo, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.info, self.state = info, {"folder": str(folder)}
        self._last = written(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = SummaryWriter(str(folder))
        if self._last == 0:
            text = "\n".join(f"    {name} = {value}" for name, value in {**tags(info), **params(info)}.items())
            self._writer.add_text("configuration", text, 0)
            with tempfile.TemporaryDirectory() as scratch:
                picture = f"{scratch}/partition.png"
                if draw_partition(info, picture):
                    from matplotlib.image import imread

                    self._writer.add_image("partition", imread(picture)[..., :3], 0, dataformats="HWC")
        self._writer.flush()

    def rounds(self, lines: list[Line]) -> None:
        for line in lines:
            if line["round"] > self._last:
                scalars = numbers(line)
                for name in sorted(scalars, key=lambda name: name == MARK):  # written last: it marks a complete round
                    self._writer.add_scalar(name, scalars[name], line["round"])
        self._writer.flush()
        self._last = max(self._last, lines[-1]["round"])

    def finish(self, summary: dict[str, Any], folder: str) -> None:
        from torch.utils.tensorboard.summary import hparams

        final = {f"final/{name}": value for name, value in numbers(summary).items()}
        for event in hparams({k: v[:200] for k, v in params(self.info).items()}, final):
            self._writer.file_writer.add_summary(event)
        for name, value in final.items():
            self._writer.add_scalar(name, value, self._last)
        self._writer.flush()

    def fail(self, reason: str) -> None:
        self._writer.add_text("failed", reason, self._last)
        self._writer.flush()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._writer.close()


def written(folder: Path) -> int:
    """The last round that is complete in the event files of a folder."""
    if not any(folder.glob("events.out.tfevents.*")):
        return 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 1, "tensors": 1})
    events.Reload()
    if MARK not in events.Tags()["scalars"]:
        return 0
    return int(max(event.step for event in events.Scalars(MARK)))
