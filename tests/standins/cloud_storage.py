"""A stand-in for Cloud Storage on loopback, which fails the way the real one does.

TensorFlow's gs:// reaches it as an HTTPS proxy (CONNECT) with a certificate of its own, TensorStore and google-cloud-storage
by its address. Objects live in memory. In a shell:

  eval "$(python -m tests.standins.cloud_storage --bucket=my-bucket)"
  python -m perex_t5x.train --gin.MODEL_DIR="'gs://my-bucket/run'" ...
  kill $CLOUD_STORAGE_PID

By documentation (cloud.google.com/storage/docs/json_api): media, multipart and resumable uploads, downloads with ranges,
lists with delimiter and pages, rewrite, compose, preconditions on generations, checksums, permissions by operation, names
and chunk sizes that are refused. Not there: batches, notifications, ACLs, object versions, folders and gRPC.
"""

from __future__ import annotations

import argparse
import base64
import collections
import contextlib
import datetime
import hashlib
import json
import os
import re
import select
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import google_crc32c

_ROOT = Path(__file__).parents[2]
_CONTROL = "/standin/"
_CHUNK = 256 * 1024  # all parts of a resumable upload but the last one are multiples of it
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
PERMISSIONS = (
    "storage.buckets.get",
    "storage.objects.create",
    "storage.objects.delete",
    "storage.objects.get",
    "storage.objects.list",
    "storage.objects.update",
)


# The server.


class _RefusedError(Exception):
    """An answer with an error code, as JSON: {"error": {"code": ..., "message": ...}}."""

    def __init__(self, code: int, message: str, reason: str = ""):
        super().__init__(message)
        self.code, self.message, self.reason = code, message, reason


class _ClosedError(Exception):
    """The connection ends without an answer."""


class _Object:
    def __init__(self, data: bytes, generation: int, metadata: Mapping[str, str], content_type: str):
        self.data, self.generation = data, generation
        self.metadata, self.content_type, self.metageneration = dict(metadata), content_type, 1
        self.created = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self.md5 = base64.b64encode(hashlib.md5(data).digest()).decode()
        self.crc32c = base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


class _Faults:
    """What goes wrong, set while the server runs. See `CloudStorage.faults`."""

    def __init__(self, latency=0.0, writes_per_second=0.0, bytes_per_second=0.0, page_size=1000, deny=(), rules=()):
        self.latency, self.writes_per_second, self.bytes_per_second = latency, writes_per_second, bytes_per_second
        self.page_size, self.deny = page_size, frozenset(deny)
        self.rules = [dict(rule, seen=0) for rule in rules]
        if unknown := self.deny - set(PERMISSIONS):
            raise _RefusedError(400, f"unknown permissions: {sorted(unknown)}")
        for rule in self.rules:
            if unknown := set(rule) - {"action", "code", "seconds", "every", "times", "operation", "name", "seen"}:
                raise _RefusedError(400, f"a rule has no {sorted(unknown)}")
            if rule["action"] not in ("answer", "hang", "tear", "lose_answer"):
                raise _RefusedError(400, f"no such action: {rule['action']!r}")

    def rule(self, operation: str, name: str, tear: bool = False) -> dict[str, Any] | None:
        """The first rule that strikes this request."""
        for rule in self.rules:
            if tear != (rule["action"] == "tear"):
                continue
            if not re.search(rule.get("operation", ""), operation) or not re.search(rule.get("name", ""), name):
                continue
            rule["seen"] += 1
            if rule["seen"] % rule.get("every", 1) == 0 and rule["seen"] // rule.get("every", 1) <= rule.get(
                "times", 1e9
            ):
                return rule
        return None


