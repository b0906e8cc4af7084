"""Certificates of the listeners."""

import logging
import ssl
from pathlib import Path

import pytest

from duelog.broker.security.authentication import Certificate, UnusableSecurity
from tests.broker.security.certificates import write_pair


def shown(context: ssl.SSLContext, highest: ssl.TLSVersion = ssl.TLSVersion.MAXIMUM_SUPPORTED) -> bytes:
    """The certificate that a client is shown, after a handshake in memory."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.verify_mode = ssl.CERT_NONE
    client_context.maximum_version = highest
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(10):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return client.getpeercert(binary_form=True) or b""


def of(path: Path) -> bytes:
    """A certificate as a client sees it."""
    return ssl.PEM_cert_to_DER_cert(path.read_text())


def test_a_client_is_shown_the_certificate(tmp_path: Path) -> None:
    """By TLS 1.2 and 1.3, nothing older."""
    pair = write_pair(tmp_path)
    context = Certificate(*pair).context
    assert shown(context) == shown(context, ssl.TLSVersion.TLSv1_2) == of(pair[0])
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_certificate_that_changes_is_shown_to_the_next_client(tmp_path: Path) -> None:
    """The listener's context stays the same object."""
    certificate = Certificate(*write_pair(tmp_path))
    context = certificate.context
    assert not certificate.refresh()
    pair = write_pair(tmp_path)
    assert certificate.refresh()
    assert shown(context) == of(pair[0])


@pytest.mark.parametrize("damage", ["gone", "garbage", "another key"])
def test_a_certificate_that_is_damaged_later_leaves_the_one_before(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Logged once; a good one that follows is taken."""
    pair = write_pair(tmp_path)
    certificate, before = Certificate(*pair), of(pair[0])
    if damage == "gone":
        pair[1].unlink()
    elif damage == "garbage":
        pair[0].write_bytes(b"nonsense")
    else:
        key = pair[1].read_bytes()
        write_pair(tmp_path)
        pair[1].write_bytes(key)
    with caplog.at_level(logging.ERROR, "duelog.broker"):
        assert not certificate.refresh()
        assert not certificate.refresh()
    assert len(caplog.records) == 1
    assert shown(certificate.context) == before
    write_pair(tmp_path)
    assert certificate.refresh()
    assert shown(certificate.context) == of(pair[0])


@pytest.mark.parametrize("damage", ["no certificate", "no key", "garbage", "encrypted"])
def test_a_certificate_that_cannot_be_read_is_one_clear_error(tmp_path: Path, damage: str) -> None:
    """It names the file; no password is asked for on the terminal."""
    certificate, key = write_pair(tmp_path, password=b"secret" if damage == "encrypted" else None)
    if damage == "no certificate":
        certificate = tmp_path / "not-there.pem"
    elif damage == "no key":
        key = tmp_path / "not-there.pem"
    elif damage == "garbage":
        key.write_bytes(b"nonsense")
    with pytest.raises(UnusableSecurity) as caught:
        Certificate(certificate, key)
    assert "\n" not in str(caught.value)
    assert ("not-there.pem cannot be read" in str(caught.value)) == damage.startswith("no ")
