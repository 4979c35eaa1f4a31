"""Signs bytes with the user's Ed25519 key, and checks such a signature: DSSE v1 envelopes.

The private key is a PEM file (PKCS #8), as `openssl genpkey -algorithm ed25519` writes one; an encrypted one is opened
with the passphrase in GLM46_SIGN_PASSPHRASE. Neither key nor passphrase enters a message, a log or the store. Layout:
https://github.com/secure-systems-lab/dsse/blob/master/protocol.md
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

PASSPHRASE_VARIABLE = "GLM46_SIGN_PASSPHRASE"
IN_TOTO_TYPE = "application/vnd.in-toto+json"


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """The key of a PEM file. Raises ValueError for a file without a usable Ed25519 key; the message holds none of
    it."""
    passphrase = os.environ.get(PASSPHRASE_VARIABLE)
    try:
        key = load_pem_private_key(path.read_bytes(), passphrase.encode() if passphrase else None)
    except OSError as error:
        raise ValueError(f"--sign-key {path} cannot be read ({error.strerror})") from None
    except TypeError:
        problem = "is not encrypted, unset" if passphrase else "is encrypted, set"
        raise ValueError(f"--sign-key {path} {problem} {PASSPHRASE_VARIABLE}") from None
    except ValueError:
        raise ValueError(
            f"--sign-key {path} holds no private key in PEM, or {PASSPHRASE_VARIABLE} is not its passphrase: "
            f"`openssl genpkey -algorithm ed25519 -out {path.name}` makes one"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"--sign-key {path} is no Ed25519 key: `openssl genpkey -algorithm ed25519` makes one")
    return key


def read_public_key(path: Path) -> Ed25519PublicKey:
    """The key of a PEM file, as `openssl pkey -in KEY -pubout` writes it. Raises ValueError for any other file."""
    try:
        key = load_pem_public_key(path.read_bytes())
    except OSError as error:
        raise ValueError(f"--key {path} cannot be read ({error.strerror})") from None
    except ValueError:
        raise ValueError(f"--key {path} holds no public key in PEM: `openssl pkey -in KEY -pubout` writes it") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError(f"--key {path} is no Ed25519 key, and glm46 signs with no other")
    return key


def key_id(key: Ed25519PublicKey) -> str:
    """sha256 of the public key (DER): a name, no proof."""
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def sign(payload: bytes, key: Ed25519PrivateKey) -> bytes:
    """The envelope of a statement, as bytes of JSON. Ed25519 has no chance in it: the same twice is the same bytes."""
    signature = key.sign(_encoded(IN_TOTO_TYPE, payload))
    return _envelope(payload, key_id(key.public_key()), signature)


def signature_problem(envelope: bytes, payload: bytes, key: Ed25519PublicKey) -> str:
    """Why an envelope is not this key's signature of these bytes; empty where it is."""
    try:
        signature = base64.b64decode(json.loads(envelope)["signatures"][0]["sig"])
    except (ValueError, KeyError, TypeError, IndexError):
        return "is no envelope with a signature"
    if envelope != _envelope(payload, key_id(key), signature):
        return f"does not hold this statement, signed with key {key_id(key)[:12]}"
    try:
        key.verify(signature, _encoded(IN_TOTO_TYPE, payload))
    except InvalidSignature:
        return f"holds a signature that key {key_id(key)[:12]} did not make"
    return ""


def _envelope(payload: bytes, signer: str, signature: bytes) -> bytes:
    values = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": IN_TOTO_TYPE,
        "signatures": [{"keyid": signer, "sig": base64.b64encode(signature).decode()}],
    }
    return f"{json.dumps(values, indent=1)}\n".encode()


def _encoded(kind: str, payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding: what is signed."""
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)