class _Store:
    """Buckets, uploads that have begun, and what has been asked so far."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.buckets: dict[str, dict[str, Any]] = {}
        self.objects: dict[str, dict[str, _Object]] = {}
        self.uploads: dict[str, dict[str, Any]] = {}
        self.faults = _Faults()
        self.requests: collections.deque[dict[str, Any]] = collections.deque(maxlen=100_000)
        self._last_write: dict[tuple[str, str], float] = {}
        self._generation = int(time.time() * 1e6)

    def bucket(self, bucket: str) -> dict[str, _Object]:
        if bucket not in self.objects:
            raise _RefusedError(404, "The specified bucket does not exist.", "notFound")
        return self.objects[bucket]

    def make_bucket(self, name: str, description: Mapping[str, Any]) -> None:
        if not _BUCKET_NAME.fullmatch(name) or ".." in name or name.startswith("goog"):
            raise _RefusedError(400, f"Invalid bucket name: '{name}'", "invalid")
        if name in self.buckets:
            raise _RefusedError(409, "The requested bucket name is not available.", "conflict")
        defaults = {
            "kind": "storage#bucket",
            "id": name,
            "name": name,
            "location": "US-WEST4",
            "locationType": "region",
        }
        self.buckets[name], self.objects[name] = {**defaults, "storageClass": "STANDARD", **description}, {}

    def demand(self, permission: str, bucket: str, name: str = "") -> None:
        self.bucket(bucket)
        if permission in self.faults.deny:
            kind = "object" if name else "bucket"
            raise _RefusedError(
                403,
                f"stand-in@project.iam.gserviceaccount.com does not have {permission} access to the Google Cloud Storage "
                f"{kind}. Permission '{permission}' denied on resource (or it may not exist).",
                "forbidden",
            )

    def find(self, bucket: str, name: str, query: Mapping[str, str], permission="storage.objects.get") -> _Object:
        self.demand(permission, bucket, name)
        found = self.bucket(bucket).get(name)
        if found is None or ("generation" in query and _integer(query, "generation") != found.generation):
            self.demand("storage.objects.list", bucket, name)  # who may not list may not learn what is missing either
            raise _RefusedError(404, f"No such object: {bucket}/{name}", "notFound")
        _check_generation(found, query)
        return found

    def write(
        self, bucket: str, name: str, data: bytes, query: Mapping[str, str], resource: Mapping[str, Any]
    ) -> _Object:
        _check_name(name)
        with self.lock:
            self.demand("storage.objects.create", bucket, name)
            former = self.bucket(bucket).get(name)
            _check_generation(former, query)
            if former is not None:
                self.demand("storage.objects.delete", bucket, name)
            rate, now = self.faults.writes_per_second, time.monotonic()
            if rate and now - self._last_write.get((bucket, name), -1e9) < 1 / rate:
                raise _RefusedError(
                    429,
                    f"The object {bucket}/{name} exceeded the rate limit for object mutation operations (create, update, "
                    "and delete). Please reduce your request rate.",
                    "rateLimitExceeded",
                )
            self._generation += 1
            content_type = resource.get("contentType") or "application/octet-stream"
            new = _Object(data, self._generation, resource.get("metadata") or {}, content_type)
            for checksum, actual in (("md5Hash", new.md5), ("crc32c", new.crc32c)):
                if resource.get(checksum, actual) != actual:
                    raise _RefusedError(
                        400, f'Provided {checksum} "{resource[checksum]}" doesn\'t match calculated "{actual}".'
                    )
            self._last_write[bucket, name] = now
            self.bucket(bucket)[name] = new
            return new


def _check_name(name: str) -> None:
    if not name or len(name.encode()) > 1024 or "\n" in name or "\r" in name or name in (".", ".."):
        raise _RefusedError(400, f"Invalid object name: {name!r}", "invalid")


def _integer(query: Mapping[str, str], key: str) -> int:
    try:
        return int(query[key])
    except ValueError:
        raise _RefusedError(400, f"Invalid value '{query[key]}' for {key}", "invalidParameter") from None


def _check_generation(found: _Object | None, query: Mapping[str, str]) -> None:
    generation = found.generation if found else 0
    if "ifGenerationMatch" in query and _integer(query, "ifGenerationMatch") != generation:
        raise _RefusedError(412, "At least one of the pre-conditions you specified did not hold.", "conditionNotMet")
    if "ifGenerationNotMatch" in query and _integer(query, "ifGenerationNotMatch") == generation:
        raise _RefusedError(304, "")


def _resource(bucket: str, name: str, o: _Object) -> dict[str, Any]:
    return {
        "kind": "storage#object",
        "id": f"{bucket}/{name}/{o.generation}",
        "name": name,
        "bucket": bucket,
        "generation": str(o.generation),
        "metageneration": str(o.metageneration),
        "contentType": o.content_type,
        "size": str(len(o.data)),
        "md5Hash": o.md5,
        "crc32c": o.crc32c,
        "etag": f"etag{o.generation}",
        "timeCreated": o.created,
        "updated": o.created,
        **({"metadata": o.metadata} if o.metadata else {}),
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes, of which the second would wait 40 ms
    store: _Store
    tls: ssl.SSLContext
    host = ""  # behind CONNECT

    def log_message(self, *_: Any) -> None:
        pass

    def do_CONNECT(self) -> None:
        host = self.path.rpartition(":")[0]
        if not host.endswith(".googleapis.com"):
            return self.answer(502, {"error": f"the stand-in knows googleapis.com alone, not {host}"})
        self.send_response(200, "Connection established")
        self.end_headers()
        self.connection = self.tls.wrap_socket(self.connection, server_side=True)
        self.rfile, self.wfile = self.connection.makefile("rb", -1), self.connection.makefile("wb", 0)
        self.host, self.close_connection = host, False

    def finish(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def answer(self, code: int, body: Any = b"", headers: Mapping[str, str] = {}, content_type: str = "") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        if code != 204 and code != 304:
            self.send_header("Content-Type", content_type or "application/json; charset=UTF-8")
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.code = code
        if self.command != "HEAD" and code not in (204, 304):
            self.slowly(data)

    def slowly(self, data: bytes) -> None:
        rate = self.store.faults.bytes_per_second
        step = max(1, int(rate / 20)) if rate else len(data) or 1
        for i in range(0, len(data), step):
            if rate:
                time.sleep(len(data[i : i + step]) / rate)
            self.wfile.write(data[i : i + step])

    def body(self) -> bytes:
        """What was sent. An upload that is to be torn is not read to its end."""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                if len(parts) == 1:
                    self.tear(parts[0])
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        if "Content-Length" not in self.headers and self.command in ("POST", "PUT", "PATCH"):
            raise _RefusedError(411, "POST requests require a Content-length header.")
        length = int(self.headers.get("Content-Length") or 0)
        data = self.receive(length // 2)
        if length:
            self.tear(data)
        return data + self.receive(length - len(data))

    def receive(self, length: int) -> bytes:
        rate, parts = self.store.faults.bytes_per_second, []
        for i in range(0, length, step := 1 << 16):
            parts.append(self.rfile.read(min(step, length - i)))
            if rate:
                time.sleep(len(parts[-1]) / rate)
        data = b"".join(parts)
        if len(data) < length:
            raise _ClosedError  # torn by the client
        return data

    def tear(self, half: bytes) -> None:
        """Ends the connection if a rule says so; the object's name is in the query, in the session or in the first part."""
        split = urllib.parse.urlsplit(self.path)
        if "/upload/" not in split.path:
            return
        query, bucket = _query(split.query), split.path.split("/")[-2]
        upload = self.store.uploads.get(query.get("upload_id", ""))
        named = re.search(rb'"name": *"([^"]+)"', half)
        name = upload["to"][1] if upload else query.get("name") or (named[1].decode() if named else "")
        with self.store.lock:
            rule = self.store.faults.rule("insert", f"{bucket}/{name}", tear=True)
        if rule is not None:
            self.operation, self.name = "insert", f"{bucket}/{name}"
            raise _ClosedError

    def serve(self) -> None:
        started, self.code, self.operation, self.name, self.size = time.time(), 0, "unknown", "", 0
        split = urllib.parse.urlsplit(self.path)
        try:
            try:
                if split.path.startswith(_CONTROL):
                    return self.control(split.path[len(_CONTROL) :], _query(split.query))
                time.sleep(self.store.faults.latency)
                self.route(split.path, _query(split.query))
            except _RefusedError as e:
                details = [{"message": e.message, "domain": "global", "reason": e.reason}]
                error = {"error": {"code": e.code, "message": e.message, "errors": details}}
                self.answer(e.code, error if e.message else b"")
        except (_ClosedError, OSError):
            self.close_connection = True
            with contextlib.suppress(OSError):  # at once, and also for whoever still sends
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                self.connection.shutdown(socket.SHUT_RDWR)
        finally:
            if not split.path.startswith(_CONTROL):
                row = {
                    "time": started,
                    "seconds": time.time() - started,
                    "operation": self.operation,
                    "code": self.code,
                }
                self.store.requests.append({**row, "name": self.name, "size": self.size})

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = serve

    def begin(self, operation: str, bucket: str, name: str = "", size: int = 0) -> None:
        """Notes what is asked, and lets it fail where a rule says so."""
        self.operation, self.name, self.size = operation, f"{bucket}/{name}" if name else bucket, size
        if self.host and not self.headers.get("Authorization", "").startswith("Bearer "):
            raise _RefusedError(401, "Anonymous caller does not have storage access.", "required")
        with self.store.lock:
            rule = self.store.faults.rule(operation, self.name)
        if rule is None:
            return
        if rule["action"] == "answer":
            code = rule.get("code", 503)
            words = {503: "Service Unavailable", 500: "Backend Error", 429: "Too Many Requests", 408: "Request Timeout"}
            raise _RefusedError(code, f"{words.get(code, 'refused')} (a fault of the stand-in)", "backendError")
        if rule["action"] == "hang":
            time.sleep(rule.get("seconds", 3600))
            raise _ClosedError
        self.answer = lambda *_, **__: (_ for _ in ()).throw(_ClosedError)  # lose_answer: done, but nobody learns of it

    def route(self, path: str, query: dict[str, str]) -> None:
        self.__dict__.pop("answer", None)
        if self.host == "oauth2.googleapis.com":
            self.body()
            return self.answer(200, {"access_token": "stand-in", "expires_in": 3600, "token_type": "Bearer"})
        data = self.body()
        if match := re.fullmatch(r"(?:/resumable)?/upload/storage/v1/b/([^/]+)/o", path):
            return self.upload(urllib.parse.unquote(match[1]), query, data)
        if path == "/storage/v1/b" and self.command == "POST":
            description = json.loads(data)
            self.store.make_bucket(description["name"], description)
            return self.answer(200, self.store.buckets[description["name"]])
        if match := re.fullmatch(r"/(?:download/)?storage/v1/b/([^/]+)(/.*)?", path):
            return self.json_api(
                urllib.parse.unquote(match[1]), match[2] or "", query, data, path.startswith("/download")
            )
        if self.host.endswith("storage.googleapis.com") or self.headers.get("Host", "").startswith(
            "storage.googleapis.com"
        ):
            bucket, _, name = urllib.parse.unquote(path).lstrip("/").partition("/")
            if self.command in ("GET", "HEAD") and name:
                self.begin("read", bucket, name)
                return self.read(self.store.find(bucket, name, query))
        raise _RefusedError(400, f"the stand-in does not know {self.command} {path}")

    def json_api(self, bucket: str, rest: str, query: dict[str, str], data: bytes, download: bool) -> None:
        store, objects = self.store, re.fullmatch(r"/o(?:/(.*))?", rest)
        if not objects:
            if rest == "/iam/testPermissions":
                self.begin("iam", bucket)
                store.bucket(bucket)
                asked = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query).get("permissions", [])
                allowed = [permission for permission in asked if permission not in store.faults.deny]
                answer = {"kind": "storage#testIamPermissionsResponse"}
                return self.answer(200, answer | ({"permissions": allowed} if allowed else {}))
            if rest not in ("", "/storageLayout") or self.command != "GET":
                raise _RefusedError(400, f"the stand-in does not know {self.command} {self.path}")
            self.begin("bucket", bucket)
            store.demand("storage.buckets.get" if not rest else "storage.objects.list", bucket)
            return self.answer(200, store.buckets[bucket])
        if objects[1] is None:
            self.begin("list", bucket)
            store.demand("storage.objects.list", bucket)
            return self.answer(200, self.listing(bucket, query))
        if match := re.fullmatch(r"(.*)/(?:rewriteTo|copyTo)/b/([^/]+)/o/(.*)", objects[1]):
            source, to, name = (urllib.parse.unquote(part) for part in match.groups())
            self.begin("rewrite", to, name)
            found = store.find(bucket, source, {})
            new = store.write(to, name, found.data, query, json.loads(data or b"{}"))
            sizes = {"totalBytesRewritten": str(len(new.data)), "objectSize": str(len(new.data))}
            resource = _resource(to, name, new)
            return self.answer(200, {"kind": "storage#rewriteResponse", "done": True, **sizes, "resource": resource})
        if match := re.fullmatch(r"(.*)/compose", objects[1]):
            name, asked = urllib.parse.unquote(match[1]), json.loads(data)
            self.begin("compose", bucket, name)
            if not 1 <= len(asked["sourceObjects"]) <= 32:
                raise _RefusedError(400, "The number of source components provided exceeds the maximum of 32.")
            parts = [store.find(bucket, part["name"], {}).data for part in asked["sourceObjects"]]
            new = store.write(bucket, name, b"".join(parts), query, asked.get("destination") or {})
            return self.answer(200, _resource(bucket, name, new))
        name = urllib.parse.unquote(objects[1])
        if self.command == "DELETE":
            self.begin("delete", bucket, name)
            with store.lock:
                store.find(bucket, name, query, "storage.objects.delete")
                del store.bucket(bucket)[name]
            return self.answer(204)
        if self.command == "PATCH":
            self.begin("update", bucket, name)
            with store.lock:
                found = store.find(bucket, name, query, "storage.objects.update")
                found.metadata.update(json.loads(data).get("metadata") or {})
                found.metageneration += 1
            return self.answer(200, _resource(bucket, name, found))
        if download or query.get("alt") == "media":
            self.begin("read", bucket, name)
            return self.read(store.find(bucket, name, query))
        self.begin("stat", bucket, name)
        return self.answer(200, _resource(bucket, name, store.find(bucket, name, query)))

    def listing(self, bucket: str, query: Mapping[str, str]) -> dict[str, Any]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = base64.urlsafe_b64decode(query["pageToken"]).decode() if query.get("pageToken") else ""
        limit = min(int(query.get("maxResults") or 1000), self.store.faults.page_size)
        with self.store.lock:
            here = dict(self.store.bucket(bucket))
        entries: dict[str, _Object | None] = {}  # None: everything under this prefix
        for name in sorted(here):
            if not name.startswith(prefix) or name < query.get("startOffset", ""):
                continue
            if query.get("endOffset") and name >= query["endOffset"]:
                continue
            head, found, rest = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            if found:
                entries[prefix + head + delimiter] = None
            if not found or (not rest and query.get("includeTrailingDelimiter") == "true"):
                entries[name] = here[name]
        left = [key for key in sorted(entries) if key > after]
        page = left[:limit]
        answer: dict[str, Any] = {"kind": "storage#objects"}
        if items := [_resource(bucket, key, o) for key in page if (o := entries[key]) is not None]:
            answer["items"] = items
        if prefixes := [key for key in page if entries[key] is None]:
            answer["prefixes"] = prefixes
        if len(left) > limit:
            answer["nextPageToken"] = base64.urlsafe_b64encode(page[-1].encode()).decode()
        return answer

    def read(self, o: _Object) -> None:
        headers = {
            "x-goog-generation": str(o.generation),
            "x-goog-metageneration": str(o.metageneration),
            "x-goog-hash": f"crc32c={o.crc32c},md5={o.md5}",
            "x-goog-stored-content-length": str(len(o.data)),
            "ETag": f'"etag{o.generation}"',
            "Accept-Ranges": "bytes",
        }
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not match or match.groups() == ("", ""):
            self.size = len(o.data)
            return self.answer(200, o.data, headers, o.content_type)
        size = len(o.data)
        first = int(match[1]) if match[1] else max(0, size - int(match[2]))
        last = min(int(match[2]), size - 1) if match[1] and match[2] else size - 1
        if first >= size or first > last:
            return self.answer(416, b"", {"Content-Range": f"bytes */{size}"})
        self.size = last - first + 1
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self.answer(206, o.data[first : last + 1], headers, o.content_type)

    def upload(self, bucket: str, query: dict[str, str], data: bytes) -> None:
        store, kind = self.store, query.get("uploadType")
        if "upload_id" in query:
            return self.resume_upload(query["upload_id"], data)
        if kind == "resumable":
            resource = json.loads(data or b"{}")
            resource.setdefault("contentType", self.headers.get("X-Upload-Content-Type"))
            name = query.get("name") or resource.get("name", "")
            self.begin("start upload", bucket, name)
            _check_name(name)
            store.demand("storage.objects.create", bucket, name)
            upload_id = uuid.uuid4().hex
            with store.lock:
                _check_generation(store.bucket(bucket).get(name), query)
                store.uploads[upload_id] = {"to": (bucket, name), "query": query, "resource": resource, "data": b""}
            base = f"https://{self.host}" if self.host else f"http://{self.headers['Host']}"
            location = f"{base}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={upload_id}"
            return self.answer(200, b"", {"Location": location, "X-GUploader-UploadID": upload_id})
        if kind == "multipart":
            resource, data = self.parts(data)
            name = resource.get("name") or query.get("name", "")
        elif kind == "media":
            name, resource = query.get("name", ""), {"contentType": self.headers.get("Content-Type")}
        else:
            raise _RefusedError(400, f"Invalid value '{kind}' for uploadType", "invalidParameter")
        self.begin("insert", bucket, name, len(data))
        new = store.write(bucket, name, data, query, resource)
        self.answer(200, _resource(bucket, name, new), {"x-goog-generation": str(new.generation)})

    def parts(self, data: bytes) -> tuple[dict[str, Any], bytes]:
        match = re.search(r'boundary="?([^";]+)"?', self.headers.get("Content-Type", ""))
        pieces = (b"\r\n" + data).split(b"\r\n--" + match[1].encode()) if match else []
        if len(pieces) != 4 or not pieces[3].startswith(b"--"):
            raise _RefusedError(400, "Malformed multipart body.", "badRequest")
        resource, content = (piece.split(b"\r\n\r\n", 1)[1] for piece in pieces[1:3])
        return json.loads(resource), content

    def resume_upload(self, upload_id: str, data: bytes) -> None:
        store = self.store
        if upload_id not in store.uploads:
            self.operation = "insert"
            raise _RefusedError(410, "The upload session is gone.", "gone")
        upload = store.uploads[upload_id]
        if "done" in upload:  # the answer to the last part may have been lost
            self.begin("insert", *upload["to"])
            return self.answer(200, upload["done"])
        content_range = self.headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", content_range)
        if content_range and not match:
            raise _RefusedError(400, f"Failed to parse Content-Range header: {content_range}", "badRequest")
        is_query = bool(match) and match[1] is None
        total = match[3] if match else str(len(data))
        # A question alone ("bytes */N") stays a question, unless the object is empty.
        self.begin("upload status" if is_query and total != "0" else "insert", *upload["to"], len(data))
        if not is_query:
            first = int(match[1]) if match else 0
            if first > len(upload["data"]) or (match and int(match[2]) - first + 1 != len(data)):
                raise _RefusedError(503, "Invalid request: the part does not follow what was received.")
            whole = upload["data"][:first] + data
            if (total == "*" or len(whole) < int(total)) and len(data) % _CHUNK:
                raise _RefusedError(400, f"Parts but the last must be multiples of {_CHUNK} bytes.", "badRequest")
            upload["data"] = whole
        if total != "*" and len(upload["data"]) == int(total):
            resource = dict(upload["resource"])
            for part in self.headers.get("X-Goog-Hash", "").split(","):
                key, _, value = part.strip().partition("=")
                if value:
                    resource[{"md5": "md5Hash"}.get(key, key)] = value
            new = store.write(*upload["to"], upload["data"], upload["query"], resource)
            upload["done"], upload["data"] = _resource(*upload["to"], new), b""
            return self.answer(200, upload["done"])
        received = len(upload["data"])
        self.answer(308, b"", {"Range": f"bytes=0-{received - 1}"} if received else {})

    def control(self, action: str, query: dict[str, str]) -> None:
        """What tests ask of the stand-in itself."""
        store, data = self.store, self.body()
        if action == "faults":
            store.faults = _Faults(**json.loads(data))
        elif action == "requests":
            return self.answer(200, [r for r in list(store.requests) if r["name"].split("/")[0] == query["bucket"]])
        elif action == "objects":
            return self.answer(200, sorted(store.bucket(query["bucket"])))
        elif action == "get":
            return self.answer(200, store.find(query["bucket"], query["name"], {}).data)
        elif action == "put":
            faults, store.faults = store.faults, _Faults()
            try:
                store.write(query["bucket"], query["name"], data, {}, {})
            finally:
                store.faults = faults
        elif action == "bucket":
            description = {"hierarchicalNamespace": {"enabled": True}} if query.get("hierarchical") else {}
            store.make_bucket(query["bucket"], description)
        else:
            raise _RefusedError(404, f"no {action}")
        self.answer(200, {})


