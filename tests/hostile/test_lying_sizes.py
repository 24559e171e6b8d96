"""Parties that send more than the bound of an open dimension: rejected by name, and a long upload is cut off."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from kit import AGGREGATOR, Stage, experiment, samples
from liars import answer

from hansa.plumbing import codec

pytestmark = pytest.mark.slow

PLUGINS = Path(__file__).parents[1] / "plugins"
HONEST = "test_lying_sizes:is_honest"


def is_honest() -> None:
    """Know the plug-in whose parties send as many rows as they hold classes."""
    sys.path.insert(0, str(PLUGINS))
    importlib.import_module("prototypes")


def sends_rows(count: int) -> None:
    is_honest()

    def change(op, payload, reply):  # type: ignore[no-untyped-def]
        if "rows" in reply.tensors:
            reply.tensors["rows"] = torch.zeros(count, reply.tensors["rows"].shape[1], dtype=torch.float64)
        return reply

    answer(change)


def sends_one_row_more() -> None:
    sends_rows(3)


def sends_megabytes() -> None:
    sends_rows(10**6)


def test_parties_that_send_more_than_their_bound_are_left_out_by_name(tmp_path: Path) -> None:
    is_honest()
    parties = {name: samples(seed=seed) for seed, name in enumerate(("ann", "bob", "cid", "dan"))}
    lies = dict.fromkeys((AGGREGATOR, *parties), HONEST)
    lies |= {"bob": "test_lying_sizes:sends_one_row_more", "cid": "test_lying_sizes:sends_megabytes"}
    with Stage(tmp_path, parties, lies=lies) as stage:
        job = stage.run({**experiment(), "algorithm": {"name": "plugin-prototypes"}})
        model = codec.decode(stage.operator.pull(job["job"], tmp_path / "model").read_bytes())
        stored = sum(path.stat().st_size for path in (tmp_path / "federation" / "state").rglob("*") if path.is_file())
    assert job["status"] == "finished", job["reason"]
    for line in job["rounds"]:
        assert line["asked"] == 4 and line["replies"] == 2
        assert line["rejected"] == {"bob": "rows has the shape (3, 5), expected (up to 2, 5)"}
        (name,), (why,) = zip(*line["missing"].items(), strict=True)
        assert name == "cid" and "the upload is longer than the limit of" in why
        limit = int(why.split("limit of ")[1].split()[0])
        assert 2 * 5 * 8 < limit < 2**17  # two rows, the names, and the allowance for metrics
    assert stored < 4 * 10**6  # nothing of the 40 MB of each upload is kept
    x, y = (torch.cat([torch.as_tensor(parties[name][k]) for name in ("ann", "dan")]) for k in (0, 1))
    means = torch.stack([x[y == c].double().mean(0) for c in (0, 1)])
    assert torch.allclose(model["payload"]["mean"], means, rtol=0, atol=1e-12)
