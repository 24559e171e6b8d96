"""One MLflow server for all tests that want one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mlflow_process import Server


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("mlflow", reason="the extra hansa[mlflow] is not installed")
    server = Server(tmp_path_factory.mktemp("mlflow"))
    server.start()
    server.ready()
    yield server
    server.kill()