def _query(text: str) -> dict[str, str]:
    return dict(urllib.parse.parse_qsl(text, keep_blank_values=True))


class _Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 256

    def handle_error(self, *_: Any) -> None:  # a client that went away
        if not isinstance(sys.exc_info()[1], (OSError, _ClosedError)):
            super().handle_error(*_)


def _certificates(folder: Path) -> None:
    """An authority of our own (ca.crt), and googleapis.com's certificate by it (server.crt, server.key)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.UTC)

    def certificate(name: str, key: Any, issuer: str, signer: Any, *extensions: tuple[Any, bool]) -> bytes:
        common = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in (name, issuer)]
        builder = x509.CertificateBuilder(common[1], common[0], key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
            now + datetime.timedelta(days=7)
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    names = x509.SubjectAlternativeName(
        [x509.DNSName(name) for name in ("*.googleapis.com", "*.storage.googleapis.com")]
    )
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    (folder / "ca.crt").write_bytes(
        certificate(
            "stand-in", authority, "stand-in", authority, (x509.BasicConstraints(True, None), True), (usage, True)
        )
    )
    (folder / "server.crt").write_bytes(certificate("*.googleapis.com", server, "stand-in", authority, (names, False)))
    (folder / "server.key").write_bytes(
        server.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )


def serve(folder: Path, report: Callable[[int], None]) -> None:
    _certificates(folder)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "server.crt", folder / "server.key")
    handler = type("Handler", (_Handler,), {"store": _Store(), "tls": tls})
    server = _Server(("127.0.0.1", 0), handler)
    report(server.server_address[1])
    server.serve_forever()


# Its users.


class CloudStorage:
    """A bucket of the stand-in, for a test: see `faults` for what can go wrong.

    Attributes:
      bucket: "gs://NAME".
      environment: variables that lead TensorFlow, TensorStore, Orbax and google-cloud-storage to the stand-in.
    """

    def __init__(self, address: str, folder: Path, bucket: str, hierarchical: bool = False):
        self._address, self._name = address, bucket
        self.bucket, self.environment = f"gs://{bucket}", environment(address, folder)
        self._ask("bucket", data=b"", hierarchical="1" if hierarchical else "")

    def objects(self, prefix: str = "") -> list[str]:
        """Names of the objects in the bucket, sorted."""
        return [name for name in json.loads(self._ask("objects")) if name.startswith(prefix)]

    def get(self, name: str) -> bytes:
        """An object's content; KeyError if there is none."""
        try:
            return self._ask("get", name=name)
        except urllib.error.HTTPError as e:
            raise KeyError(name) from e

    def put(self, name: str, data: bytes) -> None:
        """Puts an object there, past all faults."""
        self._ask("put", data=data, name=name)

    def faults(self, **faults: Any) -> None:
        """Sets what goes wrong from now on, for all buckets; without arguments nothing does.

        Args:
          latency: seconds before each answer.
          writes_per_second: for each object; more are answered by 429. The real one allows 1.
          bytes_per_second: of each connection.
          page_size: at most this many names in an answer to a list.
          deny: permissions that the caller does not have, such as "storage.objects.create": 403.
          rules: for single requests, the first that fits: {"action": "answer" (with "code", 503 unless told), "hang"
            ("seconds", then the connection ends), "tear" (the connection ends in the upload, nothing is stored) or
            "lose_answer" (done, then the connection ends), "every": k-th of those that fit, "times": at most, "operation":
            regular expression of insert, start upload, upload status, read, stat, list, delete, rewrite, compose, update,
            bucket, iam; "name": regular expression of "BUCKET/OBJECT"}.
        """
        self._ask("faults", data=json.dumps(faults).encode())

    def requests(self) -> list[dict[str, Any]]:
        """What was asked about this bucket, as {"time", "seconds", "operation", "name", "code", "size"}. Names are
        "BUCKET/OBJECT"; code 0 is a connection that ended without an answer."""
        return json.loads(self._ask("requests"))

    def stats(self) -> dict[str, Any]:
        """Counts of `requests`: by "operations", by "codes", and "writes" and "bytes" by object, of those that succeeded."""
        rows = self.requests()
        written = [row for row in rows if row["operation"] in ("insert", "rewrite", "compose") and row["code"] == 200]
        size: collections.Counter[str] = collections.Counter()
        for row in written:
            size[row["name"].partition("/")[2]] += row["size"]
        return {
            "operations": dict(collections.Counter(row["operation"] for row in rows)),
            "codes": dict(collections.Counter(row["code"] for row in rows)),
            "writes": dict(collections.Counter(row["name"].partition("/")[2] for row in written)),
            "bytes": dict(size),
        }

    def _ask(self, action: str, data: bytes | None = None, **query: str) -> bytes:
        url = f"{self._address}{_CONTROL}{action}?{urllib.parse.urlencode({'bucket': self._name, **query})}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(url, data=data), timeout=60) as answer:
            return answer.read()


