import socket

import pytest

from multilora_engine.errors import ConfigError
from multilora_engine.tritonserver.arguments import Addresses, resolve_addresses


def test_zero_becomes_three_different_free_ports() -> None:
    addresses = resolve_addresses("127.0.0.1", 0, 0, 0)
    ports = {addresses.http_port, addresses.grpc_port, addresses.metrics_port}
    assert len(ports) == 3
    assert 0 not in ports


def test_a_taken_port_is_named_with_the_option_that_changes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"gRPC port {port} on 127\.0\.0\.1: .*in use; give --grpc-port"):
            resolve_addresses("127.0.0.1", 0, port, 0)


@pytest.mark.parametrize("host", ["::1", "nohost.invalid", "192.0.2.1", "127.0.0.1:80", "http://127.0.0.1"])
@pytest.mark.parametrize("port", [0, 8000])
def test_a_host_that_cannot_be_is_blamed_and_not_its_port(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match=rf"^nobody can listen at the host {host}: .*; give --host an IPv4 address"):
        resolve_addresses(host, port, port, port)
    with pytest.raises(ConfigError, match=rf"^nobody can listen at the host {host}: "):
        resolve_addresses("127.0.0.1", 0, 0, 0, http_host=host)


def test_the_same_port_twice_is_refused() -> None:
    port = resolve_addresses("127.0.0.1", 0, 0, 0).http_port
    with pytest.raises(ConfigError, match=f"metrics port {port}"):
        resolve_addresses("127.0.0.1", port, 0, port)


def test_a_server_on_every_address_is_reached_on_the_loopback() -> None:
    addresses = Addresses("0.0.0.0", 8000, 8001, 8002, http_host="0.0.0.0")
    assert addresses.http_url == "127.0.0.1:8000"
    assert addresses.grpc_url == "127.0.0.1:8001"
    assert addresses.metrics_url == "http://127.0.0.1:8002/metrics"


def test_http_may_listen_elsewhere() -> None:
    addresses = resolve_addresses("0.0.0.0", 0, 0, 0, http_host="127.0.0.2")
    assert addresses.http_url == f"127.0.0.2:{addresses.http_port}"
    assert addresses.grpc_url == f"127.0.0.1:{addresses.grpc_port}"
