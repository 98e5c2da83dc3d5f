"""The cluster's TLS: a peer belongs to the cluster when its certificate is of the cluster's own authority.

Without files, every process derives the same authority from the cluster's secret and a salt (HKDF to a P-256 key) and
issues itself a certificate for a day, anew every few hours; its key stays in memory. `Authorities` says which salts: a
rotation (cluster/registry/rotation.py) changes them. With files, they are the operator's own and are read again every
few hours, and at once when a rotation says so. TLS 1.3 only, and both ends verify. Names are not compared, since
workers are reached by address: let the authority sign for nothing but this cluster.

Both ends know from the address alone whether a connection is under TLS (`tls_at`), so they need no agreement.
"""

import hashlib
import os
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvrelay.errors import ConfigError
from kvrelay.machine import is_loopback
from kvrelay.settings.cluster import ClusterSettings

_LABEL = b"kvrelay cluster authority v1"
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_AUTHORITY = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvrelay cluster authority")])
_MEMBER = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvrelay worker")])
_AUTHORITY_YEARS = (datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC))
_LIFETIME = timedelta(days=1)  # of a member's certificate, from now on
_SKEW = timedelta(hours=12)  # clocks of two hosts may differ by this
_RENEW_S = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class Authorities:
    """The cluster's authorities, by the salts of their keys: which one issues certificates, and which are trusted.
    `number` grows with every change. As a cluster starts, it has one, whose salt is empty.
    """

    number: int = 0
    issuing: bytes = b""
    trusted: tuple[bytes, ...] = (b"",)


_FIRST = Authorities()


@dataclass(frozen=True, slots=True)
class Identity:
    """What a process shows (certificate and key) and what it trusts (one authority or more), in PEM."""

    certificate: bytes
    key: bytes
    authority: bytes

    @property
    def authority_digest(self) -> str:
        """Short, the same for the same authorities' keys in any order."""
        der, info = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        trusted = x509.load_pem_x509_certificates(self.authority)
        keys = sorted(one.public_key().public_bytes(der, info) for one in trusted)
        return hashlib.sha256(b"".join(keys)).hexdigest()[:12]

    @property
    def expires(self) -> datetime:
        """When the certificate does."""
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc


