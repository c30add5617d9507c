from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.fake_triton import FakeRequest

from multilora_engine.engine_info import ClientPolicy
from multilora_engine.errors import ConfigError, InvalidRequest, PermissionDenied, Unauthenticated
from multilora_engine.lora.names import TenantTaskId, task_id_of
from multilora_engine.request import GenerationRequest, SamplingParams, Sender
from multilora_engine.serving.senders import Rights, SenderBook

KEY = "a key of sixteen"
SECRET = "0123456789abcdef"


class RawRequest(FakeRequest):
    """Has the parameters as the server writes them: those of headers after the client's own, of equal names, too."""

    def __init__(self, *pairs: tuple[str, str]) -> None:
        super().__init__({})
        self._text = "{" + ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in pairs) + "}"

    def parameters(self) -> str:
        return self._text


class UndecodableRequest(FakeRequest):
    def parameters(self) -> str:
        return b"\xff".decode()


def book(**policy: Any) -> SenderBook:
    return SenderBook(ClientPolicy(**policy), max_metadata_bytes=1000)


def rights_of(tmp_path: Path, **entry: Any) -> Rights:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"key": KEY, **entry}]}))
    return book(api_keys_file=str(path)).rights(RawRequest(("authorization", f"Bearer {KEY}")))


def test_without_keys_everybody_may_do_everything() -> None:
    rights = book().rights(RawRequest())
    assert rights.sender == Sender()
    assert rights.scope.is_everything
    assert rights.adapter_tenant(7, "") == rights.adapter_tenant(None, "") == ""
    assert rights.uploaded_task_id(7, "") == 7


@pytest.mark.parametrize("name", ["X-Multilora-Client", "x-multilora-client"])
def test_a_proxy_names_the_client_in_its_header(name: str) -> None:
    assert book().rights(RawRequest((name, "alice"))).sender == Sender(name="alice")


def test_a_client_that_names_itself_beside_the_proxy_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="has 2 values; the proxy alone sets it"):
        book().rights(RawRequest(("X-Multilora-client", "victim"), ("X-Multilora-Client", "alice")))


def test_where_the_proxy_has_a_secret_nobody_else_names_a_client(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    proxied = book(client_header_secret_file=str(file))
    assert proxied.rights(RawRequest(("x-multilora-client", f"{SECRET} alice"))).sender.name == "alice"
    assert proxied.rights(RawRequest()).sender.name == ""
    for forged in ("alice", f"{SECRET[:-1]} alice", " alice", f"{SECRET}alice"):
        with pytest.raises(InvalidRequest, match="not from the proxy"):
            proxied.rights(RawRequest(("x-multilora-client", forged)))


@pytest.mark.parametrize(
    ("text", "message"), [(None, "cannot be read"), ("short", "16 letters"), ("with a space in it", "16 letters")]
)
def test_a_secret_that_cannot_be_one_is_a_mistake_of_the_configuration(
    tmp_path: Path, text: str | None, message: str
) -> None:
    file = tmp_path / "secret"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=f"parameter client_header_secret_file: .*{message}"):
        book(client_header_secret_file=str(file))


@pytest.mark.parametrize("name", ["x" * 129, "a\nb", "\x1b[31m"])
def test_a_name_that_logs_cannot_show_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="can be printed"):
        book().rights(RawRequest(("x-multilora-client", name)))


def test_parameters_that_are_no_text_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        book().rights(UndecodableRequest({}))


def test_a_key_comes_by_header_or_in_the_body_and_the_header_counts(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"key": KEY, "tenant": "acme", "weight": 2, "tokens_per_minute": 5}]}))
    keyed = book(api_keys_file=str(path))
    for pairs in (
        [("Authorization", f"Bearer {KEY}")],
        [("authorization", f"Bearer {KEY}"), ("x-multilora-client", "somebody")],
        [("authorization", "Bearer other"), ("Authorization", f"Bearer {KEY}")],
    ):
        sender = keyed.rights(RawRequest(*pairs)).sender
        assert (sender.tenant, sender.name, sender.weight, sender.tokens_per_minute) == ("acme", "acme", 2.0, 5)
        assert KEY not in str(sender)
    for pairs in ([], [("authorization", KEY)], [("Authorization", f"Bearer {KEY}"), ("authorization", "Bearer x")]):
        with pytest.raises(Unauthenticated):
            keyed.rights(RawRequest(*pairs))


def test_keys_that_cannot_be_read_are_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"parameter api_keys_file: the API keys of \S*nowhere cannot be read"):
        book(api_keys_file=str(tmp_path / "nowhere"))


