"""fleet: messages per second through one broker, two brokers, and a proxy in front of them, on this machine.

As `network`, single messages: by Pulsar clients in four processes of their own; of two brokers each has a namespace
and half of the clients. Beside the rates stands the processor time of all servers, the proxy among them, for a message.
"""

from typing import Any

from .harness.compare import Subject, compare
from .harness.options import parse
from .harness.results import Results
from .network import PROCESSOR, RATES
from .peers import KINDS

KEYS = ("duelog:serve", "duelog:proxied", "duelog:two", "duelog:two-proxied")


def main(argv: list[str]) -> int:
    """Run the workload."""
    options = parse(argv, "fleet", __doc__, n=(40_000,), quick_n=(2_000,))
    results = Results("fleet", options)
    subjects = [Subject(key, KINDS[key].label, KINDS[key].missing()) for key in KEYS]
    for n in options.n:
        arguments: dict[str, Any] = {"n": n, "processes": 4}
        measures = [*RATES.values(), *PROCESSOR.values()]
        compare(results, f"{n:,} messages, 4 processes", "benchmarks.network:measure", arguments, measures, subjects)
    results.show()
    return 0
