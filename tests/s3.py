"""An S3 server on loopback (moto's) that can be told to fail: some requests, short answers, none at all."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import pytest
import s3fs
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


class Store:
    """Requests pass through `fault` on their way: None lets one pass."""

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = make_server("127.0.0.1", 0, self, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.requests: list[tuple[str, str]] = []
        self.faults = 0
        self.fault: Callable[[int, str], str | None] = lambda number, method: None
        self._lock = threading.Lock()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __call__(self, environ: dict[str, Any], start_response: Callable) -> Iterable[bytes]:
        with self._lock:
            self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
            fault = self.fault(len(self.requests), environ["REQUEST_METHOD"])
            self.faults += fault is not None
        if fault == "fail":
            start_response("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        if fault != "short":
            return self._app(environ, start_response)
        told: list[Any] = []
        data = b"".join(self._app(environ, lambda *facts: told.append(facts)))
        cut = data[: len(data) // 2]
        headers = [h for h in told[0][1] if not h[0].lower().startswith(("content-length", "x-amz-checksum"))]
        start_response(told[0][0], [*headers, ("Content-Length", str(len(cut)))])
        return [cut]

    @contextmanager
    def failing(self, fault: Callable[[int, str], str | None]) -> Iterator[None]:
        """With faults, of which there must be some."""
        self.fault, self.faults = fault, 0
        try:
            yield
        finally:
            self.fault = lambda number, method: None
        assert self.faults > 0

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        found = boto3.client("s3", endpoint_url=self.url).list_objects_v2(Bucket=bucket, Prefix=prefix)
        return [o["Key"] for o in found.get("Contents", [])]

    def read(self, bucket: str, key: str) -> bytes:
        return boto3.client("s3", endpoint_url=self.url).get_object(Bucket=bucket, Key=key)["Body"].read()

    def write(self, bucket: str, key: str, data: bytes) -> None:
        boto3.client("s3", endpoint_url=self.url).put_object(Bucket=bucket, Key=key, Body=data)

    def remove(self, bucket: str, key: str) -> None:
        boto3.client("s3", endpoint_url=self.url).delete_object(Bucket=bucket, Key=key)


@contextmanager
def serving() -> Iterator[Store]:
    """With a bucket `bucket`; whatever speaks S3 in this process and its children speaks to it."""
    with pytest.MonkeyPatch.context() as patch:
        server = Store()
        for name, value in (
            ("AWS_ENDPOINT_URL", server.url),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
            ("AWS_CONFIG_FILE", "/dev/null"),
            ("AWS_MAX_ATTEMPTS", "1"),  # what is tested is ours, not the client's patience
            ("AWS_EC2_METADATA_DISABLED", "true"),
        ):
            patch.setenv(name, value)
        patch.setattr(s3fs.S3FileSystem, "retries", 1)
        boto3.client("s3", endpoint_url=server.url).create_bucket(Bucket="bucket")
        yield server
        server.close()
