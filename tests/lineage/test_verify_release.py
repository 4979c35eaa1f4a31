"""`glm46 verify`: a stranger finds every change of a release, with and without the signer's key."""

from __future__ import annotations

import base64
import importlib.util
import json
import random
import shutil
import subprocess
import sys

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256K1, SECP256R1, SECP521R1, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from flows.cli.evidence.rebuild_release import rebuild_release
from flows.cli.evidence.write_evidence import evidence_files, signatures
from infra.home import Home
from infra.signature_bundle import PASSPHRASE_VARIABLE, key_id, read_private_key, read_public_key, sign
from infra.storage.manifest_graph import read_manifest_graph
from infra.storage.open_store import open_store
from tasks.lineage.compare_builds import compare_builds
from tasks.lineage.verify_release import BUNDLE_FILE, PROVENANCE_FILE, read_statement, verify_release
from tests.lineage.toy_release import make_release

NUM_CHANGES = 100


@pytest.fixture(scope="module")
def key():
    return generate_private_key(SECP256R1())


@pytest.fixture(scope="module")
def written(tmp_path_factory, key):
    """A store with a release, and its signed evidence."""
    root = tmp_path_factory.mktemp("release")
    store = open_store(str(root / "store"), Home(root / "home"))
    write(store, key, root / "evidence")
    return root


def write(store, key, directory) -> None:
    release = make_release(store)
    files = evidence_files(read_manifest_graph(store), release.version)
    directory.mkdir()
    for name, content in {**files, **signatures(files[PROVENANCE_FILE], key)}.items():
        (directory / name).write_bytes(content)


@pytest.fixture
def copied(written, tmp_path):
    """The same, to be damaged: (evidence directory, store)."""
    shutil.copytree(written / "evidence", tmp_path / "evidence")
    shutil.copytree(written / "store", tmp_path / "store")
    return tmp_path / "evidence", open_store(str(tmp_path / "store"), Home(tmp_path / "home"))


def test_an_untouched_release_is_what_its_statement_says(copied, key):
    evidence, store = copied
    found = verify_release(evidence, store, key.public_key())
    assert found.problems == () and found.recomputed == ()
    assert (found.num_steps, found.num_subjects) == (12, 2)
    assert "signed the statement" in found.signature and "all of it is as the statement says" in found.describe()
    assert verify_release(evidence, store, None).problems == ()


def test_a_store_of_something_else_is_one_sentence(copied, tmp_path):
    evidence, _ = copied
    other = open_store(str(tmp_path / "other"), Home(tmp_path / "home"))
    with pytest.raises(ValueError, match=r"other holds none of the 12 steps that led to .*: name with --store the one"):
        verify_release(evidence, other, None)


def test_of_100_changes_of_one_byte_100_are_found(copied, key):
    """In any file of the release's artifacts, any manifest behind it and any file of the evidence."""
    evidence, store = copied
    chance = random.Random(18)
    statement = json.loads((evidence / PROVENANCE_FILE).read_text())
    keys = [made["key"] for made in statement["predicate"]["buildDefinition"]["internalParameters"]["steps"]]
    manifests = [store.root / f"manifests/{made}.json" for made in keys]
    files = [path for made in keys for path in (store.root / "objects" / made).rglob("*") if path.is_file()]
    paths = sorted([*manifests, *files, *evidence.iterdir()])
    for number in range(NUM_CHANGES):
        path = paths[number % len(paths)]
        content = path.read_bytes()
        index, other = chance.randrange(len(content)), chance.randrange(1, 256)
        path.write_bytes(content[:index] + bytes([content[index] ^ other]) + content[index + 1 :])
        try:
            problems = verify_release(evidence, store, key.public_key()).problems
        except ValueError as error:
            problems = (str(error),)
        assert problems, (path, index, other)
        path.write_bytes(content)
    assert verify_release(evidence, store, key.public_key()).problems == ()


