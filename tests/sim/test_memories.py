"""Memories on disk behave like a dictionary, and after a crash at any moment they are those of the last checkpoint."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hansa
from hansa.artifacts.run_folder import write_atomic
from hansa.core.op import Memory
from hansa.plumbing.errors import AlgorithmError
from hansa.sim import memories as module
from hansa.sim.memories import Memories
from hansa.testing import same_bits

PARTIES = 12


def of(kind: int, value: int) -> Memory:
    """A memory of one of several layouts."""
    whole: Memory = {
        "c": torch.full((3,), float(value)),
        "n": torch.tensor(value),
        "none": torch.zeros(0, 4),
        "flags": torch.tensor([value % 2 == 0, True]),
        "half": torch.full((kind + 1, 2), value, dtype=torch.bfloat16),
    }
    some, empty = {name: whole[name] for name in ("half", "c")}, {"none": whole["none"]}
    return [whole, some, {"half": whole["half"]}, {}, empty][kind]


def same(a: Mapping[int, Memory], b: Mapping[int, Memory]) -> bool:
    """Equal to the bit, in the order of names too."""
    one, two = ([(str(p), list(m.items())) for p, m in sorted(x.items())] for x in (a, b))
    return same_bits(dict(one), dict(two)) and [list(m) for m in a.values()] == [list(b[p]) for p in a]


class Crash(BaseException):
    pass


@contextmanager
def dying(at: int, synced: dict[int, int]) -> Iterator[None]:
    """The machine dies at a system call that changes the disk; a write is torn. `synced` holds the sizes on disk."""
    left = [at]

    def doomed(call: Callable[..., Any], partly: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def counted(*args: Any, **more: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                if partly is not None:
                    partly(*args)
                raise Crash
            return call(*args, **more)

        return counted

    real_write, real_sync = os.pwrite, os.fsync

    def sync(file: int) -> None:
        real_sync(file)
        synced[os.fstat(file).st_ino] = os.fstat(file).st_size

    with (
        mock.patch.object(os, "pwrite", doomed(os.pwrite, lambda f, data, p: real_write(f, data[: len(data) // 2], p))),
        mock.patch.object(os, "fsync", doomed(sync)),
        mock.patch.object(os, "ftruncate", doomed(os.ftruncate)),
        mock.patch.object(os, "replace", doomed(os.replace)),
        mock.patch.object(Path, "unlink", doomed(Path.unlink)),
    ):
        yield


rounds = st.dictionaries(st.integers(0, PARTIES - 1), st.tuples(st.integers(0, 4), st.integers(0, 99)), max_size=6)
# The actions, and the number of the system call at which the machine dies (0 for never).
deaths = st.one_of(st.just(0), st.integers(0, 12))
steps = st.lists(st.tuples(st.one_of(rounds, st.just("checkpoint")), deaths), max_size=14)


def checkpoint(kept: Memories, path: Path, count: int) -> None:
    write_atomic(path, json.dumps({"count": count, "memories": kept.snapshot()}).encode())
    kept.saved()


@pytest.mark.slow
@settings(max_examples=300)
@given(
    steps, st.sampled_from([0, 2**20]), st.booleans(), st.sampled_from([10, 25, 2**14]), st.sampled_from([100, 2**30])
)
def test_memories_are_a_dictionary_and_a_crash_leaves_those_of_the_checkpoint(
    steps: list[Any], slack: int, power_lost: bool, large: int, warm: int
) -> None:
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.object(module, "SLACK", slack),
        mock.patch.object(module, "CHUNK", 300),
        mock.patch.object(module, "LARGE", large),  # some stay in RAM
        mock.patch.object(module, "WARM", warm),
    ):
        folder = Path(name)
        path = folder / "checkpoint.json"
        kept, model, at_checkpoint = Memories(PARTIES, folder=folder), dict[int, Memory](), [dict[int, Memory]()]
        synced: dict[int, int] = {}
        for step, death in steps:
            try:
                with dying(death, synced):
                    if step == "checkpoint":
                        at_checkpoint.append(dict(model))
                        checkpoint(kept, path, len(at_checkpoint) - 1)
                    else:
                        news = {party: of(*what) for party, what in step.items()}
                        kept.keep(news)
                        model |= news
            except Crash:
                for log in folder.glob("memories-*.log") if power_lost else ():  # what was not synced may be gone
                    os.truncate(log, min(log.stat().st_size, synced.get(log.stat().st_ino, 0)))
                saved = json.loads(path.read_text()) if path.exists() else {"count": 0, "memories": {}}
                kept = Memories(PARTIES, folder=folder)
                kept.restore(saved["memories"])
                model = dict(at_checkpoint[saved["count"]])
            assert same(kept, model)
            assert same(dict(enumerate(kept.recall(range(PARTIES)))), {p: model.get(p, {}) for p in range(PARTIES)})
        checkpoint(kept, path, 0)
        assert len(list(folder.glob("memories-*.log"))) == (kept._log is not None)


@given(st.lists(rounds, max_size=10), st.sampled_from([10, 25, 2**14]))
def test_without_a_folder_memories_are_a_dictionary_too_and_leave_no_file(steps: list[Any], large: int) -> None:
    with (
        mock.patch.object(module, "SLACK", 0),
        mock.patch.object(module, "LARGE", large),
        tempfile.TemporaryDirectory() as folder,
    ):
        with mock.patch.object(tempfile, "tempdir", folder):
            kept, model = Memories(PARTIES), dict[int, Memory]()
            for step in steps:
                news = {party: of(*what) for party, what in step.items()}
                kept.keep(news)
                model |= news
                assert same(kept, model)
        assert os.listdir(folder) == []


def test_a_log_is_rewritten_when_most_of_it_is_out_of_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLACK", 1000)
    kept = Memories(PARTIES, folder=tmp_path)
    for value in range(50):
        kept.keep({party: of(0, value) for party in range(PARTIES)})
        kept.snapshot()
        kept.saved()
    (log,) = tmp_path.glob("memories-*.log")
    assert log.stat().st_size < 3 * PARTIES * 5 * 64 + 3000


def test_tensors_read_back_lie_where_torch_would_put_them_and_are_the_readers_own(tmp_path: Path) -> None:
    kept = Memories(PARTIES, folder=tmp_path)
    kept.keep({party: of(0, party) for party in range(5)})
    for memory in kept.recall([4, 0, 2]):
        for tensor in memory.values():
            assert tensor.data_ptr() % 64 == 0 and tensor.is_contiguous()
            tensor.zero_()
    assert same(kept, {party: of(0, party) for party in range(5)})


def test_what_was_on_the_runs_device_goes_back_there() -> None:
    kept = Memories(2, torch.device("meta"))  # a device that every machine has
    kept.keep({0: {"here": torch.ones(2)}})
    layout = module.RowLayout((("there", torch.float32, (2,), True), ("here", torch.float32, (2,), False)))
    (memory,) = layout.unpack(torch.zeros(1, layout.stride, dtype=torch.uint8), torch.device("meta"))
    assert memory["there"].device.type == "meta" and memory["here"].device.type == "cpu"
    assert module.RowLayout.of(memory) == layout
    assert kept[0]["here"].device.type == "cpu"


def test_a_memory_that_is_not_made_of_tensors_is_refused() -> None:
    with pytest.raises(AlgorithmError, match="a party's memory must hold named tensors, but 'n' is a int"):
        Memories(1).keep({0: {"n": 3}})  # type: ignore[dict-item]


def test_a_log_that_was_cut_or_damaged_is_noticed(tmp_path: Path) -> None:
    kept = Memories(2, folder=tmp_path)
    kept.keep({1: of(0, 1)})
    named = kept.snapshot()
    (log,) = tmp_path.glob("memories-*.log")
    whole = log.read_bytes()
    for damaged, sentence in (
        (whole[:-64], "shorter than"),
        (b"x" * 64 + whole[64:], "damaged: a block of an unknown"),
    ):
        log.write_bytes(damaged)
        with pytest.raises(hansa.DataError, match=sentence):
            Memories(2, folder=tmp_path).restore(named)
    log.write_bytes(whole)
    with pytest.raises(hansa.DataError, match="damaged"):
        Memories(1, folder=tmp_path).restore(named)  # there is no party 1


def test_a_checkpoint_that_holds_memories_itself_is_refused() -> None:
    with pytest.raises(hansa.DataError, match="written by an earlier version of hansa; begin a new run"):
        Memories(2).restore({"0": {"c": torch.ones(1)}})


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_a_million_memories_need_little_ram_and_only_the_disk_they_use(tmp_path: Path) -> None:
    kept, draws = Memories(1_000_000, folder=tmp_path), np.random.default_rng(0)
    values, touched = torch.randn(2000, 60), np.zeros(1_000_000, dtype=bool)
    kept.keep({party: {"c": value} for party, value in enumerate(values)})
    touched[: len(values)] = True
    before = resident()
    for _ in range(200):
        cohort = draws.choice(1_000_000, len(values), replace=False).tolist()
        kept.recall(cohort)
        kept.keep({party: {"c": value} for party, value in zip(cohort, values, strict=True)})
        touched[cohort] = True
    kept.snapshot()
    written = 201 * len(values) * 256  # over 100 MB
    assert len(kept) == touched.sum() > 300_000
    assert resident() - before < written / 2
    (log,) = tmp_path.glob("memories-*.log")
    assert log.stat().st_blocks * 512 < 1.1 * written
    assert torch.equal(kept[cohort[-1]]["c"], values[-1])
