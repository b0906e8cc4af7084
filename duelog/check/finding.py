"""A finding of `check`: one problem of a store, with its address and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

from duelog.store.errors import CorruptEntry

REPAIR = "run `duelog repair` on a copy of the store, or restore a backup"


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: `severity` is "error" (something is lost or wrong) or "warning" (something is left over).

    `code` names the kind, `address` says where, `message` what, `advice` what to do about it.
    """

    severity: str
    code: str
    address: str
    message: str
    advice: str


def error(code: str, address: str, message: str, advice: str = REPAIR) -> Finding:
    """Something is lost or wrong."""
    return Finding("error", code, address, message, advice)


def warning(code: str, address: str, message: str, advice: str) -> Finding:
    """Something is left over, and costs nothing but space or time."""
    return Finding("warning", code, address, message, advice)


def corrupt(entry: CorruptEntry) -> Finding:
    """An entry, or the run that begins with it, cannot be read."""
    address = f"{entry.environment}, ledger {entry.ledger_id}, entry {entry.entry_id}"
    return error("corrupt-entry", address, entry.reason)
