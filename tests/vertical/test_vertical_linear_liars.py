"""Encrypted linear models against liars: invalid ciphertexts, overflows, wrong keys. Nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from columns import HELPER, HOLDER, PEOPLE, Messages, furthest, trained
from test_vertical_linear import algorithm, run

from hansa.core.session_op import Send
from hansa.net.party.workload import Workload
from hansa.plumbing.errors import HansaError, PartyError
from hansa.secure.additive import AdditivePublicKey
from hansa.secure.byte_tensors import from_rows, to_rows
from hansa.secure.primes import Stream
from hansa.vertical.linear_model import LinearRoles
from hansa.vertical.linear_ops import LinearTrain

Change = Callable[[torch.Tensor, AdditivePublicKey], torch.Tensor]


def lie(monkeypatch: pytest.MonkeyPatch, liar: int, name: str, change: Change) -> None:
    """In round 0 the liar changes the first message with a tensor of this name."""
    plain = LinearTrain.talk

    def talk(self: LinearTrain, party: Any, payload: Any, memory: Any) -> Any:
        inner, message, told, key = plain(self, party, payload, memory), None, False, None
        while True:
            try:
                step = inner.send(message)
            except StopIteration as done:
                return done.value
            if isinstance(step, Send) and party.id == liar and party.round == 0 and name in step.message and not told:
                step, told = Send(step.to, {name: change(step.message[name], key)}), True  # type: ignore[arg-type]
            message = yield step
            if message is not None and "key" in message and party.id == liar:
                key = AdditivePublicKey.of_tensor(message["key"])

    monkeypatch.setattr(LinearTrain, "talk", talk)


def row(tensor: torch.Tensor, value: int) -> torch.Tensor:
    """A message whose first ciphertext is replaced."""
    return torch.cat([to_rows([value], tensor.shape[1]), tensor[1:]])


def encrypted(number: int) -> Change:
    return lambda tensor, key: row(tensor, int(key.encrypt([number], Stream(b"liar"))[0]))


def flipped(tensor: torch.Tensor, key: AdditivePublicKey) -> torch.Tensor:
    return to_rows([from_rows(tensor)[0] ^ 1 << 60, *from_rows(tensor)[1:]], tensor.shape[1])


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("liar", "name", "change", "reason"),
    [
        (0, "scores", lambda rows, key: row(rows, 0), "party 0 sent invalid ciphertexts: received a number that"),
        (0, "scores", lambda rows, key: row(rows, key.n), "party 0 sent invalid ciphertexts"),
        (1, "residuals", lambda rows, key: torch.full_like(rows, 255), "party 1 sent invalid ciphertexts"),
        (2, "gradient", lambda rows, key: row(rows, 0), "party 2 sent invalid ciphertexts"),
        (0, "scores", lambda rows, key: rows[:-1], "(39, 128)"),
        (0, "scores", lambda rows, key: rows[:, :-1], "(40, 127)"),
        (HELPER, "key", lambda key, _: torch.zeros_like(key), "the coordinator sent an invalid key"),
        (HELPER, "key", lambda key, _: row(key[None], 3 * 2**1022 + 3)[0], "the coordinator sent an invalid key"),
    ],
)  # fmt: skip
def test_a_lie_is_refused_and_the_next_round_is_as_if_it_had_not_been(
    liar: int, name: str, change: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = trained(run(algorithm()))
    lie(monkeypatch, liar, name, change)
    result = run(algorithm(), 2)
    assert "empty" in result.history[0] and "empty" not in result.history[1]
    assert reason in str(result.history[0]["missing"])
    assert furthest(trained(result), honest) < 1e-13


@pytest.mark.parametrize(
    ("liar", "name", "change", "logged"),
    [
        (0, "scores", encrypted(2**60), "party 2 skips a batch: a decrypted gradient is larger than the scores of all"),
        (1, "residuals", encrypted(2**60), "party 0 skips a batch: a decrypted gradient is larger"),
        (0, "scores", encrypted(2**240), "party 2 skips a batch"),
        (0, "gradient", encrypted(2**260), "party 0 sent a gradient for decryption that is out of range"),
        (HELPER, "gradient", flipped, "party 0 skips a batch: a decrypted gradient is larger"),
    ],
)  # fmt: skip
def test_an_overflow_is_logged_where_it_is_seen_and_the_session_goes_on(
    liar: int, name: str, change: Any, logged: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether residuals of a liar's choice overflow depends on others' columns: a refusal would be an answer."""
    lie(monkeypatch, liar, name, change)
    result = run(algorithm(), 2)
    assert logged in caplog.text
    assert not any("empty" in line or "missing" in line for line in result.history)
    assert all(abs(own).max() < 1 for own in trained(result).values())


