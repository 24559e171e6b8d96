"""Threshold keys: enough shares decrypt, fewer do not, and a cheating dealer or owner is detected."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_paillier import PUBLIC, P, Q

from hansa.plumbing.errors import DataError
from hansa.secure import threshold
from hansa.secure.primes import Stream
from hansa.secure.threshold import MAX_SHARES, Dealing, Share, combine, deal, deal_with

OWNERS = (2, 3, 5, 7, 8)
SHARES = deal_with(P, Q, OWNERS, 3, Stream(b"shares"))
DEALING, KEY = SHARES[0].dealing, SHARES[0].key
TEXTS = [KEY.encrypt(k, Stream(b"text %d" % k)) for k in range(4)]


def parts_of(share: Share) -> list[int]:
    return [share.partial(text) for text in TEXTS]


def test_any_enough_shares_open_a_ciphertext_and_fewer_do_not() -> None:
    text = KEY.encrypt(KEY.encode(-123456789), Stream(b"x")) + KEY.encrypt(KEY.encode(1000), Stream(b"y"))
    parts = {share.index: share.partial(text) for share in SHARES}
    for some in itertools.combinations(parts, 3):
        assert KEY.decode(combine(DEALING, text, {place: parts[place] for place in some})) == -123455789
    assert KEY.decode(combine(DEALING, text, parts)) == -123455789
    fewer = dataclasses.replace(DEALING, needed=2)
    for some in itertools.combinations(parts, 2):
        with pytest.raises(DataError, match="2 partial decryptions, and 3 are needed"):
            combine(DEALING, text, {place: parts[place] for place in some})
        with pytest.raises(DataError, match="are inconsistent"):  # nor where one pretends that two are enough
            combine(fewer, text, {place: parts[place] for place in some})
    with pytest.raises(DataError, match="are inconsistent"):
        combine(DEALING, text, {**parts, 1: parts[1] * 2})


def test_a_share_keeps_to_its_key_and_numbers_that_no_key_can_have_are_refused() -> None:
    with pytest.raises(DataError, match="another key"):
        SHARES[0].partial(PUBLIC.encrypt(1, Stream(b"x")))
    for owners, needed in ((range(3), 4), (range(3), 1), (range(1), 1), ((1, 1, 2), 2), (range(MAX_SHARES + 1), 2)):
        with pytest.raises(DataError, match="a key cannot have"):
            deal_with(P, Q, tuple(owners), needed, Stream(b"shares"))
    for bits in (512, 8192):
        with pytest.raises(DataError, match="1024 to 4096 bits"):
            deal(bits, (0, 1, 2), 2, Stream(b"shares"))
    assert [DEALING.index_of(party) for party in OWNERS] == [1, 2, 3, 4, 5]
    with pytest.raises(DataError, match="party 4 has no share"):
        DEALING.index_of(4)


def test_a_dealing_survives_the_wire_and_its_name_tells_all_of_it() -> None:
    again = Dealing.of_rows(KEY, 3, OWNERS, DEALING.rows())
    assert again == DEALING
    assert again.name == DEALING.name
    others = [
        dataclasses.replace(DEALING, needed=4),
        dataclasses.replace(DEALING, owners=(2, 3, 5, 8, 7)),
        dataclasses.replace(DEALING, checks=DEALING.checks[::-1]),
    ]
    assert len({DEALING.name, *(other.name for other in others)}) == 4


def test_what_few_shares_hold_is_consistent_with_any_key() -> None:
    """Two of three needed shares fit polynomials with any value at 0."""
    modulus = (P // 2) * (Q // 2)
    (a, fa), (b, fb) = ((share.index, share.value) for share in SHARES[:2])
    for secret in (0, 1, 12345):  # f(x) = secret + c x + d x^2 through both
        d = ((fa - secret) * pow(a, -1, modulus) - (fb - secret) * pow(b, -1, modulus)) * pow(a - b, -1, modulus)
        c = (fa - secret) * pow(a, -1, modulus) - d * a
        for place, value in ((a, fa), (b, fb)):
            assert (secret + c * place + d * place * place) % modulus == value


def test_every_share_that_was_dealt_rightly_passes_and_any_other_is_refused() -> None:
    for share in SHARES:
        share.check()
    for other in (SHARES[1].value, SHARES[0].value + 1, SHARES[0].value - 1, 0):
        with pytest.raises(DataError, match="does not match its verification key"):
            Share(DEALING, 1, other).check()
    for other in (KEY.n, KEY.square, 2**5000, -1):
        with pytest.raises(DataError, match="out of its range"):
            Share(DEALING, 1, other).check()


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(total=st.integers(2, 9), data=st.data())
def test_a_dealing_with_a_single_wrong_verification_key_is_refused(total: int, data: st.DataObject) -> None:
    needed = data.draw(st.integers(2, total))
    dealing = deal_with(P, Q, tuple(range(total)), needed, Stream(b"some"))[0].dealing
    dealing.check()
    wrong, place = list(dealing.checks), data.draw(st.integers(0, total - 1))
    wrong[place] = wrong[place] * dealing.base % dealing.key.n
    with pytest.raises(DataError, match="are inconsistent"):
        dataclasses.replace(dealing, checks=tuple(wrong)).check()


@pytest.mark.parametrize("place", range(len(OWNERS)))
def test_every_verification_key_is_checked(place: int) -> None:
    wrong = list(DEALING.checks)
    wrong[place] = wrong[place] * DEALING.base % KEY.n
    with pytest.raises(DataError, match="are inconsistent"):
        dataclasses.replace(DEALING, checks=tuple(wrong)).check()


def test_both_primes_of_a_key_have_half_of_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    primes, asked = iter((P, P, Q)), list[int]()

    def found(draws: Stream, bits: int) -> int:
        asked.append(bits)
        return next(primes)

    monkeypatch.setattr(threshold, "safe_prime", found)
    assert deal(2048, OWNERS, 3, Stream(b"shares"))[0].key.n == P * Q  # a prime that was drawn twice is drawn again
    assert asked == [1024] * 3


def test_a_dealing_whose_threshold_is_another_is_refused() -> None:
    """Also if the owners of some shares cannot notice it: their shares match their verification keys."""
    with pytest.raises(DataError, match="are inconsistent"):
        dataclasses.replace(DEALING, needed=2).check()
    for value in (0, KEY.n, KEY.n + 1, P, 5 * Q):
        with pytest.raises(DataError, match="not invertible modulo n"):
            dataclasses.replace(DEALING, checks=(value, *DEALING.checks[1:]))
    with pytest.raises(DataError, match="4 verification keys do not match 5 shares"):
        dataclasses.replace(DEALING, checks=DEALING.checks[1:])


def test_a_dealing_that_would_open_everything_doubled_is_refused() -> None:
    """Its shares lie on a polynomial of the right degree, with twice the exponent of the root at 0."""
    with pytest.raises(DataError, match="are inconsistent"):
        dataclasses.replace(DEALING, checks=tuple(pow(check, 2, KEY.n) for check in DEALING.checks)).check()


def test_the_base_of_proofs_is_a_square_that_nobody_chooses() -> None:
    for prime in (P, Q):
        assert pow(DEALING.base, prime // 2, prime) == 1 != DEALING.base % prime  # of the whole order of the squares
    assert threshold.base_of(KEY) == DEALING.base != threshold.base_of(PUBLIC)


def test_opening_reveals_the_sum_and_its_randomiser() -> None:
    """The root that partial decryptions give is the product of the randomisers, to the power 4 D^2."""
    draws = [Stream(b"one").bits(KEY.bits // 2), Stream(b"two").bits(KEY.bits // 2)]
    text = KEY.encrypt(20, Stream(b"one")) + KEY.encrypt(22, Stream(b"two"))
    root = 1
    for index, factor in DEALING.at_zero([1, 2, 3]).items():
        root = root * pow(SHARES[index - 1].partial(text), 2 * factor, KEY.n) % KEY.n
    order = (P - 1) * (Q - 1)
    randomiser = pow(pow(KEY.hn, sum(draws), KEY.n), pow(KEY.n, -1, order), KEY.n)
    assert root == pow(randomiser, 4 * DEALING.scale**2, KEY.n)
    assert combine(DEALING, text, {share.index: share.partial(text) for share in SHARES}) == 42


@pytest.mark.slow
def test_the_proof_of_right_partial_decryptions_holds() -> None:
    for share in SHARES:
        proof = share.prove(TEXTS, parts_of(share), b"secret")
        assert len(proof) == DEALING.proof_size()
        assert DEALING.proven(share.index, TEXTS, parts_of(share), proof)


def test_a_proof_says_nothing_about_another_share_vector_or_dealing() -> None:
    share, parts = SHARES[0], parts_of(SHARES[0])
    proof = share.prove(TEXTS, parts, b"secret")
    assert not DEALING.proven(2, TEXTS, parts, proof)
    assert not DEALING.proven(1, TEXTS[::-1], parts[::-1], proof)
    assert not DEALING.proven(1, TEXTS[1:], parts[1:], proof)
    assert not DEALING.proven(1, TEXTS[1:], parts, proof)
    assert not dataclasses.replace(DEALING, owners=(1, 3, 5, 7, 8)).proven(1, TEXTS, parts, proof)
    assert not DEALING.proven(1, TEXTS, parts, proof[:-1])


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_wrong_partial_decryption_has_no_proof(data: st.DataObject) -> None:
    """Whatever is wrong with it, and although its owner proves it like a correct one."""
    share, parts = SHARES[0], parts_of(SHARES[0])
    at = data.draw(st.integers(0, 3))
    wrong = data.draw(st.sampled_from([
        parts[at] * DEALING.base % KEY.n,
        SHARES[1].partial(TEXTS[at]),
        parts[at - 1],
        pow(parts[at], 2, KEY.n),
        1, 0, KEY.n + parts[at], KEY.n, P,
        data.draw(st.integers(2, KEY.n - 1)),
    ]))  # fmt: skip
    if wrong == parts[at]:
        return
    lie = [*parts[:at], wrong, *parts[at + 1 :]]
    assert not DEALING.proven(1, TEXTS, lie, share.prove(TEXTS, lie, b"secret"))
    assert not DEALING.proven(1, TEXTS, lie, share.prove(TEXTS, parts, b"secret"))


def test_two_errors_that_undo_each_other_are_found() -> None:
    """The products have random powers: otherwise the errors of two partial decryptions could cancel."""
    share, parts = SHARES[0], parts_of(SHARES[0])
    more = pow(7, 2, KEY.n)
    lie = [parts[0] * more % KEY.n, parts[1] * pow(more, -1, KEY.n) % KEY.n, *parts[2:]]
    assert not DEALING.proven(1, TEXTS, lie, share.prove(TEXTS, lie, b"secret"))


def test_an_error_that_a_proof_cannot_show_does_no_harm() -> None:
    """A partial decryption with the opposite sign is also correct: the interpolation squares it."""
    share, parts = SHARES[0], parts_of(SHARES[0])
    turned = [KEY.n - value for value in parts]
    assert DEALING.proven(1, TEXTS, turned, share.prove(TEXTS, turned, b"secret"))
    for k, value in enumerate(turned):
        others = {place: SHARES[place - 1].partial(TEXTS[k]) for place in (2, 3)}
        assert combine(DEALING, TEXTS[k], {1: value, **others}) == k


def test_proofs_of_different_vectors_do_not_share_their_randomness() -> None:
    """One random number in two proofs would reveal the share."""
    share = SHARES[0]
    answers = {share.prove(some, [share.partial(t) for t in some], b"secret") for some in (TEXTS[:1], TEXTS[1:2])}
    first, second = ((int.from_bytes(a[:32], "little"), int.from_bytes(a[32:], "little")) for a in answers)
    assert (first[1] - second[1]) % (first[0] - second[0]) != 0
    assert share.prove(TEXTS, parts_of(share), b"secret") == share.prove(TEXTS, parts_of(share), b"secret")
