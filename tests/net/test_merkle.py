"""The Merkle tree of the log: RFC 6962's roots and proofs; a proof is valid for nothing else."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hansa.net.audit import merkle
from hansa.net.audit.merkle import (
    EMPTY,
    Frontier,
    InMemoryNodes,
    consistency,
    consistent,
    included,
    inclusion,
    leaf_hash,
    root,
)

# The leaves and roots that the implementations of certificate transparency are tested with.
LEAVES = [bytes.fromhex(text) for text in ("", "00", "10", "2021", "3031", "40414243", "5051525354555657",
                                           "606162636465666768696a6b6c6d6e6f")]  # fmt: skip
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
PATHS = {  # (leaf, size): the path, as in the tests of certificate transparency
    (0, 8): ["96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
             "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
             "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4"],
    (5, 8): ["bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
             "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
             "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7"],
    (2, 3): ["fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125"],
    (1, 5): ["6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
             "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
             "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b"],
}  # fmt: skip
PROOFS = {
    (1, 1): [],
    (1, 8): ["96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
             "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
             "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4"],
    (6, 8): ["0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
             "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
             "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7"],
    (2, 5): ["5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
             "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b"],
}  # fmt: skip
MOST = 64


def tree(leaves: list[bytes]) -> InMemoryNodes:
    nodes = InMemoryNodes()
    for place, leaf in enumerate(leaves):
        merkle.append(nodes, place, leaf_hash(leaf))
    return nodes


def numbered(size: int) -> list[bytes]:
    return [b"leaf %d" % k for k in range(size)]


# The definitions of RFC 6962, 2.1, word for word


def naive_root(leaves: list[bytes]) -> bytes:
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    k = below(len(leaves))
    return hashlib.sha256(b"\x01" + naive_root(leaves[:k]) + naive_root(leaves[k:])).digest()


def below(n: int) -> int:
    k = 1
    while 2 * k < n:
        k *= 2
    return k


def naive_path(m: int, leaves: list[bytes]) -> list[bytes]:
    if len(leaves) == 1:
        return []
    k = below(len(leaves))
    if m < k:
        return [*naive_path(m, leaves[:k]), naive_root(leaves[k:])]
    return [*naive_path(m - k, leaves[k:]), naive_root(leaves[:k])]


def naive_proof(m: int, leaves: list[bytes], whole: bool = True) -> list[bytes]:
    if m == len(leaves):
        return [] if whole else [naive_root(leaves)]
    k = below(len(leaves))
    if m <= k:
        return [*naive_proof(m, leaves[:k], whole), naive_root(leaves[k:])]
    return [*naive_proof(m - k, leaves[k:], False), naive_root(leaves[:k])]


def test_the_roots_and_paths_are_those_of_certificate_transparency() -> None:
    nodes, grown = tree(LEAVES), Frontier()
    assert root(nodes, 0) == grown.root() == EMPTY
    assert EMPTY.hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    for size, wanted in enumerate(ROOTS, 1):
        grown.append(leaf_hash(LEAVES[size - 1]))
        assert root(nodes, size).hex() == grown.root().hex() == wanted
    for (place, size), path in PATHS.items():
        assert [node.hex() for node in inclusion(nodes, place, size)] == path
    for (first, size), path in PROOFS.items():
        assert [node.hex() for node in consistency(nodes, first, size)] == path


def test_roots_and_proofs_of_every_small_tree_are_as_defined_and_hold() -> None:
    leaves = numbered(MOST)
    nodes, hashes = tree(leaves), [leaf_hash(leaf) for leaf in leaves]
    roots = [naive_root(leaves[:size]) for size in range(MOST + 1)]
    for size in range(1, MOST + 1):
        assert root(nodes, size) == roots[size]  # of any earlier size, from the tree that has grown since
        for place in range(size):
            path = inclusion(nodes, place, size)
            assert path == naive_path(place, leaves[:size])
            assert included(hashes[place], place, size, path, roots[size])
        for first in range(1, size + 1):
            path = consistency(nodes, first, size)
            assert path == naive_proof(first, leaves[:size])
            assert consistent(first, roots[first], size, roots[size], path)


def test_a_proof_holds_for_nothing_else() -> None:
    leaves = numbered(21)
    nodes, hashes = tree(leaves), [leaf_hash(leaf) for leaf in leaves]
    other = leaf_hash(b"other")
    for size in range(1, 22):
        top = root(nodes, size)
        for place in range(size):
            path = inclusion(nodes, place, size)
            given = (hashes[place], place, size, path, top)
            assert not included(other, *given[1:]) and not included(*given[:4], other)
            for wrong in {*range(-1, size + 2)} - {place}:
                assert not included(hashes[place], wrong, size, path, top)
            for changed in (*([*path[:k], other, *path[k + 1 :]] for k in range(len(path))), path[:-1] if path else
                            [other], [*path, other], path[::-1] if path != path[::-1] else [other]):  # fmt: skip
                assert not included(hashes[place], place, size, changed, top)
        for first in range(1, size + 1):
            path, below_ = consistency(nodes, first, size), root(nodes, first)
            assert not consistent(first, other, size, top, path) and not consistent(first, below_, size, other, path)
            for wrong in {0, *range(1, size + 2)} - {first}:
                assert not consistent(wrong, below_, size, top, path)
            for changed in (*([*path[:k], other, *path[k + 1 :]] for k in range(len(path))), [*path, other]):
                assert not consistent(first, below_, size, top, changed)
            if path:
                assert not consistent(first, below_, size, top, path[:-1])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=8), min_size=1, max_size=300), st.data())
def test_any_tree_is_as_defined(leaves: list[bytes], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(leaves)))
    place, first = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, size))
    nodes, top = tree(leaves), naive_root(leaves[:size])
    path, proof = inclusion(nodes, place, size), consistency(nodes, first, size)
    assert path == naive_path(place, leaves[:size]) and proof == naive_proof(first, leaves[:size])
    assert included(leaf_hash(leaves[place]), place, size, path, top)
    assert consistent(first, naive_root(leaves[:first]), size, top, proof)


def test_what_is_not_there_has_no_proof() -> None:
    nodes = tree(numbered(3))
    for place in (-1, 3):
        with pytest.raises(ValueError, match="there is no leaf"):
            inclusion(nodes, place, 3)
    for first in (0, 4):
        with pytest.raises(ValueError, match="not a prefix"):
            consistency(nodes, first, 3)
