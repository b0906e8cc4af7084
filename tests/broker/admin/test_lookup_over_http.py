"""Clients that ask over HTTP where topics are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.broker.admin.rest import administered


async def test_lookup_tells_the_addresses_of_the_broker_and_of_its_listeners(tmp_path: Path) -> None:
    """By the paths of later and of earlier clients."""
    settings: dict[str, Any] = {"advertised_listeners": ("outside:pulsar://broker.example:6650",)}

    async with administered(tmp_path / "s", **settings) as (broker, rest, _):
        for kind in ("topic", "destination"):
            path = f"/lookup/v2/{kind}/persistent/public/default/t"
            assert (await rest.ask("GET", path)).value == {
                "brokerUrl": broker.urls.plain,
                "brokerUrlTls": "",
                "httpUrl": rest.address,
                "httpUrlTls": "",
                "nativeUrl": broker.urls.plain,
            }
            found = (await rest.ask("GET", path + "?listenerName=outside")).value
            assert found["brokerUrl"] == "pulsar://broker.example:6650"
            assert (await rest.ask("GET", path + "/bundle")).value == b"0x00000000_0xffffffff"
        assert (await rest.ask("GET", "/lookup/v2/topic/persistent/no/no/t")).status == 404
        assert (await rest.ask("GET", "/lookup/v2/topic/non-persistent/public/default/t")).status == 405
