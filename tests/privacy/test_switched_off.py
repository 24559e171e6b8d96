"""No setting is accepted that another one switches off: such a pair is refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hansa
from hansa.experiment.settings import Run
from hansa.net.party.floor import Floor
from hansa.net.party.policy import Policy
from hansa.plumbing.errors import ConfigError
from hansa.secure import Masking
from hansa.secure.masking_ops import SecureKeys, SecureShares
from hansa.secure.paillier_sum import PaillierOpen
from hansa.secure.routing import RouteKeys
from hansa.testing import experiment_for


def run(privacy: Any = None, **settings: Any) -> Any:
    experiment = experiment_for(hansa.FedAvg())
    given = {**experiment.settings(), "engine": "reference", "rounds": 1, "eval_parties": False, **settings}
    return hansa.simulate(hansa.FedAvg(), experiment.build_task(), **{**given, "privacy": privacy})


@pytest.mark.parametrize("privacy", [{"secure": "masking"}, {"bound": 1e-3}, {"dp": {"kind": "central", "sigma": 1.0}}])
def test_a_protocol_beside_settings_of_privacy_is_refused(privacy: dict[str, Any]) -> None:
    """In 0.1.0 the protocol ran, and the secure sum and the bound were left out silently."""
    with pytest.raises(ConfigError, match="protocol= takes over every sum"):
        run(privacy, protocol=Masking())


def test_a_protocol_alone_and_a_bound_with_a_secure_sum_are_kept() -> None:
    start = run(privacy={"bound": 1e-9}).state.params.w
    far = run(protocol=Masking()).state.params.w
    near = run(privacy={"bound": 1e-3, "secure": "masking"}).state.params.w
    assert torch.linalg.vector_norm(far - start) > 0.01
    assert 1e-6 < torch.linalg.vector_norm(near - start) <= 1.01e-3


DP = {"kind": "central", "sigma": 1.0}
PAIRS: list[tuple[Any, dict[str, Any], str]] = [
    ({"secure": "masking"}, {"max_weight": 100}, "set privacy.max_weight"),
    ({"dp": DP}, {"max_weight": 100}, "set privacy.dp.weight_cap"),
    ({"secure": "masking"}, {"max_norm": 1.0}, "privacy.bound"),
    (
        {"secure": "masking", "threshold": 0.7, "active": False},
        {"min_cohort": 4},
        r"run.min_cohort is .* set privacy.threshold = 1",
    ),
    ({"secure": "paillier"}, {"min_cohort": 3}, r"run.min_cohort is .* set privacy.min_parties = 3"),
    ({"dp": {**DP, "clip_rate": 0.5}}, {}, "set quantile too"),
    ({"dp": {**DP, "sigma_b": 0.5}}, {}, "set quantile too"),
    ({"dp": {**DP, "total_weight": 5.0}}, {}, "set weight_cap too"),
    ({"dp": DP, "bound": 1.0}, {}, "leave one out"),
    ({"bits": 8}, {}, "is a field of a secure sum"),
    ({"secure": "masking", "neighbours": 2}, {}, "neighbours"),
    ({"secure": Masking(), "bits": 8}, {}, "set the field on that object"),
    (None, {"cohort": 0.5, "cohort_size": 2}, "cohort = 0.5 has no effect while cohort_size is 2"),
    (None, {"force": True}, "give resume=True too"),
]


@pytest.mark.parametrize(("privacy", "settings", "reason"), PAIRS)
def test_a_pair_of_settings_of_which_one_would_be_ignored_is_refused(privacy: Any, settings: dict[str, Any],
                                                                     reason: str) -> None:  # fmt: skip
    with pytest.raises(ConfigError, match=reason):
        run(privacy, **settings)


def test_a_secure_sum_that_is_neither_a_name_nor_a_table_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"privacy\.secure: expected a secure sum by name or as a table, got 7"):
        run({"secure": 7})


def test_what_a_refusal_of_a_least_cohort_recommends_is_accepted() -> None:
    for size in (3, 4):
        wanted = {"cohort_size": size, "min_cohort": size}
        with pytest.raises(ConfigError, match=r"run.min_cohort") as found:
            run({"secure": "masking", "threshold": 0.51, "active": False}, **wanted)
        threshold = float(str(found.value).rpartition("= ")[2])
        assert (
            run({"secure": "masking", "threshold": threshold, "active": False}, **wanted).history[0]["replies"] == size
        )


def test_a_party_that_names_its_peers_refuses_sums_that_do_not_show_who_they_are() -> None:
    pins = {"bob": "0" * 64}
    for policy in (Policy(peers=pins), Policy(peers=pins, privacy=Floor(active=True))):
        for op in (SecureKeys(), SecureShares(3, 0.7, 2), PaillierOpen()):
            assert "names its peers" in str(policy.refuses_op(op))
        assert policy.refuses_op(SecureKeys(active=True)) is None
    assert Policy(peers=pins).refuses_op(RouteKeys()) is None
    assert Policy().refuses_op(SecureKeys()) is None


@pytest.mark.parametrize(
    ("privacy", "reason"),
    [
        ({"secure": "masking"}, r"d-psgd: its parties send messages to each other.*leave privacy\.secure"),
        ({"bound": 1.0}, "privacy.bound: parties bound updates that are summed, and d-psgd does something else"),
    ],
    ids=["secure", "bound"],
)
def test_messages_between_parties_are_not_part_of_a_secure_sum(privacy: dict[str, Any], reason: str) -> None:
    experiment = experiment_for(hansa.DecentralizedSGD())
    with pytest.raises(ConfigError, match=reason):
        hansa.simulate(experiment.algorithm, experiment.build_task(), rounds=1, privacy=privacy)


def test_each_of_two_settings_alone_is_accepted() -> None:
    for settings in ({"cohort": 0.5}, {"cohort_size": 2}, {"max_weight": 3}):
        Run(**settings)
