"""The files of the deploy folder: no process is root, no party has an open port, secrets stay private."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from hansa.cli import network  # noqa: F401 (adds the commands of a federation)
from hansa.cli.app import app
from hansa.data.heart import SITES
from hansa.net.aggregator.jobs import REST
from hansa.net.aggregator.process import LAST
from hansa.net.transport.limits import Limits
from hansa.net.transport.listener import GOODBYE

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "hansa"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
TEMPLATES = sorted((CHART / "templates").iterdir())
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
PARTIES = {name: service for name, service in COMPOSE["services"].items() if name != "aggregator"}
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())


def known_commands() -> dict[str, set[str]]:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {name: {option for field in command.params for option in field.opts} for name, command in commands.items()}


def is_understood(words: list[str]) -> bool:
    """Whether `hansa WORDS` names a command, and only options that it has."""
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    known = known_commands()
    return words[0] in known and options <= known[words[0]] | {"--help"}


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, with continued lines joined and comments left out."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n", " ", lines)
    return [(head, rest.strip()) for head, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


DOCKERFILE = instructions((DEPLOY / "Dockerfile").read_text())


def last(name: str) -> str:
    return [rest for head, rest in DOCKERFILE if head == name][-1]


# The image


def test_the_image_runs_as_a_numbered_user_who_is_not_root() -> None:
    final = DOCKERFILE[max(i for i, (head, _) in enumerate(DOCKERFILE) if head == "FROM") :]
    assert [rest for head, rest in final if head == "USER"] == ["10001:10001"]


def test_the_image_starts_hansa_and_can_say_whether_it_is_well() -> None:
    assert json.loads(last("ENTRYPOINT")) == ["hansa"]
    probe = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    assert probe == ["python", "/opt/hansa/healthcheck.py"]
    assert ("COPY", "deploy/healthcheck.py /opt/hansa/healthcheck.py") in DOCKERFILE


def test_the_image_pipes_nothing_from_the_network_into_a_shell_and_adds_no_tools() -> None:
    for head, rest in DOCKERFILE:
        if head == "RUN":
            assert not re.search(r"\b(curl|wget|apt-get|apt)\b|\|\s*(ba)?sh\b", rest), rest


def test_no_secret_is_an_argument_or_in_the_environment_of_the_image() -> None:
    for head, rest in DOCKERFILE:
        if head in ("ARG", "ENV"):
            assert not re.search(r"token|secret|passw|_key\b|credential", rest, re.IGNORECASE), rest


def test_all_but_torch_is_checked_by_hash_and_nothing_else_is_installed() -> None:
    for head, rest in DOCKERFILE:
        for command in re.findall(r"\bpip\b[^&]*", rest) if head == "RUN" else []:
            if " download " in command:
                assert "--require-hashes" in command or command.rstrip().endswith("-r requirements/torch.txt")
            elif " install " in command:
                assert "--no-index" in command


def test_the_build_sees_only_what_it_copies() -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert ignored[0] == "*"
    allowed = [line[1:] for line in ignored if line.startswith("!")]
    copied = [
        word for head, rest in DOCKERFILE if head == "COPY" and "--from" not in rest for word in rest.split()[:-1]
    ]
    for name in copied:
        assert any(name == allow or name.startswith(f"{allow}/") for allow in allowed), name
    for allow in allowed:
        assert any(name == allow or name.startswith(f"{allow}/") for name in copied), allow
        assert (ROOT / allow).exists(), allow


# Compose


def test_compose_has_one_aggregator_and_the_four_hospitals() -> None:
    assert set(COMPOSE["services"]) == {"aggregator", *SITES}


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_service_is_not_root_and_can_change_nothing_but_its_state(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["user"] == "10001:10001"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service and "privileged" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    writable = [volume.split(":")[1] for volume in service["volumes"] if not volume.endswith(":ro")]
    assert writable == ["/state"]


def test_only_the_aggregator_publishes_a_port() -> None:
    assert COMPOSE["services"]["aggregator"]["ports"] == ["8443:8443"]
    for service in PARTIES.values():
        assert not {"ports", "expose", "network_mode"} & set(service)


@pytest.mark.parametrize("name", PARTIES)
def test_a_party_has_its_own_token_data_and_state_and_nobody_elses(name: str) -> None:
    service = PARTIES[name]
    assert service["secrets"] == [{"source": f"{name}_token", "target": "token"}]
    assert COMPOSE["secrets"][f"{name}_token"] == {"file": f"./federation/heart/tokens/{name}.token"}
    assert service["volumes"] == [f"{name}:/state", f"./data/{name}.csv:/data/party.csv:ro"]
    assert name in COMPOSE["volumes"]
    assert service["depends_on"] == {"aggregator": {"condition": "service_healthy"}}


def test_a_token_is_named_by_its_file_and_never_in_the_environment() -> None:
    for service in COMPOSE["services"].values():
        assert "environment" not in service and "env_file" not in service
    for service in PARTIES.values():
        command = service["command"]
        assert command[command.index("--token-file") + 1] == "/run/secrets/token"


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_service_runs_a_command_that_hansa_has(name: str) -> None:
    command = COMPOSE["services"][name]["command"]
    assert command[0] == ("serve" if name == "aggregator" else "join")
    assert is_understood(command), command


def test_what_compose_keeps_beside_itself_is_never_committed() -> None:
    assert {"/deploy/federation/", "/deploy/data/"} <= set((ROOT / ".gitignore").read_text().splitlines())


# systemd


def unit(path: Path) -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read_string(path.read_text())
    return parsed


def test_there_is_a_unit_for_each_role() -> None:
    assert [path.name for path in UNITS] == ["hansa-aggregator.service", "hansa-party@.service"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_is_hardened_and_comes_back_by_itself(path: Path) -> None:
    service = unit(path)["Service"]
    assert service["User"] == "hansa"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""
    assert service["UMask"] == "0077"
    assert service["StateDirectoryMode"] == "0700"
    for key in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "RestrictSUIDSGID"):
        assert service[key] == "yes", key
    assert service["Restart"] == "always"
    assert int(service["RestartSec"]) >= 1
    assert unit(path)["Unit"]["StartLimitIntervalSec"] == "0"
    assert unit(path)["Install"]["WantedBy"] == "multi-user.target"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_runs_a_command_that_hansa_has(path: Path) -> None:
    program, *words = shlex.split(unit(path)["Service"]["ExecStart"])
    assert program == "/opt/hansa/bin/hansa"
    assert words[0] == ("serve" if "aggregator" in path.name else "join")
    assert is_understood(words), words


def test_a_partys_unit_hands_over_the_token_as_a_credential_that_nobody_else_can_read() -> None:
    service = unit(DEPLOY / "systemd" / "hansa-party@.service")["Service"]
    assert service["LoadCredential"] == "token:/etc/hansa/%i.token"
    assert service["RuntimeDirectoryMode"] == "0700"
    *install, source, target = shlex.split(service["ExecStartPre"])
    assert install == ["/usr/bin/install", "-m", "0600"]
    assert source == "%d/token"
    assert f"--token-file {target} " in service["ExecStart"]


# The chart, by its structure


def actions(text: str) -> list[str]:
    text = re.sub(r"\{\{-?\s*/\*.*?\*/\s*-?\}\}", "", text, flags=re.DOTALL)
    return [action.strip() for action in re.findall(r"\{\{-?\s*(.*?)\s*-?\}\}", text, flags=re.DOTALL)]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_the_blocks_of_a_template_are_closed(path: Path) -> None:
    open_blocks = 0
    for action in actions(path.read_text()):
        word = action.split()[0]
        open_blocks += (word in ("if", "range", "with", "define")) - (word == "end")
        assert open_blocks >= 0, action
    assert open_blocks == 0


def test_a_template_includes_what_is_defined_and_reads_values_that_are_there() -> None:
    text = "\n".join(path.read_text() for path in TEMPLATES)
    defined = re.findall(r'define "([^"]+)"', text)
    assert len(defined) == len(set(defined))
    assert set(re.findall(r'include "([^"]+)"', text)) == set(defined)
    read = set(re.findall(r"\.Values\.([A-Za-z.]+)", text))
    for name in read:
        here: Any = VALUES
        for part in name.split("."):
            assert part in here, name
            here = here[part]
    # Each value is used: by itself, as part of a table, or through one of its fields.
    for top, value in VALUES.items():
        for name in [f"{top}.{key}" for key in value] if isinstance(value, dict) else [top]:
            assert any(one == name or one.startswith(f"{name}.") for one in read), name


def test_the_schema_names_the_values_and_refuses_others() -> None:
    def compare(schema: dict[str, Any], values: dict[str, Any], where: str) -> None:
        assert schema["additionalProperties"] is False, where
        assert set(schema["properties"]) - {"global"} == set(values), where
        for key, value in values.items():
            inner = schema["properties"][key]
            if "$ref" in inner:
                inner = whole["definitions"][inner["$ref"].rpartition("/")[2]]
            if "properties" in inner:
                compare(inner, value, f"{where}.{key}")

    whole = json.loads((CHART / "values.schema.json").read_text())
    compare(whole, VALUES, "values")


def test_every_container_of_the_chart_is_confined() -> None:
    text = "\n".join(path.read_text() for path in TEMPLATES if path.suffix == ".yaml")
    images = re.findall(r'include "hansa\.image" (\S+) \| nindent 10 \}\}\n +\{\{- include "hansa\.(\w+)"', text)
    assert len(images) == text.count('include "hansa.image"') == 4
    assert {follows for _, follows in images} == {"container"}
    assert text.count('include "hansa.pod"') == text.count("\n      initContainers:") == 2
    confined = (CHART / "templates" / "_helpers.tpl").read_text()
    for line in (
        "runAsNonRoot: true",
        "runAsUser: 10001",
        "readOnlyRootFilesystem: true",
        "allowPrivilegeEscalation: false",
        "drop: [ALL]",
        "automountServiceAccountToken: false",
        "fsGroupChangePolicy: OnRootMismatch",
    ):
        assert line in confined, line


def test_the_chart_gives_no_party_a_service_and_lets_nobody_in() -> None:
    parties = (CHART / "templates" / "parties.yaml").read_text()
    assert not re.search(r"kind: Service\b|containerPort|hostNetwork|hostPort", parties)
    policy = (CHART / "templates" / "networkpolicy.yaml").read_text()
    aggregator, party = policy.split("\n---\n")
    assert "ingress: []" in party and "ingress: []" not in aggregator
    assert policy.count("policyTypes: [Ingress, Egress]") == 2


def test_the_chart_keeps_the_addresses_of_those_who_come_from_outside() -> None:
    service = (CHART / "templates" / "aggregator.yaml").read_text().split("\n---\n")[0]
    guarded = service.partition('if ne .Values.aggregator.service.type "ClusterIP" }}')[2].partition("{{- end }}")[0]
    assert "\n  externalTrafficPolicy: Local\n" in guarded  # Kubernetes refuses it for a ClusterIP


def test_there_is_time_to_end_in_good_order_before_a_stop_is_forced() -> None:
    needed = max(Limits().shutdown, REST) + LAST + GOODBYE
    found = [
        re.search(pattern, (DEPLOY / path).read_text())
        for path, pattern in (
            ("systemd/hansa-aggregator.service", r"TimeoutStopSec=(\d+)"),
            ("compose.yaml", r"stop_grace_period: (\d+)s"),
            ("helm/hansa/templates/aggregator.yaml", r"terminationGracePeriodSeconds: (\d+)"),
        )
    ]
    assert all(one is not None and int(one[1]) >= needed + 10 for one in found)


def test_the_chart_runs_commands_that_hansa_has() -> None:
    parties = (CHART / "templates" / "parties.yaml").read_text()
    block = parties.partition("          args:\n")[2].partition("          # Ready")[0]
    assert is_understood(re.findall(r"^ +- (.+)$", block, flags=re.MULTILINE))
    assert (
        "args: [serve, {{ .Values.aggregator.federation }}/federation.toml]"
        in (CHART / "templates" / "aggregator.yaml").read_text()
    )


def test_chart_image_and_package_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert version is not None
    assert chart["appVersion"] == version[1]
    assert {service["image"] for service in COMPOSE["services"].values()} == {f"hansa:{version[1]}"}


# All of it


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_a_file_names_no_machine_but_the_public_and_the_invented(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for host in re.findall(r"https?://([A-Za-z0-9.-]+)", text):
        assert host in ("json-schema.org", "aggregator", "localhost") or host.endswith(
            (".example.org", "-aggregator")
        ), host
    for image in re.findall(r"^(?:FROM|\s*(?:image|repository):) (\S+)", text, flags=re.MULTILINE):
        assert image == "{{" or not re.match(r"[^/]*[.:][^/]*/", image), image
    assert not re.search(r"(?<![\w.}])/(home|root|work|Users|mnt)/", text)


def test_the_readmes_commands_are_commands_that_hansa_has() -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", (DEPLOY / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\\\n", " ", "\n".join(blocks))
    # `hansa WORD` in a shell, or what follows the service in `docker compose run`.
    found = re.findall(r"(?:bin/| )hansa ([a-z][a-z-]+ .*)|run --rm --no-deps aggregator (.+)", f" {text}")
    commands = [shlex.split(direct or inside, comments=True) for direct, inside in found]
    assert {command[0] for command in commands} >= {"init-federation", "submit", "pull"}
    for command in commands:
        assert is_understood(command), command
