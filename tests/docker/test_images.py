"""The Dockerfiles and the compose file keep the promises of docker/README.md. `try_images` carries them out."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.dockerfiles import Instruction, read_dockerfile

DOCKER = Path(__file__).parents[2] / "docker"
PROXY = DOCKER / "proxy.Dockerfile"
SERVERS = sorted(set(DOCKER.glob("*.Dockerfile")) - {PROXY})
SERVICES = {"multilora": "cpu", "openai": "cpu", "proxy": "proxy"}
"""Our own services of the compose file, by the Dockerfile that they run."""

every_image = pytest.mark.parametrize("dockerfile", [*SERVERS, PROXY], ids=lambda path: path.stem)
every_server = pytest.mark.parametrize("dockerfile", SERVERS, ids=lambda path: path.stem)


def instructions(dockerfile: Path, name: str) -> list[Instruction]:
    return [instruction for instruction in read_dockerfile(dockerfile) if instruction.name == name]


def last_stage(dockerfile: Path) -> list[Instruction]:
    everything = read_dockerfile(dockerfile)
    start = max(i for i, instruction in enumerate(everything) if instruction.name == "FROM")
    return everything[start:]


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load((DOCKER / name).read_text())["services"]
    return services


@every_image
def test_it_ends_as_an_ordinary_user(dockerfile: Path) -> None:
    users = [instruction.arguments for instruction in last_stage(dockerfile) if instruction.name == "USER"]
    assert users[-1] == "10001:10001"


@every_server
def test_the_canary_is_the_health_check(dockerfile: Path) -> None:
    (check,) = instructions(dockerfile, "HEALTHCHECK")
    assert check.arguments.endswith('CMD ["multilora-serve", "probe"]')


@every_image
def test_what_it_copies_is_in_the_build_context(dockerfile: Path) -> None:
    ignored = (DOCKER.parent / ".dockerignore").read_text().splitlines()
    sources = [i.arguments.split()[0].rstrip("/") for i in instructions(dockerfile, "COPY")]
    from_context = [source for source in sources if not source.startswith("--from")]
    assert from_context
    assert all(f"!{source}" in ignored and (DOCKER.parent / source).exists() for source in from_context)


@every_server
def test_every_install_keeps_to_the_pins(dockerfile: Path) -> None:
    runs = " ".join(instruction.arguments for instruction in instructions(dockerfile, "RUN"))
    installs = runs.split("pip install ")[1:]
    assert installs
    assert all("-c constraints.txt" in install.split("&&")[0] for install in installs)


@every_server
def test_the_operators_are_compiled_into_it_and_found_there(dockerfile: Path) -> None:
    settings = [i.arguments for i in instructions(dockerfile, "ENV") if "MULTILORA_KERNELS_CACHE" in i.arguments]
    builds = [i for i in instructions(dockerfile, "RUN") if "-m multilora_kernels.cpu" in i.arguments]
    assert len(builds) == 1
    assert settings
    assert all("MULTILORA_KERNELS_CACHE=/opt/multilora/kernels" in setting for setting in settings)


@pytest.mark.parametrize(("service", "image"), SERVICES.items())
def test_compose_takes_away_what_the_services_do_not_need(service: str, image: str) -> None:
    settings = compose()[service]
    assert settings["read_only"] is True
    assert settings["cap_drop"] == ["ALL"]
    assert settings["security_opt"] == ["no-new-privileges:true"]
    assert settings["user"] == instructions(DOCKER / f"{image}.Dockerfile", "USER")[-1].arguments


def test_compose_publishes_on_the_loopback_only() -> None:
    ports = [port for service in compose().values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_in_compose_the_proxy_is_the_only_door_to_the_server() -> None:
    server = compose()["multilora"]
    assert (server["network_mode"], "ports" in server) == ("service:proxy", False)
    host = server["command"].index("--host")
    assert server["command"][host + 1] == "127.0.0.1"
    published = {port.split(":")[2] for port in compose()["proxy"]["ports"]}
    assert published == {"8080", "8081", "9000"}


def test_in_compose_the_server_reads_the_secret_that_the_proxy_draws() -> None:
    services = compose()
    assert "secret:/secret" in services["proxy"]["volumes"]
    assert "secret:/secret:ro" in services["multilora"]["volumes"]
    assert "client_header_secret_file=/secret/client" in services["multilora"]["command"]
    assert services["multilora"]["depends_on"]["proxy"]["condition"] == "service_healthy"
    assert [instruction.arguments for instruction in instructions(PROXY, "VOLUME")] == ["/secret"]


def test_the_proxy_draws_a_secret_once_for_itself_and_the_server(tmp_path: Path) -> None:
    (entrypoint,) = instructions(PROXY, "ENTRYPOINT")
    start = DOCKER / "proxy" / Path(json.loads(entrypoint.arguments)[0]).name
    assert os.access(start, os.X_OK)
    script, secret, nginx = tmp_path / "start", tmp_path / "client", tmp_path / "nginx"
    script.write_text(start.read_text().replace("/secret/", f"{tmp_path}/"))
    nginx.write_text("#!/bin/sh\necho nginx $*")
    nginx.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    drawn = []
    for _ in range(2):
        said = subprocess.run(["sh", script], env=environment, capture_output=True, text=True, check=True).stdout
        assert said == "nginx -c /etc/multilora-proxy/nginx.conf\n"
        drawn.append(secret.read_text())
    assert drawn[0] == drawn[1]
    assert re.fullmatch("[0-9a-f]{64}", drawn[0])
    assert secret.stat().st_mode & 0o777 == 0o600


def test_compose_builds_the_proxy() -> None:
    assert compose()["proxy"]["build"]["dockerfile"] == f"docker/{PROXY.name}"


def test_the_proxy_finishes_what_is_under_way_when_it_is_stopped() -> None:
    assert [instruction.arguments for instruction in instructions(PROXY, "STOPSIGNAL")] == ["SIGQUIT"]


@every_server
def test_compose_builds_it(dockerfile: Path) -> None:
    name = "compose.gpu.yaml" if dockerfile.stem == "gpu" else "compose.yaml"
    assert compose(name)["multilora"]["build"]["dockerfile"] == f"docker/{dockerfile.name}"


def test_compose_with_a_gpu_keeps_compiled_kernels_and_takes_no_cpu_in_its_place() -> None:
    base, gpu = compose()["multilora"], compose("compose.gpu.yaml")["multilora"]
    assert sorted(gpu["command"]) == sorted([*base["command"], "--set", "device=cuda"])
    assert f"compiled:{gpu['environment']['TRITON_CACHE_DIR']}" in gpu["volumes"]
