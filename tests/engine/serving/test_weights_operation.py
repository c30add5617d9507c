"""The operation `weights` is for the people who run the server."""

from __future__ import annotations

from typing import Literal

import pytest

from multilora_client.keys import Caller, KeyEntry
from multilora_engine.errors import PermissionDenied
from multilora_engine.process.operations import SwitchWeights
from multilora_engine.request import Sender
from multilora_engine.serving.adapters_model import grant_operation
from multilora_engine.serving.senders import Rights

KEY = "k" * 32


@pytest.mark.parametrize("action", ["list", "pack", "unpack"])
def test_only_the_people_who_run_the_server_see_and_switch_weights(action: Literal["list", "pack", "unpack"]) -> None:
    operation = SwitchWeights(action)
    for caller in (None, Caller(KeyEntry(key=KEY, base_model=True, operate=True))):
        assert grant_operation(operation, Rights(Sender(), 0, caller)) is operation
    for entry in (KeyEntry(key=KEY, tenant="acme", operate=True), KeyEntry(key=KEY, base_model=True)):
        with pytest.raises(PermissionDenied, match="the weights are of all tenants"):
            grant_operation(operation, Rights(Sender(), 0, Caller(entry)))
