"""A process that ships to a directory until it is killed, and prints the number of each message that is stored."""

import sys

from duelog import DelayedStore, StoreConfig
from duelog.store.wal import write_batch


def main(path: str, url: str, begin: str) -> None:
    """Send messages over several days from a number on, acknowledge what is due, reschedule some."""
    write_batch.LARGE_BYTES = 100
    config = StoreConfig(
        replica=url, ship_ms=1, ship_bytes=1 << 16, wal_bytes=64 << 10, partition_ms=3_600_000, ledger_max_entries=50
    )
    with DelayedStore.open(path, config) as store:
        topic = store.topic("a")
        with topic.subscribe("reader") as reader:
            number = int(begin)
            while True:
                if number % 50 == 0 and store._engine.shipping is not None:
                    store._engine.shipping.make_manifest()
                if number % 3:
                    topic.send(b"%d" % number, deliver_after=3600 * (1 + number % 5))
                else:
                    topic.send(b"%d" % number)
                print(number, flush=True)
                if number % 10 == 0:  # a large run
                    batch = range(number + 1, number + 5)
                    topic.send_payloads([b"%d" % each for each in batch], deliver_after=3600 * (number % 20 // 5))
                    print(*batch, sep="\n", flush=True)
                    number = batch[-1]
                for message in reader.receive(10, timeout=0):
                    print(f"acknowledging {message.payload.decode()}", flush=True)
                    reader.ack(message, durable=True)
                    print(f"acknowledged {message.payload.decode()}", flush=True)
                number += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