def environment(address: str, folder: Path) -> dict[str, str]:
    here, nowhere = "127.0.0.1,localhost", "127.0.0.1:9"
    return {
        "https_proxy": address,
        "HTTPS_PROXY": address,
        "no_proxy": here,
        "NO_PROXY": here,
        "CURL_CA_BUNDLE": str(folder / "ca.crt"),
        "REQUESTS_CA_BUNDLE": str(folder / "ca.crt"),
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "stand-in",
        "GOOGLE_CLOUD_PROJECT": "project",
        "NO_GCE_CHECK": "true",
        "GCE_METADATA_HOST": nowhere,
        "GCE_METADATA_IP": nowhere,
        "STORAGE_EMULATOR_HOST": address,
        "TENSORSTORE_GCS_HTTP_URL": address,
    }


@contextlib.contextmanager
def running() -> Iterator[Callable[..., CloudStorage]]:
    """Starts the server in a process of its own; yields a function that makes a bucket with a name nobody else has."""
    with tempfile.TemporaryDirectory(prefix="cloud_storage_") as name:
        process = _start(Path(name), stdin=subprocess.PIPE)
        try:
            address = _address(process)
            yield lambda **options: CloudStorage(address, Path(name), f"bucket-{uuid.uuid4().hex[:12]}", **options)
        finally:
            process.kill()
            process.wait()


