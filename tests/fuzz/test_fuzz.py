"""Valid input, mutated: every parser accepts or refuses it, and the aggregator responds and stays alive.

The examples are the same in every run. HANSA_FUZZ=10 takes ten times as many; fuzz.py runs for a given time, guided by
code coverage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import targets as readers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from league import Caller
from served import Served, dial, say, statuses
from surface import BODIES, PARTS, WORDS, Everybody

MORE = int(os.environ.get("HANSA_FUZZ", "1"))
PARSERS = readers.parsers()
TARGETS = [*PARSERS, pytest.param("party.asks", marks=pytest.mark.slow)]
BORDERS = sorted({sign * 2**power + off for power in (7, 8, 15, 16, 31, 32, 53, 63, 64) for sign in (1, -1)
                  for off in (-1, 0, 1)})  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, seeds: Sequence[bytes], words: Sequence[bytes] = ()) -> bytes:
    """A valid input after some changes: bytes flipped; parts cut, repeated, moved or taken from another input; words
    inserted; numbers replaced by boundary values."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at, length = draw(st.integers(0, len(data))), draw(st.integers(0, 40))
        match draw(st.integers(0, 7)):
            case 0 if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case 1:
                del data[at : at + length]
            case 2:
                data[at:at] = data[at : at + length] * draw(st.sampled_from([1, 2, 500]))
            case 3:
                del data[at:]
            case 4:
                other = draw(st.sampled_from(seeds))
                data[at:] = other[draw(st.integers(0, len(other))) :]
            case 5 if words:
                data[at : at + draw(st.integers(0, 8))] = draw(st.sampled_from(words))
            case 6:
                number = draw(st.sampled_from(BORDERS))
                size = draw(st.sampled_from([1, 2, 4, 8]))
                data[at : at + size] = (number % 2 ** (8 * size)).to_bytes(
                    size, draw(st.sampled_from(["big", "little"]))
                )
            case _:
                digits = [at + k for k, byte in enumerate(data[at:]) if chr(byte).isdigit()][:1]
                for place in digits:
                    data[place : place + 1] = str(draw(st.sampled_from(BORDERS))).encode()
    return bytes(data)


def named(name: str) -> readers.Target:
    return readers.party_asks() if name == "party.asks" else PARSERS[name]


@pytest.mark.parametrize("name", TARGETS)
def test_what_a_reader_must_take_it_takes(name: str) -> None:
    target = named(name)
    assert any([target.run(seed) for seed in target.seeds])


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_takes_mutated_input_or_refuses_it(name: str) -> None:
    target = named(name)

    @settings(max_examples=120 * MORE, suppress_health_check=list(HealthCheck))
    @given(mutated(target.seeds, target.words))
    def run(data: bytes) -> None:
        target.run(data)

    run()


FOUND = {  # by parser: inputs that once made it fail in another way
    "order": [readers.wire.pack(readers.wire.Blob("ab" * 32, 1)),
              b"\x82\xa4name\xa3job\xaaexperiment\x81\xa4task\x81\x05\x05",
              b"\x82\xa4name\xa3job\xaaexperiment\x81\xa4task\x81\xa5model\xc4\x01x",
              b"\x82\xa4name\xa3job\xaaexperiment\x81\xa4task\x81\xa5model\xd6\xff\x00\x00\x00\x00"],
    "federation.toml": [b"name = " + b"9" * 5000, b"name = " + b"[" * 5000],
    "party.toml": [b"min_cohort = " + b"9" * 5000, b"jobs = " + b"[" * 5000],
}  # fmt: skip


@pytest.mark.parametrize(("name", "data"), [(name, data) for name, found in FOUND.items() for data in found])
def test_what_was_found_before_is_refused(name: str, data: bytes) -> None:
    assert PARSERS[name].run(data) is False


# The aggregator


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    league = Served(tmp_path_factory.mktemp("fuzz") / "league")
    yield league
    league.close()


@pytest.fixture(scope="module")
def everybody(served: Served) -> Everybody:
    return Everybody(served)


@pytest.mark.slow
def test_a_mutated_request_is_answered_or_the_connection_closed(served: Served, everybody: Everybody) -> None:
    requests: dict[str, list[bytes]] = {role: [] for role in everybody.callers}
    for role, method, path, ask in PARTS:
        requests[role] += [everybody.request(role, method, path, body, ask) for body in BODIES]

    @settings(max_examples=150 * MORE, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(sorted(requests)).flatmap(lambda role: st.tuples(st.just(role), mutated(requests[role], WORDS)))
    )
    def run(drawn: tuple[str, bytes]) -> None:
        role, data = drawn
        with dial(served, everybody.callers[role].files) as stream:
            stream.settimeout(0.05)  # an incomplete request gets no response
            say(stream, data)
            try:
                got = stream.recv(2**16)
            except OSError:
                return
        assert all(status < 500 or status == 505 for status in statuses(got)), got

    run()
    served.check()


@st.composite
def whole(draw: st.DrawFn) -> tuple[Any, bytes, str]:
    """A request to an existing route, valid or nearly so, with its certificate."""
    part = draw(st.sampled_from([part for part in PARTS if "/v1/work" not in part[2]]))  # which is held open
    bodies = [*BODIES, draw(mutated(BODIES[3:]))]
    return part, draw(st.sampled_from(bodies)), draw(st.sampled_from([part[0], part[0], part[0], "party", "operator"]))


@example([(PARTS[14], BODIES[-2], "operator"), (PARTS[15], b"", "operator"), (PARTS[16], b"", "operator")])
@settings(max_examples=40 * MORE, suppress_health_check=list(HealthCheck))
@given(st.lists(whole(), min_size=1, max_size=8))
def _orders(served: Served, everybody: Everybody, calls: list[tuple[Any, bytes, str]]) -> None:
    for (_, method, path, ask), body, who in calls:
        caller: Caller = everybody.callers[who]
        got = caller.call(method, path, body, headers=everybody.signed(who, method, path, body, ask))
        assert got.status < 500, (method, path, got)
        assert got.status < 400 or got.error


@pytest.mark.slow
def test_whole_requests_in_any_order_are_answered(served: Served, everybody: Everybody) -> None:
    _orders(served, everybody)
    served.check()
