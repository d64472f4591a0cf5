"""Checks of TLS settings. Without them, an unusable setting fails a connection with an error that blames the server."""

from __future__ import annotations

import ssl
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, cast

from redis import connection

from idemgate.errors import InvalidArgument

__all__ = ["check_tls_files", "check_tls_settings"]

_REQUIREMENTS = ("required", "optional", "none")
_FILES = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
_PEM = "Pass the path of a PEM file that this process may read"


def check_tls_settings(settings: dict[str, Any]) -> None:
    """Check the names and values of TLS settings. It reads no files.

    Raises:
        InvalidArgument: a setting is unknown, is given without TLS, or has an invalid value.
    """
    given = {name: value for name, value in settings.items() if name.startswith("ssl")}
    if not given:
        return  # the frequent case: an SSL context takes milliseconds
    parameters = signature(cast("type[Any]", connection.SSLConnection)).parameters
    known = [name for name in parameters if name.startswith("ssl")]
    for name, value in given.items():
        if name not in known:
            raise InvalidArgument(name, _hide_password(name, value), "no TLS setting", f"Use one of {', '.join(known)}")
        if settings.get("connection_class") is not connection.SSLConnection:
            fix = "Write rediss:// instead of redis:// (or ssl=True for a client), or leave it out"
            raise InvalidArgument(name, _hide_password(name, value), "the connection has no TLS", fix)
    requirement = given.get("ssl_cert_reqs", "required")
    if isinstance(requirement, str) and requirement not in _REQUIREMENTS:
        fix = f"Use one of {', '.join(map(repr, _REQUIREMENTS))}"
        raise InvalidArgument("ssl_cert_reqs", requirement, "no requirement of certificates", fix)
    if given.get("ssl_keyfile") and not given.get("ssl_certfile"):
        raise InvalidArgument("ssl_keyfile", given["ssl_keyfile"], "a key without a certificate", "Add ssl_certfile=")
    if given.get("ssl_validate_ocsp") is True and find_spec("cryptography") is None:
        raise InvalidArgument(
            "ssl_validate_ocsp", True, "the package cryptography is not installed", "Install it, or leave it out"
        )
    _check_protocol(given)


def _check_protocol(given: dict[str, Any]) -> None:
    context = ssl.create_default_context()
    if (version := given.get("ssl_min_version")) is not None:
        try:
            context.minimum_version = version
        except (ValueError, TypeError, OverflowError):
            fix = "Use 771 for TLS 1.2 or 772 for TLS 1.3, or ssl.TLSVersion.TLSv1_2"
            raise InvalidArgument("ssl_min_version", version, "no version of TLS", fix) from None
    if ciphers := given.get("ssl_ciphers"):
        try:
            context.set_ciphers(ciphers)
        except (ssl.SSLError, TypeError):
            fix = "Pass a list in the format of OpenSSL, such as 'ECDHE+AESGCM'"
            raise InvalidArgument("ssl_ciphers", ciphers, "names no cipher that OpenSSL has here", fix) from None


def check_tls_files(settings: dict[str, Any]) -> None:
    """Read the certificates and the key that the settings name.

    Raises:
        InvalidArgument: a file cannot be read, or does not contain what its setting says.
    """
    if not any(name.startswith("ssl") for name in settings):
        return  # the frequent case: an SSL context takes milliseconds
    for name in _FILES:
        if path := settings.get(name):
            _check_readable(name, path)
    if (folder := settings.get("ssl_ca_path")) and not Path(folder).is_dir():
        raise InvalidArgument("ssl_ca_path", folder, "no folder", "Pass a folder of certificates, named by c_rehash")
    context = ssl.create_default_context()
    if certificate := settings.get("ssl_certfile"):
        _load_certificate(context, certificate, settings)
    for name, parameter in (("ssl_ca_certs", "cafile"), ("ssl_ca_data", "cadata")):
        if value := settings.get(name):
            try:
                context.load_verify_locations(**{parameter: value})
            except (ssl.SSLError, ValueError, TypeError) as error:
                raise InvalidArgument(name, value, f"holds no certificate ({_reason(error)})", _PEM) from None


def _check_readable(name: str, path: Any) -> None:
    try:
        Path(path).open("rb").close()
    except (OSError, ValueError, TypeError) as error:
        problem = f"cannot be read ({getattr(error, 'strerror', None) or error})"
        raise InvalidArgument(name, path, problem, _PEM) from None


def _load_certificate(context: ssl.SSLContext, certificate: Any, settings: dict[str, Any]) -> None:
    key = settings.get("ssl_keyfile")
    password = settings.get("ssl_password") or ""  # never None: OpenSSL would ask the terminal for it
    try:
        context.load_cert_chain(certificate, key, password)
    except (ssl.SSLError, ValueError, TypeError) as error:
        name, value = ("ssl_keyfile", key) if key else ("ssl_certfile", certificate)
        problem = f"the certificate and its key cannot be loaded ({_reason(error)})"
        fix = f"Pass the PEM files of one certificate ({certificate}) and its key, and ssl_password= if it is encrypted"
        raise InvalidArgument(name, value, problem, fix) from None


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)


def _hide_password(name: str, value: object) -> object:
    return "***" if "password" in name else value
