"""Who is who: an authority of the server's own, its certificate, and a key for each client.

All keys are elliptic (P-384). Clients trust the authority and nobody else; the server trusts the keys it was given.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fairveil.errors import UserError

AUTHORITY_DAYS, CERTIFICATE_DAYS = 3650, 730
LOCAL = "localhost", "127.0.0.1"  # the server talks to itself under these


def new_authority() -> tuple[bytes, bytes]:
    """The certificate and the private key of an authority, in PEM; valid for ten years."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fairveil federation")])
    usage = _usage(key_cert_sign=True, crl_sign=True)
    certificate = (
        _certificate(name, name, key.public_key(), key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA384())
    )
    return _pem(certificate), _private(key, serialization.PrivateFormat.PKCS8)


def new_certificate(authority: bytes, authority_key: bytes, hosts: Sequence[str]) -> tuple[bytes, bytes]:
    """A certificate for a server of these names and addresses, and its private key, in PEM; valid for two years."""
    issuer = x509.load_pem_x509_certificate(authority)
    signer = serialization.load_pem_private_key(authority_key, None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise ValueError("the key of the authority is not an elliptic one")
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fairveil server")])
    names = [_general_name(host) for host in dict.fromkeys([*hosts, *LOCAL])]
    certificate = (
        _certificate(name, issuer.subject, key.public_key(), signer.public_key(), CERTIFICATE_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(signer, hashes.SHA384())
    )
    return _pem(certificate), _private(key, serialization.PrivateFormat.PKCS8)


def new_node_key(name: str) -> tuple[bytes, bytes]:
    """A client's private key and its public key, as OpenSSH writes them."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return _private(key, serialization.PrivateFormat.OpenSSH), public + f" {name}\n".encode()


def certificate_mark(path: Path) -> str:
    """The fingerprint of a certificate: two people who read the same one to each other hold the same file.

    Raises:
        UserError: it is not a certificate.
    """
    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).fingerprint(hashes.SHA256()).hex(":")
    except OSError as error:
        raise UserError(f"{path} cannot be read.", f"{error.strerror}.", "the ca.crt of the server") from error
    except ValueError:
        raise UserError(
            f"{path} is not a certificate.",
            "A client knows its server by the certificate of the server's authority, a file in PEM.",
            "the ca.crt that `fairveil deploy init-server` made",
        ) from None


def public_key_mark(path: Path) -> str:
    """The fingerprint of a client's public key, as `ssh-keygen -l` writes it.

    Raises:
        UserError: it is not a client's public key.
    """
    try:
        data = path.read_bytes()
        key = serialization.load_ssh_public_key(data)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError
    except OSError as error:
        raise UserError(f"{path} cannot be read.", f"{error.strerror}.", "the NAME.pub of a client") from error
    except (ValueError, UnsupportedAlgorithm):
        raise UserError(
            f"{path} is not the public key of a client.",
            "A client's public key is elliptic, one line as OpenSSH writes it. Nobody was admitted by it.",
            "the NAME.pub that `fairveil deploy init-client` made",
        ) from None
    digest = hashlib.sha256(base64.b64decode(data.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, signer: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # a client's clock may be slow
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(**wanted: bool) -> x509.KeyUsage:
    known = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{use: wanted.get(use, False) for use in known})


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
