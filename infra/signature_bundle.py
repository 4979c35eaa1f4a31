"""Signs bytes with the user's EC key, and checks such a signature: Sigstore bundles over DSSE v1 envelopes.

That is how OpenSSF's model-signing writes a signature with a key, so its `model_signing verify key` reads what is
signed here. The private key is a PEM file, as `openssl ecparam -name prime256v1 -genkey -noout` writes one; an
encrypted one is opened with the passphrase in GLM46_SIGN_PASSPHRASE. Neither key nor passphrase enters a message, a
log or the store. Layouts: https://docs.sigstore.dev/about/bundle/ and
https://github.com/secure-systems-lab/dsse/blob/master/protocol.md
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

PASSPHRASE_VARIABLE = "GLM46_SIGN_PASSPHRASE"
IN_TOTO_TYPE = "application/vnd.in-toto+json"
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
HASHES = {"secp256r1": hashes.SHA256(), "secp384r1": hashes.SHA384(), "secp521r1": hashes.SHA512()}
"""By curve, as Sigstore pairs them; model-signing takes no other."""
MAKING = "openssl ecparam -name prime256v1 -genkey -noout -out"


def read_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The key of a PEM file. Raises ValueError for a file without a usable EC key; the message holds none of it."""
    passphrase = os.environ.get(PASSPHRASE_VARIABLE)
    try:
        key = load_pem_private_key(path.read_bytes(), passphrase.encode() if passphrase else None)
    except OSError as error:
        raise ValueError(f"--sign-key {path} cannot be read ({error.strerror})") from None
    except TypeError:
        problem = "is not encrypted, unset" if passphrase else "is encrypted, set"
        raise ValueError(f"--sign-key {path} {problem} {PASSPHRASE_VARIABLE}") from None
    except ValueError:
        wrong = f", or {PASSPHRASE_VARIABLE} is not its passphrase" if passphrase else ""
        raise ValueError(f"--sign-key {path} holds no private key in PEM{wrong}: `{MAKING} KEY` makes one") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in HASHES:
        raise ValueError(f"--sign-key {path} is no key of the curves {', '.join(HASHES)}: `{MAKING} KEY` makes one")
    return key


def read_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """The key of a PEM file, as `openssl pkey -in KEY -pubout` writes it. Raises ValueError for any other file."""
    try:
        key = load_pem_public_key(path.read_bytes())
    except OSError as error:
        raise ValueError(f"--key {path} cannot be read ({error.strerror})") from None
    except ValueError:
        raise ValueError(f"--key {path} holds no public key in PEM: `openssl pkey -in KEY -pubout` writes it") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in HASHES:
        raise ValueError(f"--key {path} is no key of the curves {', '.join(HASHES)}, and glm46 signs with no other")
    return key


def key_id(key: ec.EllipticCurvePublicKey) -> str:
    """sha256 of the public key (PEM): the hint of a bundle, no proof."""
    return hashlib.sha256(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def sign(payload: bytes, key: ec.EllipticCurvePrivateKey) -> bytes:
    """The bundle of a statement, as bytes of JSON. The signature has no chance in it (RFC 6979): the same twice is the
    same bytes."""
    chosen = ec.ECDSA(HASHES[key.curve.name], deterministic_signing=True)
    return _bundle(payload, key_id(key.public_key()), key.sign(_encoded(IN_TOTO_TYPE, payload), chosen))


def signature_problem(bundle: bytes, payload: bytes, key: ec.EllipticCurvePublicKey) -> str:
    """Why a bundle is not this key's signature of these bytes; empty where it is."""
    try:
        signature = base64.b64decode(json.loads(bundle)["dsseEnvelope"]["signatures"][0]["sig"])
    except (ValueError, KeyError, TypeError, IndexError):
        return "is no bundle with a signature"
    if bundle != _bundle(payload, key_id(key), signature):
        return f"does not hold this statement, signed with key {key_id(key)[:12]}"
    try:
        key.verify(signature, _encoded(IN_TOTO_TYPE, payload), ec.ECDSA(HASHES[key.curve.name]))
    except InvalidSignature:
        return f"holds a signature that key {key_id(key)[:12]} did not make"
    return ""


def _bundle(payload: bytes, signer: str, signature: bytes) -> bytes:
    values = {
        "mediaType": BUNDLE_TYPE,
        "verificationMaterial": {"publicKey": {"hint": signer}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": IN_TOTO_TYPE,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return f"{json.dumps(values, indent=1)}\n".encode()


def _encoded(kind: str, payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding: what is signed."""
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)
