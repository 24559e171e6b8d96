"""`make demo-net`: four hospitals and an aggregator as five processes on this machine, over mutual TLS.

It takes the steps that an operator takes: make a federation, serve it, enrol each hospital with its token and its own
file of patients, submit a job, pull the model. Then it simulates the same experiment with the reference engine and
compares the two model files byte by byte.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from hansa.artifacts.run_folder import MODEL
from hansa.experiment.config import parse, read
from hansa.experiment.tasks import divide, load_data
from hansa.net.aggregator.federation import FederationFolder, init
from hansa.net.local import all_run, free_port, processes
from hansa.net.operator import Operator
from hansa.plumbing.errors import ConfigError
from hansa.run.resume import execute

EXPERIMENT = """\
# Four hospitals, each with a file of its own. Simulate it with: hansa run {name}
[task]
parties = [{files}]
model = "logistic"
prepare = "standardise"
party_test = 0.25

[algorithm]
name = "fedavg"
local = {{ lr = 0.1, epochs = 1, batch = 16 }}

[run]
rounds = {rounds}
seed = 0
engine = "reference"
"""


def hospitals(folder: Path, rounds: int) -> tuple[list[str], Path]:
    """Write one file of patients per hospital and an experiment file. Returns the names and the experiment file."""
    heart = parse({"task": {"dataset": "heart", "model": "logistic"}})
    pairs, names = divide(load_data(heart), heart)
    assert names is not None
    for name, (x, y) in zip(names, pairs, strict=True):
        np.savez(folder / f"{name}.npz", x=x.numpy(), y=y.numpy())
    path = folder / "heart.toml"
    files = ", ".join(f'"{name}.npz"' for name in names)
    path.write_text(EXPERIMENT.format(name=path.name, files=files, rounds=rounds))
    return names, path


def run(out: Path, rounds: int = 30) -> bool:
    """Run the demonstration in a new folder. Returns whether both model files are the same, byte by byte."""
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; choose another folder with --out, or remove it")
    out.mkdir(parents=True, exist_ok=True)
    names, experiment = hospitals(out, rounds)
    port = free_port()
    federation = init(out / "heart", "heart", names, ["localhost"], port)
    print(f"made the federation {out}/heart: a certificate authority, an operator, {len(names)} enrolment tokens")
    commands: list[tuple[str, list[str], dict[str, str]]] = [("aggregator", ["serve", str(out / "heart")], {})]
    commands += [
        (name, ["join", federation.url, "--token-file", str(out / "heart" / "tokens" / f"{name}.token"), "--data",
                str(out / f"{name}.npz"), "--state", str(out / name)], {})
        for name in names
    ]  # fmt: skip
    began = time.monotonic()
    with processes(commands, out) as started:
        print(f"started {len(started)} processes: an aggregator at {federation.url}, and {', '.join(names)}")
        operator = Operator(FederationFolder.open(out / "heart"))
        operator.wait_until_served(check=lambda: all_run(started, out))
        job, notes = operator.submit(read(experiment), "heart")
        print(f"submitted {experiment} as the job {job}")
        for note in notes:
            print(f"  {note}")
        ended = operator.wait(job, _show, lambda: all_run(started, out))
        if ended["status"] != "finished":
            raise ConfigError(f"the job {ended['status']}: {ended['reason']}; the logs are in {out}")
        pulled = operator.pull(job, out / "deployed.safetensors")
    print(f"trained over mutual TLS in {time.monotonic() - began:.1f} s, processes included; logs: {out}/*.log")
    execute(read(experiment), out / "simulated")
    simulated = out / "simulated" / MODEL
    same = pulled.read_bytes() == simulated.read_bytes()
    if same:
        print(f"the model is bit-identical to the reference engine's: {pulled} and {simulated}")
    else:
        print(f"DIFFERENT: {pulled} is not bit-identical to {simulated}", file=sys.stderr)
    return same


def _show(line: dict[str, object]) -> None:
    if isinstance(line["round"], int) and (line["round"] == 1 or line["round"] % 10 == 0):
        print(f"  round {line['round']}: {line['replies']} of {line['asked']} replies, "
              f"accuracy {line['accuracy']:.3f}, loss {line['loss']:.4f}")  # fmt: skip