def test_what_was_changed_is_named(copied):
    evidence, store = copied
    (weights,) = store.root.rglob("model.safetensors")
    weights.write_text("the weights of a modem")
    assert problems(evidence, store) == "hf/model.safetensors is missing or has another sha256"
    shutil.rmtree(weights.parent)
    assert problems(evidence, store) == "hf/model.safetensors is missing or has another sha256"


def test_a_changed_statement_without_a_signature_disagrees_with_the_store(copied):
    evidence, store = copied
    path = evidence / PROVENANCE_FILE
    intact = path.read_text()
    path.write_text(intact.replace("CC0-1.0", "MIT"))
    assert "something else than the store at predicate.buildDefinition.resolvedDependencies" in problems(
        evidence, store
    )
    path.write_text(intact.replace('"num_steps": 1', '"num_steps": 2'))
    assert problems(evidence, store) == "recipe, inputs, code and packages in the statement do not make this key"
    path.write_text(intact[:-20])
    with pytest.raises(ValueError, match="is no statement that this version of glm46 can check"):
        verify_release(evidence, store, None)


def problems(evidence, store) -> str:
    """The one problem, without the step that it is in."""
    (problem,) = verify_release(evidence, store, None).problems
    return problem.partition("): ")[2] or problem


def test_a_store_that_computed_the_release_again_confirms_it(written, tmp_path):
    other = open_store(str(tmp_path / "store"), Home(tmp_path / "home"))
    make_release(other)
    found = verify_release(written / "evidence", other, None)
    assert found.problems == () and "train_phase" in found.recomputed
    (trained,) = [step["key"] for step in read_statement(written / "evidence").steps if step["step"] == "train_phase"]
    manifest = other.read_manifest(trained)
    assert manifest is not None
    other.mark_invalid(manifest, "lost")
    assert f"store {other.uri} holds no manifest of it" in verify_release(written / "evidence", other, None).problems[0]


def pem_files(directory, key, passphrase=None):
    """The paths of a private and a public key."""
    encryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
    private, public = directory / "key.pem", directory / "key.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


def test_the_signature_is_one_that_openssl_verifies_over_dsses_encoding(written, key, tmp_path):
    pem_files(tmp_path, key)
    envelope = json.loads((written / "evidence" / BUNDLE_FILE).read_text())["dsseEnvelope"]
    payload = base64.b64decode(envelope["payload"])
    assert payload == (written / "evidence" / PROVENANCE_FILE).read_bytes()
    kind = envelope["payloadType"].encode()
    (tmp_path / "signed").write_bytes(
        b" ".join([b"DSSEv1", str(len(kind)).encode(), kind, str(len(payload)).encode(), payload])
    )
    (tmp_path / "signature").write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
    command = "openssl dgst -sha256 -verify key.pub -signature signature signed"
    checked = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert checked.returncode == 0 and "Verified OK" in checked.stdout, checked.stderr


@pytest.mark.parametrize("curve", [SECP256R1(), SECP521R1()])
def test_openssfs_verifier_accepts_the_weights_and_finds_a_change(written, tmp_path, curve):
    """Of every format's directory, from the store as it is, or as somebody downloaded it."""
    if importlib.util.find_spec("model_signing") is None or importlib.util.find_spec("OpenSSL") is None:
        pytest.skip("model-signing and pyOpenSSL are not installed: `pip install -c constraints.txt -e .[test]`")
    signer = generate_private_key(curve)
    _, public = pem_files(tmp_path, signer)
    for name, content in signatures((written / "evidence" / PROVENANCE_FILE).read_bytes(), signer).items():
        (tmp_path / name).write_bytes(content)
    (weights,) = (written / "store").glob("objects/*/*/hf")
    (files,) = (path.parent for path in (written / "store").glob("objects/*/*/*.gguf"))
    copied = shutil.copytree(weights, tmp_path / "hf")

    def verified(directory, signature):
        command = [sys.executable, "-m", "model_signing", "verify", "key", directory, "--signature", signature]
        given = [*map(str, command), "--public_key", str(public)]
        return subprocess.run(given, cwd=tmp_path, capture_output=True, text=True, check=False)

    for directory, name in ((copied, "model.sig"), (files, "model-gguf.sig")):
        assert verified(directory, tmp_path / name).returncode == 0, verified(directory, tmp_path / name)
    (copied / "model.safetensors").write_text("the weights of A model")
    refused = verified(copied, tmp_path / "model.sig")
    assert refused.returncode and "model.safetensors" in refused.stdout + refused.stderr


