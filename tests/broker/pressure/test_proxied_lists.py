"""Many clients list one large namespace at once through the proxy: all are served, and its memory has a bound.

Raw frames against `duelog proxy` in a process of its own, its memory as the system sees it, beside a broker with its
own limits. DUELOG_LISTED_TOPICS=8192 DUELOG_LISTING_CLIENTS=200 is the full size.
"""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path

import pytest

from duelog.broker.listing.topic_filter import topics_hash
from duelog.broker.protocol import commands
from tests.broker.clients.conftest import ServedProxy, free_port
from tests.broker.pressure.served import Talker, resident_bytes
from tests.broker.pressure.test_topic_lists import CLIENTS, CONSTANT, NAMES, list_once, peak, serving

KINDS = ("Heap", "Direct")


def limits(limit_mb: int) -> dict[str, int]:
    """As settings of both programs."""
    found = {f"maxTopicListInFlight{kind}MemSizeMB": limit_mb for kind in KINDS}
    return found | {f"maxTopicListInFlight{kind}MemSizePermitsAcquireTimeoutMillis": 300_000 for kind in KINDS}


@pytest.mark.parametrize("limit_mb", [100, 2] if CLIENTS >= 200 else [2])
def test_all_clients_are_served_through_the_proxy_and_its_memory_grows_by_the_limits_and_a_constant(
    tmp_path: Path, limit_mb: int
) -> None:
    """Also while a client asks and never reads; afterwards nothing is held."""

    async def main(proxy: ServedProxy) -> None:
        wanted = topics_hash(NAMES)
        await list_once(proxy, wanted)  # what is loaded once is not counted
        before = resident_bytes(proxy.pid)
        ended = asyncio.Event()
        watching = asyncio.create_task(peak(proxy, ended))
        deaf = await Talker.connected(proxy.port)
        deaf.reader._transport.pause_reading()  # type: ignore[attr-defined]
        deaf.say(commands.GetTopics(1, "public/default"))
        await asyncio.gather(*(list_once(proxy, wanted) for _ in range(CLIENTS)))
        ended.set()
        grown = await watching - before
        print(f"{CLIENTS} clients, {len(NAMES)} topics, {limit_mb} MB: {grown / 2**20:.1f} MiB")
        assert grown <= 2 * (limit_mb << 20) + CONSTANT
        deaf.writer.transport.abort()
        while (text := await asyncio.to_thread(metrics)).count('used_bytes{cluster="standalone"} 0.0') < 2:
            await asyncio.sleep(0.02)
        assert 'pulsar_proxy_topic_list_heap_timeout_total{cluster="standalone"} 0.0' in text

    def metrics() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{http}/metrics", timeout=30) as answer:
            return str(answer.read(), "utf-8")

    http = free_port()
    config = tmp_path / "proxy.toml"
    lines = [f"{name} = {value}" for name, value in limits(limit_mb).items()]
    config.write_text("\n".join([*lines, "requestTimeoutSeconds = 300"]))
    with serving(tmp_path / "broker", **limits(limit_mb)) as served:
        proxy = ServedProxy(tmp_path / "proxy", served.url, options=("--config", str(config), "--http", str(http)))
        proxy.start()
        try:
            asyncio.run(main(proxy))
            assert proxy.stop() == 0, proxy.log()
        finally:
            proxy.kill()