def _authority_key(secret: bytes, salt: bytes) -> ec.EllipticCurvePrivateKey:
    """The same key for the same secret and salt, in every process."""
    material = HKDF(algorithm=hashes.SHA256(), length=48, salt=salt or None, info=_LABEL).derive(secret)
    return ec.derive_private_key(int.from_bytes(material, "big") % (_P256_ORDER - 1) + 1, ec.SECP256R1())


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _authority_certificate(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    first, last = _AUTHORITY_YEARS
    return (
        x509.CertificateBuilder(_AUTHORITY, _AUTHORITY, key.public_key(), 1, first, last)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(is_authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def issue(secret: bytes, not_before: datetime, not_after: datetime, authorities: Authorities = _FIRST) -> Identity:
    """A member of the cluster that knows `secret` and its authorities, valid between those times."""
    authority, mine = _authority_key(secret, authorities.issuing), ec.generate_private_key(ec.SECP256R1())
    both_ends = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    certificate = (
        x509.CertificateBuilder(
            _AUTHORITY, _MEMBER, mine.public_key(), x509.random_serial_number(), not_before, not_after
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(is_authority=False), critical=True)
        .add_extension(both_ends, critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(mine.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    return Identity(
        certificate.public_bytes(pem),
        mine.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        b"".join(
            _authority_certificate(_authority_key(secret, salt)).public_bytes(pem) for salt in authorities.trusted
        ),
    )


def _issue_now(secret: bytes, authorities: Authorities) -> Identity:
    now = datetime.now(UTC)
    return issue(secret, now - _SKEW, now + _LIFETIME, authorities)


def read_identity(folder: str) -> Identity:
    """The operator's own files. Raises ConfigError when one cannot be read, or the certificate has expired."""
    contents = []
    for name in ("tls.crt", "tls.key", "ca.crt"):
        path = Path(folder).expanduser() / name
        try:
            contents.append(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"cluster.tls_dir: {path}: {error.strerror}") from error
    for name, content in (("tls.crt", contents[0]), ("ca.crt", contents[2])):
        try:
            expiries = [one.not_valid_after_utc for one in x509.load_pem_x509_certificates(content)]
        except ValueError as error:
            raise ConfigError(f"cluster.tls_dir: {name} in {folder} holds no certificate in PEM") from error
        expired = max(expiries) if name == "ca.crt" else expiries[0]  # the process's own comes before its issuers
        if expired < datetime.now(UTC):
            raise ConfigError(f"cluster.tls_dir: {name} in {folder} expired on {expired:%Y-%m-%d}")
    return Identity(*contents)


def _load(context: ssl.SSLContext, identity: Identity) -> None:
    """The ssl module takes a certificate by its path only: the path leads into memory. Raises ssl.SSLError."""
    fd = os.memfd_create("kvrelay-identity", os.MFD_CLOEXEC)
    try:
        os.write(fd, identity.certificate + b"\n" + identity.key)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    context.load_verify_locations(cadata=identity.authority.decode("ascii", "replace"))


def _context(identity: Identity, *, is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if is_server:
        context.num_tickets = 0  # no resumption: a ticket would outlive its certificate
    try:
        _load(context, identity)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"cluster.tls_dir: its files do not fit together: {error}") from error
    return context


class ClusterTls:
    """One process's contexts for both ends, made anew before what they show grows old. For use from any thread."""

    def __init__(
        self, identify: Callable[[Authorities], Identity], *, is_everywhere: bool = True, renew_s: float = _RENEW_S
    ) -> None:
        """`is_everywhere`: at loopback addresses too, and in place of Unix sockets. Raises ConfigError when there is no
        usable identity.
        """
        self._identify, self._renew_s, self._lock = identify, renew_s, threading.Lock()
        self.is_everywhere = is_everywhere
        self.take(_FIRST)

    @classmethod
    def derived(cls, secret: bytes, *, is_everywhere: bool = True) -> "ClusterTls":
        """Of the authorities that the cluster's secret makes."""
        return cls(partial(_issue_now, secret), is_everywhere=is_everywhere)

    def take(self, authorities: Authorities) -> Identity:
        """Show and trust these from now on, in every connection that is opened or accepted after; with files: read them
        again. Returns what is shown now. Raises ConfigError: what was shown before stays.
        """
        with self._lock:
            return self._make(authorities)

    def _make(self, authorities: Authorities) -> Identity:
        identity = self._identify(authorities)
        self._contexts = _context(identity, is_server=True), _context(identity, is_server=False)
        self._authorities, self._made_at = authorities, time.monotonic()
        return identity

    def _current(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        with self._lock:
            if time.monotonic() - self._made_at > self._renew_s:
                self._make(self._authorities)
            return self._contexts

    def server(self) -> ssl.SSLContext:
        """For a connection that is accepted now."""
        return self._current()[0]

    def client(self) -> ssl.SSLContext:
        """For a connection that is opened now."""
        return self._current()[1]


def cluster_tls(settings: ClusterSettings, secret: bytes) -> ClusterTls | None:
    """What the settings say, one for each cluster that this process belongs to, so that a rotation reaches all its
    connections; None: no TLS. Raises ConfigError naming the file at fault.
    """
    return _shared(secret, settings.tls_dir, settings.tls is True) if settings.tls else None


@cache
def _shared(secret: bytes, folder: str | None, is_everywhere: bool) -> ClusterTls:
    if folder is None:
        return ClusterTls.derived(secret, is_everywhere=is_everywhere)
    return ClusterTls(lambda _: read_identity(folder), is_everywhere=is_everywhere)


def tls_at(tls: ClusterTls | None, host: str) -> ClusterTls | None:
    """What connections to a server that listens at `host` are under; None: they are plain."""
    return tls if tls is not None and (tls.is_everywhere or not is_loopback(host)) else None
