"""A transform for each group of layers: by patterns of their names, in Python and in files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_compressed_runs import run
from torch import Tensor

import hansa
from digits import digits
from hansa.core.op import like
from hansa.experiment.config import parse_set, read
from hansa.local import Controlled
from hansa.plumbing.errors import ConfigError
from hansa.testing import check_transform
from hansa.testing.transforms import _party as party
from hansa.transforms import ByLayer, ErrorFeedback, IdentityTransform, Int8, RandK, TopK, Transform

LAYERS = [("0.weight", 120), ("0.bias", 30), ("2.weight", 90), ("2.bias", 3)]
TABLE = {"*.bias": "identity", "0.*": {"name": "top-k", "k": 7}, "*": "int8"}


def vector() -> Tensor:
    return torch.randn(243, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def fitted() -> Transform:
    rules: tuple[Transform, ...] = (IdentityTransform(), TopK(k=7), Int8())
    return ByLayer(tuple(TABLE), rules).of_model(LAYERS)


def test_each_parameter_is_packed_by_the_first_pattern_that_matches_it() -> None:
    rule, value = fitted(), vector()
    parts, _ = rule.pack(party(1), "w", value, None)
    assert set(parts) == {"0.value", "1.values", "1.places", "2.codes", "2.scales"}
    opened = rule.open(parts, like(value))
    assert torch.equal(opened[120:150], value[120:150]) and torch.equal(opened[240:], value[240:])
    assert int((opened[:120] != 0).sum()) == 7
    assert 0 < float((opened - value)[150:240].abs().max()) < 0.05


def test_the_parameters_of_a_pattern_are_one_vector() -> None:
    rule = ByLayer(("*.bias", "*"), (IdentityTransform(), TopK(k=5))).of_model(LAYERS)
    opened = rule.open(rule.pack(party(1), "w", vector(), None)[0], like(vector()))
    weights = torch.cat([vector()[:120], vector()[150:240]]).abs()
    kept = torch.cat([opened[:120], opened[150:240]]) != 0
    assert set(kept.nonzero().flatten().tolist()) == set(weights.topk(5).indices.tolist())


@pytest.mark.slow
def test_the_errors_of_groups_are_remembered_apart() -> None:
    rule = ByLayer(("0.*", "*"), (ErrorFeedback(TopK(k=5)), Int8())).of_model(LAYERS)
    _, memory = rule.pack(party(1), "w", vector(), None)
    assert isinstance(memory, dict) and set(memory) == {"0"} and memory["0"].shape == (150,)
    again = rule.open(rule.pack(party(1), "w", torch.zeros(243).double(), memory)[0], like(vector()))
    assert int((again[:150] != 0).sum()) == 5 and not bool(again[150:].any())
    check_transform(ByLayer(transforms=(ErrorFeedback(TopK(k=3)),)))


@pytest.mark.parametrize("algorithm", [hansa.FedAvg(), hansa.Scaffold(local=Controlled(lr=0.1, steps=2)),
                                       hansa.FedAvg(fusion="median"), hansa.FedBuff(buffer=2)], ids=repr)  # type: ignore[arg-type]  # fmt: skip
def test_every_engine_gives_the_same_model(algorithm: hansa.Algorithm) -> None:
    table = {**TABLE, "0.*": {"name": "error-feedback", "inner": {"name": "top-k", "k": 7}}}
    reference, stacked = (run(algorithm, compress=table, engine=engine) for engine in ("reference", "stacked"))
    torch.testing.assert_close(reference.state.params.w, stacked.state.params.w, rtol=0, atol=1e-9)
    assert all("rejected" not in line for line in reference.history)


def test_parties_with_layers_of_their_own_send_the_others() -> None:
    algorithm = hansa.FedPer()
    done = run(algorithm, compress={"0.weight": "int8", "*": "identity"})
    assert all(line["replies"] == 6 for line in done.history)
    with pytest.raises(ConfigError, match=r"no parameter is left for the pattern '2\.\*'; the parties send: 0\.weight"):
        run(algorithm, compress={"2.*": "int8", "*": "identity"})


def test_groups_that_commute_with_sums_work_with_a_secure_sum() -> None:
    private = {"secure": "masking", "range": 8.0}
    adds = {"*.bias": "identity", "*": {"name": "rand-k", "share": 0.2, "shared": True}}
    assert all("empty" not in line for line in run(compress=adds, privacy=private).history)
    with pytest.raises(ConfigError, match="'by-layer' sends numbers that cannot be added"):
        run(compress=TABLE, privacy=private)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: run(compress={"0.*": "int8"}), "run.compress: no pattern matches the parameter '2.weight'; add one"),
        (lambda: run(compress={"conv*": "int8", "*": "int8"}), "no parameter is left for the pattern 'conv"),
        (lambda: run(compress={"*": "int9"}), "unknown transform 'int9'"),
        (
            lambda: run(compress={"*": {"name": "top-k", "k": 1000}}),
            "top-k: k is 1000, and there are 243",
        ),
        (lambda: run(compress={"*": "clip"}), "by-layer: clip works on whole updates"),
        (lambda: run(compress={"*": {"*": "int8"}}), "by-layer: by-layer works on whole updates"),
        (lambda: run(compress={"block": 7}), "the transform needs a name"),
        (lambda: ByLayer(("*",), ()), "1 patterns and 0 transforms"),
        (lambda: ByLayer(spans=((3, 1),)), "each of `spans` is the number of a transform and a length"),
        (lambda: ErrorFeedback(ByLayer(transforms=(RandK(),))), "the error of by-layer can exceed the vector"),
    ],
)
def test_tables_that_cannot_work_are_refused(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason.replace("*", r"\*")):
        make()


def test_a_file_and_the_command_line_name_the_transforms_of_layers(tmp_path: Path) -> None:
    (tmp_path / "layers.toml").write_text(
        digits(3, "2nn", rounds=1, compress={
            "*bias": "identity", "*": {"name": "error-feedback", "inner": {"name": "top-k", "share": 0.05}}
        })
    )  # fmt: skip
    experiment = read(tmp_path / "layers.toml")
    compress = experiment.run.compress
    assert compress == ByLayer(("*bias", "*"), (IdentityTransform(), ErrorFeedback(TopK(share=0.05))))
    changed = read(tmp_path / "layers.toml", parse_set(["run.compress.*bias=int8"]))
    assert changed.run.compress == ByLayer(("*bias", "*"), (Int8(), ErrorFeedback(TopK(share=0.05))))
