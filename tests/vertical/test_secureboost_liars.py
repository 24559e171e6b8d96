"""Trees over columns against liars: parties and aggregators that send other messages than they should."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from columns_of_trees import HOLDER, PEOPLE, WIDTHS, run, task, trees_of

import hansa
from hansa import ColumnForest, SecureBoost
from hansa.core.op import Op, Reply
from hansa.net.party.workload import Workload
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.secure import additive
from hansa.secure.additive import AdditivePrivateKey, AdditivePublicKey
from hansa.secure.byte_tensors import to_rows
from hansa.secure.primes import Stream
from hansa.sim import routing
from hansa.testing import same_bits
from hansa.vertical import tree_passive
from hansa.vertical.split_ops import Roles
from hansa.vertical.tree_active import KEY
from hansa.vertical.tree_bins import TreeBins, sums_of
from hansa.vertical.tree_ops import BoostTrees, ForestTrees
from hansa.vertical.tree_scores import TreeScores, TreeTest

LIAR = 2
UNUSABLE = "party 2 sent sums that cannot be used"
Message = dict[str, torch.Tensor]
Lie = Callable[[Message], None]


def boosted(**fields: Any) -> SecureBoost:
    return SecureBoost(**{"match": "same", "bins": 8, "max_depth": 2, "key_bits": 1024, **fields})


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int, str, Lie], None]:
    """Change the message with a tensor of a name from one party to another, in the second session."""
    plain, sessions = routing.converse, list[int]()

    def install(sender: int, receiver: int, name: str, lie: Lie) -> None:
        def changed(talks: Any, check: Any) -> Any:
            sessions.append(len(sessions))

            def with_lie(source: int, target: int, number: int, message: Any) -> Any:
                if sessions[-1] == 1 and (source, target) == (sender, receiver) and name in message:
                    before = {key: value.clone() for key, value in message.items()}
                    lie(before)
                    message.update(before)
                return check(source, target, number, message)

            return plain(talks, with_lie)

        monkeypatch.setattr(routing, "converse", changed)

    return install


def zero(name: str) -> Lie:
    return lambda message: message[name].zero_()  # type: ignore[return-value]


def fill(name: str, value: int) -> Lie:
    return lambda message: message[name].fill_(value)  # type: ignore[return-value]


def flip_sets(message: Message) -> None:
    """Other instance sets: every sample goes the other way. Sums are left as they are: they are no bits of samples."""
    bits = message["data"]
    if not bool(bits[1:].any()):  # a set has few bytes, sums have many rows
        bits[0, : -(-PEOPLE // 8)] ^= 255


def overflow(message: Message) -> None:
    """A valid ciphertext of a number far out of range: its decryption would give the prime away."""
    bits = message["data"]
    if bool(bits[1:].any()):
        key = AdditivePublicKey(overflow.n)  # type: ignore[attr-defined]
        wrapped = additive._bases(key.n)[0].power(2 ** (additive.prime_bits(1024) + 9))
        bits[0] = to_rows([int(wrapped)], key.size)[0]


def other_sums(message: Message) -> None:
    """Valid ciphertexts of sums that no samples can have."""
    bits = message["data"]
    if bool(bits[1:].any()):
        key = AdditivePublicKey(overflow.n)  # type: ignore[attr-defined]
        bits[0] = key.rows(key.encrypt([2**59], Stream(b"lie")))[0]


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("name", "lie", "reason"),
    [
        ("data", zero("data"), f"{UNUSABLE}: received a number that is not a ciphertext"),
        ("data", fill("data", 255), f"{UNUSABLE}: received a number that is not a ciphertext"),
        ("data", overflow, f"{UNUSABLE}: a decrypted number is out of range"),
        ("data", other_sums, "the sums of party 2 are impossible"),
        ("data", flip_sets, "party 2 returned other samples for a split than those whose sums it sent"),
        ("widths", fill("widths", 99), "party 2 sent an invalid layout of its bins: a feature has at least 2 and"),
        ("omitted", fill("omitted", -1), "party 2 sent an invalid layout of its bins: its bins do not fit together"),
        ("summed", zero("summed"), "party 2 sent an invalid layout of its bins: its bins do not fit together"),
    ],
)
def test_lies_of_a_passive_party_are_named_and_nothing_is_lost(
    lying: Callable[[int, int, str, Lie], None], name: str, lie: Lie, reason: str
) -> None:
    """The second round fails; the third one grows the tree that the second would have grown."""
    honest = run(boosted(), 2)
    overflow.n = AdditivePrivateKey.of_tensor(honest.memories[HOLDER][KEY]).public.n  # type: ignore[attr-defined]
    lying(LIAR, HOLDER, name, lie)
    result = run(boosted(), 3)
    assert "empty" in result.history[1] and reason in str(result.history[1]["missing"]), result.history[1]
    assert same_bits(trees_of(result), trees_of(honest)) and "empty" not in result.history[2]


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("name", "lie", "reason"),
    [
        ("key", zero("key"), "party 1 sent an invalid key"),
        ("key", fill("key", 255), "party 1 sent an invalid key"),
        ("statistics", zero("statistics"), "party 1 sent invalid statistics: received a number that is not a ciph"),
        ("count", fill("count", 77), "party 1 asks for 77 nodes, and at most"),
        ("count", fill("nodes", 5), "party 1 asks for 1 nodes, and at most 1 can be summed here"),
        ("records", fill("records", 9), "party 1 asks for splits at level 1 that this party's bins do not have"),
    ],
)
def test_lies_of_the_active_party_are_named(
    lying: Callable[[int, int, str, Lie], None], name: str, lie: Lie, reason: str
) -> None:
    def all_nodes(message: Message) -> None:
        lie(message)
        if name == "records":
            message["nodes"].zero_()

    lying(HOLDER, 0, name, all_nodes)
    result = run(boosted(), 2)
    assert "empty" in result.history[1] and reason in str(result.history[1]["missing"]), result.history[1]


def test_a_split_cannot_be_recorded_twice(lying: Callable[[int, int, str, Lie], None]) -> None:
    def again(message: Message) -> None:
        message["nodes"].zero_()
        message["records"][0] = torch.tensor([record, 0, 0, 0])

    record = int(run(boosted(), 1).memories[0]["trees/records"][0, 0])
    lying(HOLDER, 0, "records", again)
    result = run(boosted(), 2)
    assert "this party's bins do not have" in str(result.history[1]["missing"])


def test_messages_of_another_size_are_refused(lying: Callable[[int, int, str, Lie], None]) -> None:
    def shorter(message: Message) -> None:
        message["statistics"] = message["statistics"][:, :-1]

    lying(HOLDER, 0, "statistics", shorter)
    result = run(boosted(), 2)
    assert "empty" in result.history[1] and "statistics" in str(result.history[1]["missing"]), result.history[1]


def test_a_passive_party_refuses_nodes_with_fewer_rows_than_its_policy_requires(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = tree_passive.Passive.__init__

    def strict(self: Any, op: Any, party: Any, roles: Any, memory: Any) -> None:
        plain(self, op, party, roles, memory)
        self.least = 10

    monkeypatch.setattr(tree_passive.Passive, "__init__", strict)
    refused = run(boosted(max_depth=4), 1)
    assert "the policy here requires 10; raise algorithm.min_samples" in str(refused.history[0]["missing"])
    assert "empty" not in run(boosted(max_depth=4, min_samples=10), 1).history[0]


HUGE = 10**18
ROLES: dict[str, Any] = {"shapes": {"0": [3], "1": [3]}, "joins": 1, "holder": 1, "rows": HUGE, "outputs": 2}


@pytest.mark.parametrize("op", [BoostTrees(), ForestTrees(), TreeTest(), TreeScores()])
def test_announced_rows_are_bounded_before_anything_is_made_of_them(op: Any) -> None:
    with pytest.raises(PartyError, match=r"at most \d+ (trees times rows|samples)"):
        op.expects_messages({**ROLES, "sums": {"0": 5}}, 1, 0)


@pytest.mark.parametrize("op", [BoostTrees(max_depth=16), ForestTrees(count=2**14, max_depth=16)])
def test_announced_levels_are_bounded(op: Op) -> None:
    payload = {**ROLES, "rows": 10, "sums": {"0": 5}}
    assert "steps (limits.steps in party.toml)" in str(Workload(steps=15).refuses(op, 5, payload))
    with pytest.raises(ConfigError, match="max_depth must be at least 1 and at most 16"):
        dataclasses.replace(op, max_depth=17)  # type: ignore[type-var]


@pytest.mark.parametrize("sums", [None, {}, {"0": -1}, {"0": 1.0}, {"0": 1, "1": 1}, {"0": 2**40}])
def test_malformed_sums_of_an_ask_are_refused(sums: Any) -> None:
    payload = {**ROLES, "rows": 5, "sums": sums}
    with pytest.raises(PartyError, match="'sums' must have one whole number"):
        sums_of(payload, Roles.of(payload))


def test_a_party_cannot_announce_more_sums_than_bins() -> None:
    reply = Reply({"sums": torch.tensor(25)})
    assert TreeBins(8).impossible(reply, {**ROLES, "rows": 5}) == "a node has at most 24 sums"


def test_a_key_too_short_for_the_statistics_is_refused() -> None:
    op = ForestTrees(classes=40, key_bits=1024)
    with pytest.raises(PartyError, match=r"the statistics of a sample need .* raise key_bits"):
        op.expects_messages({**ROLES, "rows": 1000, "sums": {"0": 5}}, 1, 0)


def test_columns_without_two_values_end_the_run_with_a_sentence() -> None:
    given = task()
    constant = [(x if party == HOLDER else torch.ones(PEOPLE, WIDTHS[party]), y)
                for party, (x, y) in enumerate(given.parties)]  # fmt: skip
    result = run(boosted(), 1, task=hansa.Task(None, "cross_entropy", constant, ids=given.ids, classes=2,
                                              prepare=given.prepare))  # fmt: skip
    assert "no party without labels has a column with two different values" in str(result.history[0])


@pytest.mark.parametrize("name", ["count", "records"])
def test_a_person_who_is_in_a_node_of_several_trees_counts_once(
    name: str, lying: Callable[[int, int, str, Lie], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a node of one person in as many trees as the policy requires rows would pass."""
    plain = tree_passive.Passive.__init__

    def strict(self: Any, *parts: Any) -> None:
        plain(self, *parts)
        self.least = 3

    def one_person(message: Message) -> None:
        message["nodes"].fill_(-1)
        message["nodes"][:, 0] = 0
        if name == "count":
            message["count"].fill_(1)
        else:
            message["records"].fill_(-1)
            message["records"][0] = torch.tensor([10**6, 0, 0, 0])

    monkeypatch.setattr(tree_passive.Passive, "__init__", strict)
    lying(HOLDER, 0, name, one_person)
    forest = ColumnForest(trees=8, per_round=4, match="same", bins=8, max_depth=2, key_bits=1024, min_samples=3)
    result = run(forest, 2)
    assert "asks about a node of 1 rows, and the policy here requires 3" in str(result.history[1]["missing"])
