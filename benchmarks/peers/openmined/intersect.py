"""Seconds of a private set intersection by OpenMined's PSI, client and server in one process: one line of JSON.

    python intersect.py PEOPLE

Half of the people are common. The server's set travels whole (RAW), so that the result is exact, as Hansa's.
"""

import json
import sys
import time
from importlib.metadata import version

import private_set_intersection.python as psi

people = int(sys.argv[1])
ours = [f"person-{number}" for number in range(people)]
theirs = [f"person-{number}" for number in range(people // 2, people // 2 + people)]
begin, worked = time.perf_counter(), time.process_time()
client, server = psi.client.CreateWithNewKey(True), psi.server.CreateWithNewKey(True)
setup = server.CreateSetupMessage(1e-9, people, theirs, psi.DataStructure.RAW)
response = server.ProcessRequest(client.CreateRequest(ours))
common = client.GetIntersection(setup, response)
times = {"wall": time.perf_counter() - begin, "cpu": time.process_time() - worked}
assert sorted(common) == list(range(people // 2, people))
print(json.dumps({**times, "version": version("openmined.psi")}))