def test_another_key_or_a_statement_signed_before_a_change_is_refused(copied, key):
    evidence, store = copied
    other = generate_private_key(SECP256R1())
    problems = verify_release(evidence, store, other.public_key()).problems
    assert [problem.partition(" does not hold this statement, signed with key")[0] for problem in problems] == [
        BUNDLE_FILE,
        "model.sig",
        "model-gguf.sig",
    ]
    forged = sign((evidence / PROVENANCE_FILE).read_bytes(), other).decode()
    (evidence / BUNDLE_FILE).write_text(forged.replace(key_id(other.public_key()), key_id(key.public_key())))
    (problem,) = verify_release(evidence, store, key.public_key()).problems
    assert "did not make" in problem
    (evidence / BUNDLE_FILE).unlink()
    (problem,) = verify_release(evidence, store, key.public_key()).problems
    assert problem == f"{BUNDLE_FILE} does not exist: the statement is not signed"


def test_a_key_that_cannot_sign_is_one_sentence_without_the_key(tmp_path, key, monkeypatch):
    private, public = pem_files(tmp_path, key, b"secret words")
    with pytest.raises(ValueError, match=f"is encrypted, set {PASSPHRASE_VARIABLE}"):
        read_private_key(private)
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "secret wards")
    with pytest.raises(ValueError, match=r"is not its passphrase: `openssl .* -out KEY` makes one") as refused:
        read_private_key(private)
    assert "secret" not in str(refused.value)
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "secret words")
    assert read_private_key(private).public_key() == key.public_key() == read_public_key(public)
    monkeypatch.delenv(PASSPHRASE_VARIABLE)
    private, public = pem_files(tmp_path, generate_private_key(SECP256K1()))
    with pytest.raises(ValueError, match="is no key of the curves secp256r1"):
        read_private_key(private)
    with pytest.raises(ValueError, match=r"holds no private key in PEM: `openssl .* -out KEY` makes one") as refused:
        read_private_key(public)
    assert "BEGIN" not in str(refused.value)


@pytest.mark.parametrize(
    ("num_tokens", "differences"), [(12, {}), (13, {"train_phase": "recipe num_tokens: 12 -> 13"})]
)
def test_a_second_build_is_compared_step_by_step_and_what_differs_is_named(written, tmp_path, num_tokens, differences):
    other = open_store(str(tmp_path / "store"), Home(tmp_path / "home"))
    make_release(other, num_tokens)
    compared = compare_builds(read_statement(written / "evidence"), read_manifest_graph(other))
    assert {each.step: each.difference for each in compared if each.difference} == differences
    assert [each.step for each in compared][-2:] == ["train_phase", "convert_to_gguf"], "the decision is left out"
    (other.root / "manifests" / f"{keys_of(other)['pack_phase']}.json").unlink()
    compared = compare_builds(read_statement(written / "evidence"), read_manifest_graph(other))
    missing = {each.step for each in compared if each.difference == "the other run did not come to this step"}
    assert missing == {"pack_phase"}


def keys_of(store) -> dict[str, str]:
    return {made.step: made.key for made in store.iterate_manifests()}


def test_another_scale_is_no_rebuild(written):
    with pytest.raises(ValueError, match=r"--rebuild tiny makes glm46-tiny, and .* is about glm46-micro"):
        rebuild_release(written / "evidence", "tiny", None)
