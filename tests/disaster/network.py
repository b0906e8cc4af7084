"""Machines of a test in network namespaces: what passes between any two of them can be cut, without a word."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Network:
    """A namespace for each machine, and one between them, which passes packets on or drops them.

    None has a default route, so that nothing leaves this machine.
    """

    def __init__(self, *machines: str) -> None:
        self._machines = {name: f"10.89.{number}." for number, name in enumerate(machines, 1)}
        self._cuts: list[tuple[str, ...]] = []

    def make(self) -> None:
        """Make the namespaces. Raises CalledProcessError where this user may not, or the system has none."""
        self._ip("netns", "add", self._namespace("between"))
        for name, net in self._machines.items():
            self._ip("netns", "add", self._namespace(name))
            ends = {name: ("out", f"{net}1"), "between": (f"to-{name}", f"{net}2")}
            peer = ("type", "veth", "peer", "name", f"to-{name}", "netns", self._namespace("between"))
            self._ip("-n", self._namespace(name), "link", "add", "name", "out", *peer)
            self._ip("-n", self._namespace(name), "link", "set", "dev", "lo", "up")
            for end, (link, address) in ends.items():
                self._ip("-n", self._namespace(end), "address", "add", f"{address}/30", "dev", link)
                self._ip("-n", self._namespace(end), "link", "set", "dev", link, "up")
            self._ip("-n", self._namespace(name), "route", "add", "10.89.0.0/16", "via", f"{net}2")
        forwards = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        subprocess.run([*self.within("between"), "sh", "-c", forwards], check=True, capture_output=True)

    def address(self, machine: str) -> str:
        """The address that a machine has."""
        return f"{self._machines[machine]}1"

    def within(self, machine: str) -> list[str]:
        """The beginning of a command that runs on a machine."""
        return ["ip", "netns", "exec", self._namespace(machine)]

    def cut(self, one: str, *others: str) -> None:
        """Drop what goes between a machine and others."""
        for other in others:
            for begin, end in ((one, other), (other, one)):
                rule = ("iif", f"to-{begin}", "to", self.address(end), "blackhole")
                self._rule("add", rule)
                self._cuts.append(rule)

    def heal(self) -> None:
        """Have everything pass again."""
        while self._cuts:
            self._rule("del", self._cuts.pop())

    def _rule(self, change: str, rule: tuple[str, ...]) -> None:
        self._ip("-n", self._namespace("between"), "rule", change, *rule)

    def close(self) -> None:
        """Remove the namespaces."""
        for name in (*self._machines, "between"):
            subprocess.run(["ip", "netns", "delete", self._namespace(name)], check=False, stderr=subprocess.DEVNULL)

    @staticmethod
    def _namespace(name: str) -> str:
        return f"duelog-{os.getpid()}-{name}"

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def network_of(*machines: str) -> Iterator[Network]:
    """A network of machines; skips the test where none can be made."""
    network = Network(*machines)
    try:
        try:
            network.make()
        except FileNotFoundError:
            pytest.skip("network namespaces are made by ip(8), which is not installed")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        yield network
    finally:
        network.close()
