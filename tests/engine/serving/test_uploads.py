from __future__ import annotations

import dataclasses

import pytest
from support.fake_engine import INFO

from multilora_engine.errors import TooManyUploadBytes, TooManyUploads
from multilora_engine.request import Sender
from multilora_engine.serving.uploads import Uploads

LIMITS = dataclasses.replace(INFO, max_adapter_bytes=100)


@pytest.mark.parametrize("sender", [Sender(name="one"), Sender(key_id="operator")])
def test_a_known_client_may_send_so_many_whatever_their_sizes_and_what_others_send(sender: Sender) -> None:
    uploads = Uploads()
    for other in (Sender(), Sender(name="other")):
        uploads.begin(other, 100, LIMITS)
        uploads.begin(other, 100, LIMITS)
    end = uploads.begin(sender, 1, LIMITS)
    uploads.begin(sender, 100, LIMITS)
    with pytest.raises(TooManyUploads, match="2 adapters of this client"):
        uploads.begin(sender, 1, LIMITS)
    end()
    uploads.begin(sender, 100, LIMITS)


def test_unknown_clients_share_the_bytes_that_one_known_client_may_send() -> None:
    uploads = Uploads()
    ends = [uploads.begin(Sender(), 20, LIMITS) for _ in range(10)]
    with pytest.raises(TooManyUploadBytes, match=r"has 1 bytes, 200 of clients .* may have 200$"):
        uploads.begin(Sender(), 1, LIMITS)
    ends[0]()
    uploads.begin(Sender(), 20, LIMITS)
