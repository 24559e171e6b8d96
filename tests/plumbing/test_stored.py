"""Replies in files: the same checks as in memory, and sums with the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from test_codec import DTYPES, same, tensors, texts, trees

from hansa.core import sums
from hansa.core.ask import Ask, Gathered, Reduced
from hansa.core.op import Reply
from hansa.core.round_record import Record
from hansa.core.sums import BlockSum, StoredReply, StoredSums
from hansa.local import SGD
from hansa.numerics.rows import FileRows, MappedRows, Rows
from hansa.plumbing import codec
from hansa.plumbing.errors import DataError
from hansa.replies.replies import combine
from hansa.replies.reply_checks import Rules

FILES = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(path: Path, data: bytes) -> Any:
    path.write_bytes(data)
    tree, starts, memory = codec.mapped(path)
    return tree, starts, memory


@FILES
@given(trees)
def test_a_mapped_file_holds_what_decoding_it_gives(tmp_path: Path, tree: Any) -> None:
    data = codec.encode(tree)
    found, starts, _ = read(tmp_path / "file", data)
    assert same(codec.decode(data), found)
    flat: dict[str, torch.Tensor] = {}
    codec._split(tree, "", flat)
    for name, tensor in flat.items():
        size = tensor.numel() * tensor.element_size()
        at = starts[name]
        assert data[at : at + size] == (
            tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if size else b""
        )


@pytest.mark.parametrize(
    "tree", [{"w": torch.arange(5.0), "n": torch.ones(2, dtype=torch.int64), "text": "x"}, {}, torch.zeros(0)]
)
def test_every_truncation_of_a_file_is_refused(tmp_path: Path, tree: Any) -> None:
    data = codec.encode(tree)
    for length in range(len(data)):
        with pytest.raises(DataError, match="not a valid message"):
            read(tmp_path / "file", data[:length])
    with pytest.raises(DataError, match="not a valid message"):
        read(tmp_path / "file", data + b"\0")


def outcome(work: Any) -> Any:
    try:
        return work()
    except DataError:
        return DataError


@FILES
@given(st.data())
def test_a_damaged_file_is_read_as_decoding_reads_it_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    good = bytearray(codec.encode(data.draw(trees)))
    length = int.from_bytes(good[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, 8 + length - 1))] = data.draw(
            st.sampled_from(b'0123456789"[]{},:-.eFIU \x00\xff')
        )
    found = outcome(lambda: read(tmp_path / "file", bytes(good))[0])
    if found is not DataError:
        assert same(codec.decode(bytes(good)), found)


def framed(header: Any, body: bytes = b"\0" * 16) -> bytes:
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


TREE = {"__metadata__": {"tree": '{"w":{"$tensor":"w"}}'}}


def entry(**changes: Any) -> dict[str, Any]:
    return {**TREE, "w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


def test_the_frame_of_the_next_test_is_right(tmp_path: Path) -> None:
    assert same(read(tmp_path / "file", framed(entry()))[0], {"w": torch.zeros(4)})


@pytest.mark.parametrize(
    "header",
    [
        entry(data_offsets=[0, 15]),
        entry(data_offsets=[0, 20]),
        entry(data_offsets=[-4, 12]),
        entry(data_offsets=[4, 20]),
        entry(data_offsets=[0.0, 16.0]),
        entry(data_offsets=[False, 16]),
        entry(data_offsets=[0, 16, 32]),
        entry(data_offsets=16),
        entry(data_offsets=None),
        entry(shape=[5]),
        entry(shape=[-4]),
        entry(shape=[2, -2]),
        entry(shape=[4.0]),
        entry(shape=[True, 4]),
        entry(shape=4),
        entry(shape="4"),
        entry(shape=[2**62, 4]),
        entry(shape=[2**64, 0, 4]),
        entry(dtype="F33"),
        entry(dtype=["F32"]),
        entry(dtype=None),
        {**entry(), "v": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}},
        {**entry(), "v": {"dtype": "F32", "shape": [0], "data_offsets": [0.0, 0.0]}},
        {**entry(), "v": 5},
        {**entry(), "__metadata__": {"tree": '{"w":{"$tensor":"v"}}'}},
        {**entry(), "__metadata__": {"tree": "{"}},
        {**entry(), "__metadata__": {"tree": 5}},
        {**entry(), "__metadata__": {}},
        {**entry(), "__metadata__": {"tree": "5", "more": 5}},
        {**entry(), "__metadata__": None},
        [entry()],
        "null",
        "[" * 100_000,
        "",
    ],
)
def test_an_altered_header_is_refused(tmp_path: Path, header: Any) -> None:
    data = framed(header)
    with pytest.raises(DataError, match="not a valid message"):
        codec.decode(data)
    with pytest.raises(DataError, match="not a valid message"):
        read(tmp_path / "file", data)


@pytest.mark.parametrize("plain", ['{"v":{"$tensor":"w"}}', '{"w":{"$tensor":"w"},"v":{"$tensor":"w"}}', "{}"])
def test_a_tensor_that_is_not_called_by_its_path_is_refused(tmp_path: Path, plain: str) -> None:
    with pytest.raises(DataError, match="not their paths"):
        read(tmp_path / "file", framed({**entry(), "__metadata__": {"tree": plain}}))


def test_a_header_over_the_limit_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    data = codec.encode({"text": "x" * 2000})
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(DataError, match="at most 1000 are allowed"):
        codec.mapped(tmp_path / "file", limit=1000)
    assert codec.mapped(tmp_path / "file", limit=4000)[0] == codec.decode(data)


@pytest.mark.slow
@settings(max_examples=150)
@given(st.dictionaries(texts.filter(lambda name: name and "/" not in name and name != "__metadata__"), tensors()))
def test_an_encoding_is_safetensors_own(tree: dict[str, torch.Tensor]) -> None:
    plain = {name: {"$tensor": name} for name in tree}
    text = json.dumps(plain, separators=(",", ":"), ensure_ascii=False)
    assert codec.encode(tree) == save(tree, metadata={"tree": text})


# Sums


def stored(folder: Path, given: list[Reply]) -> list[StoredReply]:
    out = []
    for k, reply in enumerate(given):
        (folder / str(k)).write_bytes(codec.encode(reply.tree()))
        out.append(StoredReply.read(folder / str(k)))
    return out


def drawn(count: int, seed: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (1000,)) -> list[Reply]:
    draw = torch.Generator().manual_seed(seed)
    whole = not dtype.is_floating_point
    made = [
        torch.randint(-(2**40), 2**40, shape, generator=draw).to(dtype) if whole
        else (torch.randn(shape, generator=draw, dtype=torch.float64) * 10.0 ** (k % 7 - 3)).to(dtype)
        for k in range(count)
    ]  # fmt: skip
    weights = torch.randint(1, 10_000, (count,), generator=draw).tolist()
    return [Reply({"w": value}, weight, {"c": torch.tensor([k])}, {"train_loss": float(k)})
            for k, (value, weight) in enumerate(zip(made, weights, strict=True))]  # fmt: skip


@pytest.mark.thin(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize(("count", "shape"), [(1, (1000,)), (33, (7, 331)), (70, (2000,)), (3, (0,)), (2, ())])
@pytest.mark.parametrize("wide", [1, 2**10])
def test_a_sum_over_files_has_the_bits_of_the_sum_in_memory(
    tmp_path: Path, dtype: torch.dtype, count: int, shape: tuple[int, ...], wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "WIDE", wide)
    monkeypatch.setattr(sums, "COLUMNS", wide)
    given = drawn(count, 5, dtype, shape)
    for shares in ([reply.weight for reply in given], [1] * count):
        plain = BlockSum()
        for reply, share in zip(given, shares, strict=True):
            plain.add(reply.tensors, share)
        found = StoredSums(list(zip(stored(tmp_path, given), shares, strict=True)), BlockSum)
        assert same(plain.result(), dict(found))
        if dtype != torch.int64:
            means = Reduced(found, 7, count).mean("w", dtype)
            assert torch.equal(means, Reduced(plain.result(), 7, count).mean("w", dtype))


@pytest.mark.parametrize("verb", ["reduce", "gather"])
@pytest.mark.parametrize("wide", [1, 2**22])
@pytest.mark.parametrize("memory", [1, 2**30])
def test_replies_in_files_make_the_answer_that_they_make_in_memory(
    tmp_path: Path, verb: Any, wide: int, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "WIDE", wide)
    monkeypatch.setattr(sums, "COLUMNS", wide)
    given = [Reply(reply.tensors, reply.weight, {}, reply.metrics) for reply in drawn(40, 3)]
    given[7].tensors["w"][3] = float("nan")
    given[9].weight = 0
    model = {"w": torch.zeros(1000), "stats": torch.zeros(0), "counts": torch.zeros(0, dtype=torch.int64)}
    ask = Ask(verb, 0, "round", 0, SGD(), {"model": model}, tuple(range(41)))
    answers, records = [], []
    for some in (given, stored(tmp_path, given)):
        record = Record()
        outcomes: list[Any] = [*enumerate(some), (40, "it is away")]
        answers.append(combine(ask, outcomes, Rules(memory=memory), record, tmp_path))
        records.append(record)
    one, other = answers
    plain = [{name: value for name, value in vars(record).items() if name not in ("arrived", "measured")}
             for record in records]  # fmt: skip
    assert plain[0] == plain[1]
    measured = [{key: vars(means) for key, means in record.measured.items()} for record in records]
    assert measured[0] == measured[1]
    assert records[0].rejected.keys() == {7, 9} and records[0].missing.keys() == {40}
    if isinstance(one, Reduced) and isinstance(other, Reduced):
        assert isinstance(other.sums, StoredSums) == (wide == 1)  # no float64 copy of a large sum
        assert same(dict(one.sums), dict(other.sums)) and one.weight == other.weight and one.metrics == other.metrics
    else:
        assert isinstance(one, Gathered) and isinstance(other, Gathered)
        assert one.parties == other.parties and torch.equal(one.rows("w"), other.rows("w"))
        assert torch.equal(one.matrix("w").block(0, 1000), other.matrix("w").block(0, 1000))


def test_gathered_replies_outlive_their_files(tmp_path: Path) -> None:
    given = [Reply(reply.tensors, reply.weight) for reply in drawn(3, 1)]
    model = {"w": torch.zeros(1000), "stats": torch.zeros(0), "counts": torch.zeros(0, dtype=torch.int64)}
    ask = Ask("gather", 0, "round", 0, SGD(), {"model": model}, (0, 1, 2))
    answer = combine(ask, enumerate(stored(tmp_path, given)), Rules(), Record())
    for path in list(tmp_path.iterdir()):
        path.write_bytes(b"\0" * path.stat().st_size)
    assert isinstance(answer, Gathered)
    assert torch.equal(answer.rows("w"), torch.stack([reply.tensors["w"] for reply in given]))


# Rows in files


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.is_floating_point and dtype != torch.bfloat16])
def test_rows_in_files_of_their_own_are_those_of_a_matrix(tmp_path: Path, dtype: torch.dtype) -> None:
    matrix = torch.randn(5, 700, generator=torch.Generator().manual_seed(1)).to(dtype)
    places = []
    for k, row in enumerate(matrix):
        path = tmp_path / str(k)
        path.write_bytes(b"#" * k + row.numpy().tobytes() + b"behind")
        places.append((path, k))
    (tmp_path / "all").write_bytes(matrix.numpy().tobytes())
    plain = Rows(matrix)
    for rows in (FileRows(places, 700, dtype), MappedRows.open(tmp_path / "all", 5, 700, dtype)):
        for one, other in ((plain, rows), (plain.take([3, 0, 4]), rows.take([3, 0, 4]))):
            assert (len(one), one.dim, one.dtype) == (len(other), other.dim, other.dtype)
            for at, end in ((0, 700), (0, 0), (13, 400), (699, 700)):
                assert torch.equal(one.block(at, end), other.block(at, end))
            for k in range(len(one)):
                assert torch.equal(one.row(k), other.row(k))
            for count in (1, 7, 700, 1000):
                assert torch.equal(one.sample(count), other.sample(count))
            blocks = [list(r.map(lambda at, end, block: block, numbers=256 * 3)) for r in (one, other)]
            assert all(map(torch.equal, *blocks))


def test_a_file_of_updates_that_became_shorter_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "row").write_bytes(bytes(40))
    rows = FileRows([(tmp_path / "row", 0)], 10, torch.float32)
    (tmp_path / "row").write_bytes(bytes(20))
    with pytest.raises(DataError, match="shorter"):
        rows.block(0, 10)
