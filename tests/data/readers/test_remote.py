"""Objects in S3 over a real server, behind a proxy that fails as networks and stores do."""

from __future__ import annotations

import gzip
import http.client
import http.server
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.files.s3_objects import s3_client
from tasks.data.readers import source_bytes
from tasks.data.readers.source_bytes import UnreadableSourceError, open_source
from tasks.data.readers.table_records import parquet_lines
from tasks.data.sources.list_sources import list_sources
from tasks.data.sources.remote_sources import remote_files
from tests.conftest import ROOT
from tests.data.sources.test_ingest import read_listing
from tests.support.data_inputs import prose

ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>{}</Message></Error>"


@dataclass
class Proxy:
    """What a proxy in front of the store does to requests for a key: `faults` are used up one by one."""

    url: str = ""
    faults: dict[str, list[str]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    page: int = 1000
    """Objects per answer to a listing."""


@pytest.fixture
def proxy(s3_server, monkeypatch):
    """Between boto3 and the server; the client of the process is made anew with its address."""
    plan, target = Proxy(), urlsplit(s3_server).netloc

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            key = unquote(urlsplit(self.path).path).partition("/glm46/")[2]
            plan.seen[f"{self.command} {key}"] += 1
            fault = plan.faults[key].pop(0) if plan.faults.get(key) else ""
            if fault[:3].isdigit():
                self._answer(
                    int(fault[:3]),
                    {"Content-Type": "application/xml"},
                    ERROR.format(fault[4:], "sent by the proxy").encode(),
                )
                return
            upstream = http.client.HTTPConnection(target)
            path = f"{self.path}&max-keys={plan.page}" if "list-type=2" in self.path else self.path
            upstream.request(self.command, path, headers=dict(self.headers))
            answer = upstream.getresponse()
            body = answer.read()
            headers = {
                name: value
                for name, value in answer.getheaders()
                if name.lower() not in ("transfer-encoding", "connection")
            }
            headers["Content-Length"] = headers.get("Content-Length", str(len(body)))
            self._answer(answer.status, headers, body[: len(body) // 2] if fault == "cut" else body)
            self.close_connection = fault == "cut"

        do_HEAD = do_GET

        def _answer(self, status, headers, body):
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_):
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    plan.url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", plan.url)
    monkeypatch.setattr(source_bytes, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.001)
    s3_client.cache_clear()
    yield plan
    server.shutdown()
    s3_client.cache_clear()


@pytest.fixture
def put_directly(s3_server, monkeypatch):
    """Objects without the proxy."""
    import boto3

    client = boto3.client("s3")
    return lambda key, body: client.put_object(Bucket="glm46", Key=key, Body=body)


LINES = b"".join(json.dumps({"text": prose(number, 40)}).encode() + b"\n" for number in range(60))


def test_an_answer_that_breaks_off_or_asks_to_slow_down_is_asked_for_again(put_directly, proxy):
    for name, body in (("a.jsonl", LINES), ("b.jsonl.gz", gzip.compress(LINES))):
        put_directly(f"broken/{name}", body)
    listing = list_sources("s3://glm46/broken")
    whole = read_listing(listing)
    assert len(whole) == 120
    proxy.faults = {
        f"broken/{file.name}": ["cut", "503 SlowDown", "503 SlowDown", "500 InternalError", "cut"]
        for file in listing.files
    }
    assert read_listing(listing) == whole and not any(proxy.faults.values())


@pytest.mark.parametrize(
    ("faults", "problem"),
    [
        (["403 AccessDenied"] * 9, "AccessDenied"),
        (["cut"] * 9, "broke off 6 times"),
        (["503 SlowDown"] * 30, "SlowDown"),
    ],
)
def test_what_stays_unreadable_is_named_and_no_record_is_called_damaged(put_directly, proxy, faults, problem):
    put_directly("closed/a.jsonl", LINES)
    listing = list_sources("s3://glm46/closed")
    proxy.faults = {"closed/a.jsonl": faults}
    (row,) = read_listing(listing)
    assert (row["stream"], row["source"]) == ("unreadable", "a.jsonl")
    assert row["detail"].startswith("s3://glm46/closed/a.jsonl: ") and problem in row["detail"]


def test_a_parquet_object_keeps_the_reason_why_it_cannot_be_read(put_directly, proxy, tmp_path):
    pq.write_table(
        pa.table({"text": [prose(number, 40) for number in range(60)]}), tmp_path / "x.parquet", row_group_size=20
    )
    put_directly("table/x.parquet", (tmp_path / "x.parquet").read_bytes())
    address = "s3://glm46/table/x.parquet"
    assert [line.reason for line in parquet_lines("x", address, "", 10**6, lambda names: (names, ""))] == [""] * 60
    proxy.faults = {"table/x.parquet": ["", "403 AccessDenied", "403 AccessDenied"]}
    with pytest.raises(UnreadableSourceError, match=r"table/x\.parquet: .*AccessDenied"):
        list(parquet_lines("x", address, "", 10**6, lambda names: (names, "")))


def test_a_small_object_costs_one_request_and_an_empty_one_too(put_directly, proxy):
    names = ["Straße mit Leerzeichen/ü+&=?#%41.jsonl", "empty.jsonl", "東京.txt"]
    for name, body in zip(names, (LINES, b"", b"Tokyo"), strict=True):
        put_directly(f"names/{name}", body)
    rows = read_listing(list_sources("s3://glm46/names"))
    assert {row["source"] for row in rows} == set(names)
    assert [row["reason"] for row in rows if row["source"] == "empty.jsonl"] == ["empty_file"]
    proxy.seen.clear()
    for name in names:
        with open_source(f"s3://glm46/names/{name}") as file:
            file.read(1 << 20)
            assert file.read() == b""
    assert sum(proxy.seen.values()) == 3


def test_many_objects_are_listed_page_by_page_in_the_order_of_their_names(put_directly, proxy):
    number, proxy.page = 130, 50
    for at in range(number):
        put_directly(f"many/{at % 50}/{at:05}.txt", b"text")
    files = remote_files("s3://glm46/many/")
    assert len(files) == number and [file.name for file in files] == sorted(file.name for file in files)
    assert sum(proxy.seen.values()) == 3


def test_an_endpoint_of_the_hub_is_taken_from_the_environment(tmp_path):
    """A process of its own: huggingface_hub reads HF_ENDPOINT when it is imported. A branch whose name has slashes is
    one."""

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            wanted = "/api/datasets/owner/name/revision/refs%2Fconvert%2Fparquet"
            answer = {
                "id": "owner/name",
                "sha": "0" * 40,
                "siblings": [{"rfilename": "d/0.parquet", "size": 4, "blobId": "b" * 40}],
            }
            body = json.dumps(answer if self.path.startswith(wanted) else {"error": self.path}).encode()
            self.send_response(200 if self.path.startswith(wanted) else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = "from tasks.data.sources.remote_sources import remote_files; print(*[file.address for file in remote_files('hf://owner/name@refs/convert/parquet')])"
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
        "HF_HOME": str(tmp_path),
    }
    environment.pop("HF_HUB_OFFLINE", None)
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    server.shutdown()
    assert ran.stdout == f"hf://owner/name@{'0' * 40}/d/0.parquet\n", ran.stderr