def test_announced_rows_are_bounded_before_anything_is_made_of_them() -> None:
    payload = {"widths": {"0": 3, "1": 3}, "holder": 1, "helper": 2, "rows": 10**18}
    assert "at most 1000000 steps" in str(Workload().refuses(LinearTrain(batch=8), 5, payload))


def test_a_coordinator_decrypts_no_more_numbers_than_a_batch_has_people() -> None:
    """The aggregator names the columns to each party by itself: a party could have each residual decrypted."""
    payload = {"widths": {"0": PEOPLE, "1": 3}, "holder": 1, "helper": HELPER, "rows": PEOPLE}
    party: Any = SimpleNamespace(id=HELPER)
    with pytest.raises(PartyError, match=f"a batch has {PEOPLE} people, and a party has {PEOPLE} weights"):
        next(LinearTrain(batch=PEOPLE).talk(party, payload, {}))


@pytest.mark.parametrize("fields", [{"range": float("inf")}, {"range": -1.0}, {"batch": 0}, {"key_bits": 77}])
def test_an_op_with_impossible_fields_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(HansaError):
        LinearTrain(**fields)


@pytest.mark.parametrize(
    "change", [{"holder": 5}, {"helper": 0}, {"widths": {"1": 3}}, {"widths": {"x": 3}}, {"rows": -1}, {"rows": 2.5}]
)
def test_malformed_roles_are_refused(change: dict[str, Any]) -> None:
    payload = {"widths": {"0": 3, "1": 3}, "holder": 1, "helper": 2, "rows": PEOPLE}
    assert LinearRoles.of(payload).tree() == payload
    with pytest.raises(PartyError, match="malformed ask"):
        LinearRoles.of({**payload, **change})


def test_a_label_holder_that_repeats_residuals_does_not_make_masks_repeat(
    messages: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one mask for two batches, the coordinator reads the difference of their gradients, of single people too."""
    plain, first = LinearTrain.talk, list[torch.Tensor]()

    def talk(self: LinearTrain, party: Any, payload: Any, memory: Any) -> Any:
        inner, message = plain(self, party, payload, memory), None
        while True:
            try:
                step = inner.send(message)
            except StopIteration as done:
                return done.value
            if isinstance(step, Send) and party.id == HOLDER and "residuals" in step.message:
                first.append(step.message["residuals"])
                step = Send(step.to, {"residuals": first[0]})
            message = yield step

    monkeypatch.setattr(LinearTrain, "talk", talk)
    run(algorithm(batch=PEOPLE // 2))
    texts, opened = (
        [from_rows(message["gradient"]) for sender, receiver, message in messages
         if (sender, receiver) == pair and "gradient" in message] for pair in ((0, HELPER), (HELPER, 0))
    )  # fmt: skip
    assert len(opened) == 2 and texts[0] != texts[1]
    packing = LinearTrain(key_bits=1024).packing(LinearRoles({0: 2, 1: 3, 2: 1}, HOLDER, HELPER, PEOPLE), PEOPLE // 2)
    for one, other in zip(*opened, strict=True):
        assert abs(one - other) >> packing.width * packing.slots, "the mask no longer hides the difference"
