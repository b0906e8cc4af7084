"""Certificates: a TLS context for the listeners, kept up with the files."""

import logging
import ssl
from pathlib import Path
from typing import NoReturn

from ..protocol.loop_calls import stamp_of
from .authentication import UnusableSecurity

log = logging.getLogger("duelog.broker.tls")


class Certificate:
    """A certificate chain and its key, in PEM; TLS 1.2 and later."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Reads the files. Raises UnusableSecurity."""
        self._certificate = certificate
        self._key = key
        self._stamp = stamp_of(certificate, key)
        self.context = self._load()

    def refresh(self) -> bool:
        """Have new connections get a certificate that was put in place since; False: nothing changed.

        For a timer; waits for the disk. Files that cannot be used are logged once, and the certificate before stays.
        """
        stamp = stamp_of(self._certificate, self._key)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self._load()  # a failure would leave half of a pair in the context that is in use
            self.context.load_cert_chain(self._certificate, self._key, password=_refuse)
        except UnusableSecurity as error:
            log.error("%s; the certificate before stays in use", error)
            return False
        log.info("%s: a new certificate is in use", self._certificate)
        return True

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for path in (self._certificate, self._key):
            try:
                path.open("rb").close()
            except OSError as error:
                raise UnusableSecurity(f"{path} cannot be read: {error.strerror}") from error
        try:
            context.load_cert_chain(self._certificate, self._key, password=_refuse)
        except ssl.SSLError as error:
            reason = f" ({error.reason})" if error.reason else ""
            raise UnusableSecurity(
                f"{self._certificate} and {self._key} are not a certificate and its key in PEM{reason}"
            ) from error
        return context


def _refuse() -> NoReturn:
    """OpenSSL would ask for a password on the terminal."""
    raise UnusableSecurity("the key of the certificate is encrypted; the broker needs one that is not")
