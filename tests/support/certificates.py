"""Certificate authority of a test, and the certificates that it signs."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = dt.timedelta(days=1)
_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True)
class Pair:
    """Paths of a certificate and its private key in PEM format."""

    certificate: str
    key: str


class Authority:
    """Signs certificates. `ca` is the path of its own certificate."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        builder = self._builder(self._name, self._key).add_extension(constraints, critical=True)
        builder = builder.add_extension(_SIGNS, critical=True)
        path = folder / f"{name}.pem"
        certificate = builder.sign(self._key, hashes.SHA256())
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        self.ca = str(path)

    def pair(self, name: str, *names: str) -> Pair:
        """Write a certificate and key for these host names and addresses, by default for `name`.

        The files are called `name`.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        alternatives = x509.SubjectAlternativeName(
            [_general_name(host) for host in names or (name,)]
        )
        builder = self._builder(subject, key).add_extension(alternatives, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        pair = Pair(str(self._folder / f"{name}.pem"), str(self._folder / f"{name}.key"))
        Path(pair.key).write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        Path(pair.certificate).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return pair

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        """Return a builder with the extensions that Python requires since 3.13."""
        now, subject_key, signer = dt.datetime.now(dt.UTC), key.public_key(), self._key.public_key()
        issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer)
        return (
            x509.CertificateBuilder()
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(subject_key), critical=False)
            .add_extension(issuer_id, critical=False)
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(subject_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
        )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
