"""Signed requests: a valid signature is accepted, any change is refused."""

from __future__ import annotations

import base64
from typing import NamedTuple

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from hansa.net.transport.keys import new_key
from hansa.net.transport.signing import About, SignatureError, sign, signed_bytes, verify

KEY = new_key()
ABOUT = About("heart-1", 3, "0.2")


class Request(NamedTuple):
    method: str = "POST"
    path: str = "/v1/updates?part=1"
    body: bytes = b"body"


def signed(about: About = ABOUT) -> dict[str, str]:
    return sign(KEY, *Request(), about)


@pytest.mark.parametrize("about", [ABOUT, About(), About("j", 0, ""), About("", 10**17, "x" * 128)])
def test_a_signed_request_is_accepted_and_says_what_it_is_about(about: About) -> None:
    headers = signed(about)
    assert set(headers) == {"Hansa-Job", "Hansa-Round", "Hansa-Ask", "Hansa-Nonce", "Hansa-Signature"}
    assert verify(KEY.public_key(), *Request(), headers) == about


def test_each_request_has_a_nonce_of_its_own() -> None:
    first, second = signed(), signed()
    assert first["Hansa-Nonce"] != second["Hansa-Nonce"] and len(bytes.fromhex(first["Hansa-Nonce"])) == 16
    assert first["Hansa-Signature"] != second["Hansa-Signature"]


def test_signed_bytes_say_what_they_are() -> None:
    assert signed_bytes(*Request(), ABOUT, "0" * 32).startswith(b"hansa-1 request")


@pytest.mark.parametrize(
    "altered",
    [
        Request(method="PUT"),
        Request(method="post"),
        Request(path="/v1/updates?part=2"),
        Request(path="/v1/updates"),
        Request(path="/v1/updates/?part=1"),
        Request(body=b"bodY"),
        Request(body=b""),
        Request(body=b"body\0"),
        Request(path="/v1/\udc80"),
    ],
)
def test_an_altered_request_is_refused(altered: Request) -> None:
    with pytest.raises(SignatureError, match="does not match"):
        verify(KEY.public_key(), *altered, signed())


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("Hansa-Job", "heart-2"),
        ("Hansa-Job", ""),
        ("Hansa-Round", "4"),
        ("Hansa-Round", "-1"),
        ("Hansa-Ask", "0.3"),
        ("Hansa-Ask", ""),
        ("Hansa-Nonce", "0" * 32),
        ("Hansa-Signature", base64.b64encode(bytes(64)).decode()),
        ("Hansa-Signature", base64.b64encode(bytes(63)).decode()),
        ("Hansa-Signature", ""),
        ("Hansa-Signature", "AAA"),
    ],
)
def test_an_altered_header_is_refused(header: str, value: str) -> None:
    with pytest.raises(SignatureError, match="does not match"):
        verify(KEY.public_key(), *Request(), signed() | {header: value})


def test_a_signature_by_another_key_is_refused() -> None:
    with pytest.raises(SignatureError, match="does not match"):
        verify(new_key().public_key(), *Request(), signed())


def test_a_signature_by_another_key_over_the_same_bytes_is_refused() -> None:
    headers = signed()
    forged = new_key().sign(signed_bytes(*Request(), ABOUT, headers["Hansa-Nonce"]))
    with pytest.raises(SignatureError, match="does not match"):
        verify(KEY.public_key(), *Request(), headers | {"Hansa-Signature": base64.b64encode(forged).decode()})


def test_a_signature_is_written_in_one_way() -> None:
    headers = signed()
    with pytest.raises(SignatureError, match="does not match"):
        verify(KEY.public_key(), *Request(), headers | {"Hansa-Signature": "!" + headers["Hansa-Signature"]})


@pytest.mark.parametrize("header", ["Hansa-Job", "Hansa-Round", "Hansa-Ask", "Hansa-Nonce", "Hansa-Signature"])
def test_a_missing_header_is_named(header: str) -> None:
    headers = {name: value for name, value in signed().items() if name != header}
    with pytest.raises(SignatureError, match=f"no header {header}"):
        verify(KEY.public_key(), *Request(), headers)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("Hansa-Job", "two words"),
        ("Hansa-Job", "line\nbreak"),
        ("Hansa-Job", "x" * 129),
        ("Hansa-Job", "\udc80"),
        ("Hansa-Round", ""),
        ("Hansa-Round", "03"),
        ("Hansa-Round", "-2"),
        ("Hansa-Round", "٣"),
        ("Hansa-Round", "3.0"),
        ("Hansa-Round", "9" * 5000),
        ("Hansa-Ask", "é"),
        ("Hansa-Nonce", ""),
        ("Hansa-Nonce", "0" * 31),
        ("Hansa-Nonce", "A" * 32),
        ("Hansa-Nonce", "0" * 32 + "\n"),
        ("Hansa-Signature", "é"),
    ],
)
def test_a_malformed_header_is_named_in_one_sentence(header: str, value: str) -> None:
    with pytest.raises(SignatureError, match=f"header {header} is malformed") as error:
        verify(KEY.public_key(), *Request(), signed() | {header: value})
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


@pytest.mark.parametrize("about", [About(job="a\r\nX: y"), About(round=-2), About(ask="a b"), About(ask="é")])
def test_what_would_be_refused_is_not_signed(about: About) -> None:
    with pytest.raises(SignatureError, match="malformed"):
        signed(about)


Tuple = tuple[str, str, bytes, About, str]

# Few letters and short texts, so that fields that run into each other are soon found.
WORDS = st.text("a1\n\0", max_size=3)
TUPLES = st.tuples(WORDS, WORDS, st.binary(max_size=2), st.builds(About, WORDS, st.integers(-1, 12), WORDS), WORDS)


@given(TUPLES, TUPLES)
@example(("a", "b", b"", About(), ""), ("ab", "", b"", About(), ""))
@example(("a\na", "a", b"", About(), ""), ("a", "a\na", b"", About(), ""))
@example(("a\0a", "a", b"", About(), ""), ("a", "a\0a", b"", About(), ""))
@example(("", "", b"", About("a", 1, "1"), ""), ("", "", b"", About("a", 11, ""), ""))
@example(("", "", b"", About("a1", 1), ""), ("", "", b"", About("a", 11), ""))
@example(("", "", b"", About(ask="a"), ""), ("", "", b"", About(), "a"))
def test_two_different_requests_never_give_the_same_signed_bytes(one: Tuple, other: Tuple) -> None:
    assume(one != other)
    assert signed_bytes(*one) != signed_bytes(*other)


@given(st.text(max_size=8), st.lists(st.integers(0, 8), min_size=4, max_size=4), st.integers(0, 3))
def test_moving_a_boundary_between_fields_changes_the_signed_bytes(text: str, cuts: list[int], moved: int) -> None:
    def split(places: list[int]) -> Tuple:
        a, b, c, d = sorted(min(place, len(text)) for place in places)
        return text[:a], text[a:b], b"", About(text[b:c], -1, text[c:d]), text[d:]

    other = [cut + 1 if index == moved else cut for index, cut in enumerate(cuts)]
    assume(split(cuts) != split(other))
    assert signed_bytes(*split(cuts)) != signed_bytes(*split(other))


@given(TUPLES)
def test_the_body_enters_by_its_hash(request: Tuple) -> None:
    method, path, body, about, nonce = request
    assert len(signed_bytes(method, path, body * 100, about, nonce)) == len(signed_bytes(*request))
    assert signed_bytes(method, path, body + b"x", about, nonce) != signed_bytes(*request)
