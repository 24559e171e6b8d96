"""Parties refuse asks with invalid keys, lists of parties and lengths; channels refuse settings out of bounds."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from test_encrypted_sums import Say, world
from torch import Tensor

from hansa.core.ask import op_of
from hansa.core.op import Op
from hansa.experiment.config import parse
from hansa.experiment.rules import Facts, check
from hansa.plumbing.errors import ConfigError, DataError, PartyError, RoundAborted
from hansa.secure import ckks, payloads
from hansa.secure.ckks import CIPHERTEXT, CkksOpen
from hansa.secure.paillier_sum import PaillierOpen
from hansa.secure.radix import Radix
from hansa.secure.threshold import MAX_SHARES

needs_tenseal = pytest.mark.skipif(importlib.util.find_spec("tenseal") is None, reason="no tenseal")


def known(secure: str, parties: int) -> Facts:
    tree = {"task": {"dataset": "digits", "model": "logistic"}, "privacy": {"secure": secure}}
    return parse(tree).facts(parties=parties, names=None, cohort_size=parties)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (torch.tensor([-1, 2]), "lists a negative party id in 'owners'"),
        (torch.tensor([2, 2]), "lists a party twice, or out of order, in 'owners'"),
        (torch.tensor([2, 1]), "lists a party twice, or out of order, in 'owners'"),
        (torch.tensor([1.0, 2.0]), "sent no list of party ids in 'owners'"),
        (torch.tensor([[1, 2]]), "sent no list of party ids in 'owners'"),
        ([1, 2], "sent no list of party ids in 'owners'"),
    ],
)
def test_an_invalid_list_of_parties_is_refused(ids: Any, reason: str) -> None:
    assert payloads.ids({"owners": torch.tensor([0, 3])}, "owners") == [0, 3]
    with pytest.raises(PartyError, match=reason):
        payloads.ids({"owners": ids}, "owners")


@pytest.mark.parametrize("value", [None, b"1234", torch.zeros(4), torch.zeros(3, dtype=torch.uint8)])
def test_bytes_of_another_type_or_length_are_refused(value: Any) -> None:
    given = torch.arange(4, dtype=torch.uint8)
    assert torch.equal(payloads.row({"name": given}, "name", 4), given)
    with pytest.raises(PartyError, match="the aggregator sent no 'name' of 4 bytes"):
        payloads.row({"name": value}, "name", 4)


def test_digits_add_up_to_the_sum_and_numbers_outside_the_width_are_refused() -> None:
    radix = Radix(10, 4)
    ends = np.array([-512, 511, 0])
    assert radix.join(radix.split(ends) + radix.split(-ends - 1), 2).tolist() == [-1, -1, -1]
    for outside in (-513, 512):
        with pytest.raises(PartyError, match="a number does not fit the 10 bits that the secure sum has for it"):
            radix.split(np.array([0, outside]))


OPENERS = [
    pytest.param("paillier", PaillierOpen(key_bits=1024, width=64, slots=8), 256, id="paillier"),
    pytest.param("ckks", CkksOpen(), CIPHERTEXT + 8, id="ckks", marks=needs_tenseal),
]


@pytest.mark.parametrize(("name", "op", "size"), OPENERS)
def test_a_party_without_the_key_opens_nothing(name: str, op: Op, size: int) -> None:
    payload = {"sealed": torch.zeros(1, size, dtype=torch.uint8), "session": "a"}
    here = world(name)
    assert here.at(0, op, payload) == "it holds no key that could open the sum"
    assert not here.vaults[0].noted


@pytest.mark.parametrize(("name", "_op", "size"), OPENERS)
def test_the_key_holder_opens_no_other_number_of_ciphertexts_than_the_sum_has(name: str, _op: Op, size: int) -> None:
    here = world(name)
    here.reduce(Say())
    sent = next(m for m in here.sent if m["op"]["name"].endswith("-open"))
    op, sealed = op_of(sent["op"], "test"), sent["payload"]["sealed"]
    noted = dict(here.vaults[0].noted)
    for wrong in (sealed[:0], torch.cat([sealed, sealed])):
        said = here.at(0, op, {**sent["payload"], "sealed": wrong, "session": "other"})
        assert f"{len(wrong)} ciphertexts do not match {sent['op']['length']} numbers" in str(said)
    assert here.vaults[0].noted == noted  # a refused ask uses up no session


@pytest.mark.parametrize(("fields", "why"), [
    *(({"width": width}, "width must be at least 8 and at most 64 and a multiple of 8") for width in (4, 12, 72)),
    ({"slots": 0}, "slots must be at least 1"), ({"slots": 17}, "do not fit a message of 1024 bits"),
])  # fmt: skip
def test_a_packing_that_does_not_fit_the_message_is_refused(fields: dict[str, int], why: str) -> None:
    PaillierOpen(key_bits=1024, width=64, slots=16)
    with pytest.raises(ConfigError, match=why):
        PaillierOpen(**{"key_bits": 1024, "width": 64, "slots": 16, **fields})


@needs_tenseal
def test_a_ckks_key_that_is_private_damaged_or_of_another_size_is_refused() -> None:
    import tenseal

    def padded(context: Any, secret: bool = False) -> bytes:
        data: bytes = context.serialize(save_secret_key=secret)
        return len(data).to_bytes(8, "little") + data

    def made(dimension: int, modulus: list[int]) -> Any:
        return tenseal.context(tenseal.SCHEME_TYPE.CKKS, dimension, coeff_mod_bit_sizes=modulus)

    ours = made(ckks.DIMENSION, ckks.MODULUS)
    ckks._context(padded(ours))
    with pytest.raises(DataError, match="received a key that is not a public key"):
        ckks._context(padded(ours, secret=True))
    with pytest.raises(DataError, match="without dimension 8192 and a modulus of 120 bits"):
        ckks._context(padded(made(4096, [40, 40])))
    with pytest.raises(DataError, match="received an invalid key"):
        ckks._context(len(b"noise").to_bytes(8, "little") + b"noise")


@needs_tenseal
def test_ckks_is_refused_for_more_parties_than_its_sums_are_exact_for() -> None:
    check(known("ckks", 1024))
    with pytest.raises(ConfigError, match="for at most 1024 parties, and a round asks 1025; use 'masking'"):
        check(known("ckks", 1025))


def test_threshold_sums_are_refused_for_more_parties_than_a_key_has_shares() -> None:
    check(known("threshold-paillier", MAX_SHARES))
    with pytest.raises(ConfigError, match="for at most 256 parties, and a round asks 257; use 'masking'"):
        check(known("threshold-paillier", MAX_SHARES + 1))


def encrypting(here: Any) -> tuple[Op, dict[str, Any]]:
    """The last ask that dealt party 0 its share of a key."""
    sent = next(m for m in here.sent if "secure_share" in m["payload"])
    return op_of(sent["op"], "test"), sent["payload"]


@pytest.mark.slow
def test_a_party_takes_no_share_that_it_did_not_prepare_for_or_that_strangers_own() -> None:
    here = world("threshold-paillier")
    here.reduce(Say())
    op, payload = encrypting(here)
    fresh = world("threshold-paillier")
    assert "without having been asked for its public key" in str(fresh.at(0, op, payload))
    for owners in (torch.tensor([1, 2, 3, 4]), torch.arange(6)):  # not the party itself; more than are asked
        dealing: dict[str, Tensor] = {**payload["secure_dealing"], "owners": owners}
        said = here.at(0, op, {**payload, "secure_dealing": dealing})
        assert f"a share of a key with {len(owners)} owners, and 5 parties are asked" in str(said)


def test_a_threshold_sum_to_which_nobody_replies_says_what_was_asked_and_how_many_are_needed() -> None:
    here = world("threshold-paillier")
    here.gone = lambda op, party: True
    with pytest.raises(RoundAborted, match=r"no party replied to start the sum, and 4 are needed"):
        here.reduce(Say())