def test_the_base_model_and_adapters_are_what_the_key_may_use(tmp_path: Path) -> None:
    rights = rights_of(tmp_path, tenant="acme", adapters=["pirate", 100], own_adapters=[7])
    assert rights.adapter_tenant(7, "") == "acme"
    assert rights.adapter_tenant(100, "") == ""
    assert rights.adapter_tenant(task_id_of("pirate"), "") == ""
    assert rights.adapter_tenant(task_id_of("pirate"), "pirate") == ""
    for task_id, name in [(8, ""), (task_id_of("other"), "other"), (None, "")]:
        with pytest.raises(PermissionDenied):
            rights.adapter_tenant(task_id, name)


def test_a_tenant_sends_adapters_of_its_own_only_and_with_the_right_to(tmp_path: Path) -> None:
    sender = rights_of(tmp_path, tenant="acme", adapters=[100], upload=True)
    assert sender.uploaded_task_id(7, "") == TenantTaskId("acme", 7)
    with pytest.raises(PermissionDenied, match="100 is the server's own"):
        sender.uploaded_task_id(100, "")
    with pytest.raises(PermissionDenied, match="may not send LoRA weights"):
        rights_of(tmp_path, tenant="acme").uploaded_task_id(7, "")
    assert rights_of(tmp_path, adapters=["*"], upload=True).uploaded_task_id(7, "") == 7


def test_a_request_becomes_the_senders_with_the_priority_it_may_have(tmp_path: Path) -> None:
    request = GenerationRequest("r", [1], SamplingParams(1), lora_task_id=7, priority=-5)
    rights = rights_of(tmp_path, tenant="acme", priority=-2)
    granted = rights.grant(request, is_streaming=True)
    assert (granted.sender, granted.adapter_tenant, granted.priority) == (rights.sender, "acme", -2)
    assert granted.task_id == TenantTaskId("acme", 7)
    assert rights_of(tmp_path, tenant="acme").grant(request, is_streaming=True).priority == 0
    assert book(min_priority=-9).rights(RawRequest()).grant(request, is_streaming=True).priority == -5


def test_only_who_runs_the_server_chooses_the_path_of_an_adapter(tmp_path: Path) -> None:
    request = GenerationRequest("r", [1], SamplingParams(1), lora_task_id=7, lora_path="/adapters/pirate")
    with pytest.raises(PermissionDenied, match="may not choose the path of an adapter"):
        rights_of(tmp_path, tenant="acme").grant(request, is_streaming=True)
    assert book().rights(RawRequest()).grant(request, is_streaming=True).lora_path == "/adapters/pirate"


@pytest.mark.parametrize("has_keys", [False, True])
def test_only_who_has_the_canarys_key_is_the_canary(tmp_path: Path, has_keys: bool) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"key": KEY, "base_model": True}]}))
    policy = ClientPolicy(api_keys_file=str(path)) if has_keys else ClientPolicy()
    senders = SenderBook(policy, 1000, canary_key="f" * 32)
    assert senders.rights(RawRequest(("authorization", f"Bearer {'f' * 32}"))).sender.is_canary
    assert not senders.rights(RawRequest(("authorization", f"Bearer {KEY}"))).sender.is_canary
    if not has_keys:
        for header in ("", "Bearer ", "Bearer " + "f" * 31, "Bearer é"):
            assert not senders.rights(RawRequest(("authorization", header))).sender.is_canary
        with pytest.raises(InvalidRequest, match="half of a character"):
            senders.rights(RawRequest(("authorization", "Bearer \ud800")))


def test_without_a_canary_nobody_is_one() -> None:
    for header in ("", "Bearer ", "Bearer"):
        assert not book().rights(RawRequest(("authorization", header))).sender.is_canary


@pytest.mark.parametrize(
    ("name", "is_streaming", "account"), [("", True, ""), ("acme", True, "acme"), ("acme", False, "acme")]
)
def test_a_sender_who_is_known_or_streams_goes_by_its_name(name: str, is_streaming: bool, account: str) -> None:
    request = GenerationRequest("1", [1], SamplingParams(max_tokens=1))
    assert Rights(Sender(name=name), 0).grant(request, is_streaming).sender.account == account


def test_senders_of_no_name_whose_end_nobody_hears_have_an_account_that_no_name_is(tmp_path: Path) -> None:
    request = GenerationRequest("1", [1], SamplingParams(max_tokens=1))
    sender = Rights(Sender(), 0).grant(request, is_streaming=False).sender
    assert not sender.account.isprintable()
    assert (sender.name, sender.is_known) == ("", False)
    canary = Rights(Sender(is_canary=True), 0).grant(request, is_streaming=False).sender
    assert canary.account == ""
