"""A stub of an OpenAI-compatible server, for one process and loopback only. It answers by rule, in words
that can be foretold, and misbehaves as it is told.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Misbehave = Callable[[int, dict[str, Any]], "int | str | None"]
"""(how many completions were asked for before, the request) → an HTTP status, "cut", "stall", or None:
answer.
"""

STOP = 2


def words_of(messages: list[dict[str, Any]]) -> str:
    return f"answer {len(messages)} to {messages[-1]['content']}"


def ids_of(text: str) -> list[int]:
    return [3 + b for b in text.encode()]


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that were killed are no news."""


class Stub:
    """`with Stub() as stub:` serves at `stub.url`. `asked` counts requests by the last message's words."""

    def __init__(
        self,
        misbehave: Misbehave | None = None,
        gives_ids: str = "vllm",
        seconds: float = 0.0,
        said: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        """`gives_ids`: as vllm or sglang do, "no" ignores being asked, "refused" answers 400. `seconds` is
        how long an answer takes, `said` what is put over a choice.
        """
        self.misbehave, self.gives_ids, self.seconds, self.said = misbehave, gives_ids, seconds, said
        self.requests: list[dict[str, Any]] = []
        self.asked: Counter[str] = Counter()
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                assert self.path == "/v1/models"
                self.send(200, {"data": [{"id": "stub"}]})

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with stub.lock:
                    before = len(stub.requests)
                    stub.requests.append({**request, "path": self.path})
                    stub.in_flight += 1
                    stub.most_in_flight = max(stub.most_in_flight, stub.in_flight)
                try:
                    self.answer(stub.misbehave(before, request) if stub.misbehave else None, request)
                except (BrokenPipeError, ConnectionResetError):
                    pass
                finally:
                    with stub.lock:
                        stub.in_flight -= 1

            def answer(self, fault: int | str | None, request: dict[str, Any]) -> None:
                time.sleep(stub.seconds)
                if fault == "stall":
                    time.sleep(1.0)
                if fault in ("cut", "stall"):
                    self.close_connection = True
                    self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n{")
                elif isinstance(fault, int):
                    self.send(fault, {"error": {"message": f"told to say {fault}"}})
                elif request.get("return_token_ids") and stub.gives_ids == "refused":
                    self.send(400, {"error": {"message": "unknown field return_token_ids"}})
                else:
                    self.send(200, stub.completion(request))

            def send(self, status: int, value: dict[str, Any]) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.http = _Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)

    def completion(self, request: dict[str, Any]) -> dict[str, Any]:
        if "prompt" in request:
            text, prompt_ids = f"user turn {request['seed']}", request["prompt"]
            choice: dict[str, Any] = {"text": text}
        else:
            text = words_of(request["messages"])
            # what a template makes of messages: everything before is repeated, token for token
            prompt_ids = [1, *(i for m in request["messages"] for i in [*ids_of(m["content"]), STOP])]
            choice = {"message": {"role": "assistant", "content": text}}
            with self.lock:
                self.asked[request["messages"][-1]["content"]] += 1
        choice |= {"index": 0, "finish_reason": "stop"}
        out = {"choices": [choice], "usage": {"completion_tokens": len(text)}}
        if request.get("return_token_ids") and self.gives_ids in ("vllm", "sglang"):
            choice["token_ids"] = [*ids_of(text), STOP]
            (out if self.gives_ids == "vllm" else choice)["prompt_token_ids"] = prompt_ids
        if self.said is not None:
            choice |= self.said(request)
        return out

    def __enter__(self) -> Stub:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The port refuses connections from now on."""
        self.http.shutdown()
        self.http.server_close()
        self.thread.join(timeout=10)
