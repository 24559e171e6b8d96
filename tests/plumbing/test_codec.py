from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hansa.core.op import Reply
from hansa.plumbing import codec
from hansa.plumbing.errors import DataError

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
torch.int8,
          torch.uint8, torch.bool]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 12), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 2**31))
    values = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
keys = texts.filter(lambda name: name not in ("$tensor", "__metadata__", ".") and "/" not in name and name)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
trees = st.recursive(
    plain | tensors(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@settings(max_examples=200)
@given(trees)
def test_a_tree_comes_back_as_it_was(tree: Any) -> None:
    assert same(tree, codec.decode(codec.encode(tree)))


@settings(max_examples=200)
@given(trees)
def test_size_is_the_length_of_the_encoding(tree: Any) -> None:
    assert codec.size(tree) == len(codec.encode(tree))


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 3000)), max_size=6))
def test_size_is_right_whatever_order_the_tensors_are_stored_in(given: list[tuple[torch.dtype, int]]) -> None:
    tree = {f"t{i}": torch.zeros(n, dtype=dtype) for i, (dtype, n) in enumerate(given)}
    assert codec.size(tree) == len(codec.encode(tree))


@settings(max_examples=30)
@given(trees, st.data())
def test_truncated_bytes_are_refused(tree: Any, data: st.DataObject) -> None:
    whole = codec.encode(tree)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(DataError, match="not a valid message"):
        codec.decode(whole[:cut])


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(DataError, match="not a valid message"):
        codec.decode(data)


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_message_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    whole = bytearray(codec.encode({"a": torch.arange(5.0), "b": [1, "x", None], "c": {"d": torch.zeros(2, 2).bool()}}))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        codec.decode(bytes(whole))
    except DataError:
        return


def message(tree: str) -> bytes:
    header = json.dumps({"__metadata__": {"tree": tree}}).encode()
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    "tree",
    ["[" * 100_000 + "]" * 100_000, '{"$tensor": "nowhere"}', '{"$tensor": []}', "{", ""],
    ids=["deep", "missing tensor", "no name", "cut", "empty"],
)
def test_a_well_framed_message_with_a_bad_tree_is_refused(tree: str) -> None:
    with pytest.raises(DataError, match="not a valid message"):
        codec.decode(message(tree))


@pytest.mark.parametrize(
    "tree",
    [
        {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}},
        {"": {"a": torch.zeros(1)}, "a": torch.ones(1)},
        {"__metadata__": torch.zeros(1)},
        {"$tensor": 1},
        {1: torch.zeros(1)},
        {"f": len},
        {"s": {1, 2}},
        {"c": torch.zeros(1, dtype=torch.complex64)},
    ],
    ids=["one path twice", "an empty key", "reserved", "mark", "key", "function", "set", "complex"],
)
def test_what_would_not_come_back_is_refused_before_it_is_sent(tree: Any) -> None:
    with pytest.raises(DataError, match="cannot encode"):
        codec.encode(tree)
    with pytest.raises(DataError, match="cannot encode"):
        codec.size(tree)


def test_a_key_with_a_slash_and_a_bare_tensor_come_back() -> None:
    memory = {"gossip/w": torch.arange(3.0), "gossip/stats": torch.zeros(0)}
    assert same(memory, codec.decode(codec.encode(memory)))
    assert torch.equal(codec.decode(codec.encode(torch.arange(4))), torch.arange(4))


def test_views_strides_and_special_numbers_survive() -> None:
    base = torch.arange(12.0).view(3, 4)
    tree = {"rows": base[1], "columns": base[:, 2], "turned": base.T, "odd": torch.tensor([math.inf, -0.0])}
    back = codec.decode(codec.encode(tree))
    assert same(tree, back)
    assert math.copysign(1, back["odd"][1]) == -1
    assert math.isnan(codec.decode(codec.encode({"x": math.nan}))["x"])


def test_decoded_tensors_own_their_memory() -> None:
    data = codec.encode({"a": torch.zeros(3), "b": torch.zeros(3)})
    back = codec.decode(data)
    back["a"] += 1
    assert torch.equal(back["b"], torch.zeros(3))
    assert torch.equal(codec.decode(data)["a"], torch.zeros(3))


def test_a_reply_survives_the_wire_and_its_length_does_not_depend_on_its_numbers() -> None:
    reply = Reply({"w": torch.arange(3.0)}, 7, {"counts": torch.tensor([2])}, {"train_loss": 0.1})
    back = Reply.of_tree(codec.decode(codec.encode(reply.tree())))
    assert torch.equal(back.tensors["w"], reply.tensors["w"])
    assert torch.equal(back.maxima["counts"], reply.maxima["counts"])
    assert (back.weight, back.metrics) == (7, {"train_loss": 0.1})
    other = Reply({"w": torch.full((3,), 1e30)}, 10**12, {"counts": torch.tensor([9])}, {"train_loss": 1 / 3})
    assert codec.size(other.tree()) == codec.size(reply.tree())


def test_a_single_number_cut_out_of_a_longer_tensor_is_encoded() -> None:
    for cut in (torch.arange(2.0)[::2], torch.arange(6.0).view(2, 3)[:1, ::3], torch.arange(9.0)[4]):
        assert torch.equal(codec.decode(codec.encode({"x": cut}))["x"], cut)