def _start(folder: Path, **options: Any) -> subprocess.Popen[str]:
    """The server ends with its standard input, so that it cannot outlive whoever started it."""
    command = [sys.executable, "-m", "tests.standins.cloud_storage", "--serve", str(folder)]
    return subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, **options)


def _address(process: subprocess.Popen[str]) -> str:
    ready, _, _ = select.select([process.stdout], [], [], 60)
    line = process.stdout.readline() if ready else ""
    if not line.strip().isdigit():
        raise RuntimeError("the stand-in for Cloud Storage did not start")
    return f"http://127.0.0.1:{int(line)}"


def _end_with_stdin() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description="Starts the stand-in; prints the variables that lead to it.")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--bucket", action="append", default=[], help="to make at the start; may be repeated")
    args = parser.parse_args()
    if args.serve:
        if not os.environ.get("CLOUD_STORAGE_STAYS"):
            threading.Thread(target=_end_with_stdin, daemon=True).start()
        serve(args.serve, lambda port: print(port, flush=True))
    folder = Path(tempfile.mkdtemp(prefix="cloud_storage_"))
    options = {"stderr": open(folder / "server.log", "w"), "start_new_session": True, "stdin": subprocess.DEVNULL}
    process = _start(folder, env={**os.environ, "CLOUD_STORAGE_STAYS": "1"}, **options)
    address = _address(process)
    for bucket in args.bucket or ["bucket"]:
        CloudStorage(address, folder, bucket)
    variables = {**environment(address, folder), "CLOUD_STORAGE_PID": str(process.pid), "CLOUD_STORAGE_URL": address}
    for key, value in variables.items():
        print(f"export {key}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
