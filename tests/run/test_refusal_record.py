"""Every algorithm beside every setting is refused or taken as recorded (`refusal_record.py`)."""

from __future__ import annotations

import pytest
from refusal_record import ours, read, refusals, settings


def test_every_algorithm_is_refused_beside_what_the_record_says() -> None:
    every, names = 12, [name for name, _ in settings()]
    tried = {(setting, name) for number, name in enumerate(ours()) for setting in names[number % every :: every]}
    known = {(setting, moment, name) for setting, moment, name in read() if (setting, name) in tried}
    assert {refusal[:3] for refusal in refusals(ours(), every)} == known


@pytest.mark.night
def test_every_algorithm_is_refused_beside_every_setting_as_the_record_says() -> None:
    assert {refusal[:3] for refusal in refusals(ours())} == read()
