"""The rows of the table of abuse that the proxy is for."""

from __future__ import annotations

import re

import httpx2
import psutil
import pytest

from multilora_engine.tritonserver import ServerProcess
from servers.local_proxy import LocalProxy
from trials.door_attacks import (
    ask_for_classes,
    ask_for_errors_of_grpc,
    continue_headers_without_end,
    hold_idle_connections,
    open_ten_thousand_streams,
    ping_without_end,
    reset_streams_without_end,
    send_a_message_of_two_gigabytes,
    send_compressed_zeros,
    send_deep_json,
    send_five_million_strings,
    send_shapes_beyond_the_values,
    set_without_end,
    weigh_an_encoding_beyond_numbers,
)
from trials.doors import Attack, Doors


@pytest.mark.parametrize(
    ("attack", "met", "max_growth_mib"),
    [
        (send_deep_json, "HTTP 400", 64),
        (send_compressed_zeros, "UNIMPLEMENTED: compressed messages are not taken|UNAVAILABLE: GOAWAY received.*", 64),
        (hold_idle_connections, r"20\d\d of 2200 closed", 64),
        (send_a_message_of_two_gigabytes, "RESOURCE_EXHAUSTED: too large: .*", 320),
        (ask_for_classes, "2 x HTTP 400, .* UNIMPLEMENTED.*|.*1 x UNSUPPORTED.*", 64),
        (send_shapes_beyond_the_values, "2 x HTTP 400", 64),
        (weigh_an_encoding_beyond_numbers, "HTTP 200", 64),
        (ask_for_errors_of_grpc, ".* x an error.*", 64),
        (send_five_million_strings, "1 x INVALID_ARGUMENT", 128),
        (reset_streams_without_end, r"[12] x (closed|not read any more).*", 64),
        (ping_without_end, r"[12] x (closed|not read any more).*", 64),
        (set_without_end, r"[12] x (closed|not read any more).*", 64),
        (continue_headers_without_end, r"[12] x (closed|not read any more).*", 64),
        (open_ten_thousand_streams, r"9872 of 10000 refused|connection closed after [1-9]\d* of 10000 refused", 64),
    ],
)
def test_through_the_proxy_an_attack_meets_a_limit_and_costs_the_server_little(
    proxied_server: ServerProcess, proxy: LocalProxy, attack: Attack, met: str, max_growth_mib: int
) -> None:
    """A body without a length in its head passes until it has the 256 MiB that a request may have."""
    process = psutil.Process(proxied_server.pid)
    bytes_before = process.memory_info().rss
    assert re.fullmatch(met, attack(Doors(proxy.http_url, proxy.grpc_url)))
    assert process.memory_info().rss < bytes_before + (max_growth_mib << 20)
    assert httpx2.get(f"http://{proxied_server.http_url}/v2/health/ready").status_code == 200
