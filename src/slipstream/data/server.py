"""Answers from OpenAI-compatible servers (vLLM, SGLang): requests, retries, and which server gets the next
one.

Here: the only HTTP of the package. Not here: what is asked (`regenerate`).

Ids are asked for with `return_token_ids`. vLLM answers with `prompt_token_ids` beside the choices and
`token_ids` in each, SGLang with both in each choice; a server that knows neither gives text. A server that
cannot be reached, or says that it has too much to do, rests for a while, twice as long each time; any other
failure costs the request one of its tries. When no server has been reached for a request's number of tries,
the run ends and says so.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slipstream.config import RegenerateConfig, UserError, read_environment
from slipstream.data.conversation import Answer, Request, Talk
from slipstream.data.journal import LeftOut
from slipstream.data.records import Message
from slipstream.data.regenerate import Regeneration

try:
    import httpx
except ImportError:
    raise UserError(
        "--server: needs the package httpx: pip install 'slipstream[serve]', or answer in this process"
    ) from None

KEY = "SLIPSTREAM_API_KEY"
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0
"""Seconds before the second try; doubled with each further one, up to the longest; times 0.5 to 1.5 by
chance.
"""
BUSY = (429, 502, 503)
PASSING = (408, 409, 425, 500, 504)


@dataclass
class Server:
    """A base URL, what it serves, and how it has behaved."""

    url: str
    model: str = ""
    in_flight: int = 0
    answered: int = 0
    failures: int = 0  # rests since it last answered
    rests_until: float = 0.0
    gives_ids: bool = True  # until it refuses to be asked for them


class Servers:
    """Several servers of one model. `ask` may be called from many tasks at once."""

    def __init__(self, config: RegenerateConfig, client: httpx.AsyncClient) -> None:
        urls = [u.rstrip("/") for u in config.server]
        self.servers = [Server(u if u.endswith("/v1") else f"{u}/v1", config.served_name or "") for u in urls]
        self.thinking, self.deadline, self.retries = config.thinking, config.timeout, config.retries
        self.client = client

    async def ask(self, request: Request) -> Answer:
        """An answer, or `LeftOut` once the request's tries are used up or it is refused for good."""
        reason = detail = ""
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(wait_after(attempt - 1))
            server = await self._next_server()
            server.in_flight += 1
            try:
                async with asyncio.timeout(self.deadline):
                    server.model = server.model or await self._only_model(server)
                    response = await self._post(server, request)
                    if (
                        response.status_code == 400
                        and server.gives_ids
                        and "return_token_ids" in response.text
                    ):
                        server.gives_ids = False
                        response = await self._post(server, request)
            except TimeoutError:
                reason, detail = "deadline", f"no answer from {server.url} within {self.deadline:g} s"
                continue
            except httpx.TransportError as e:
                reason, detail = "connection", f"{server.url}: {type(e).__name__} {e}"
                self._rest(server, None)
                continue
            finally:
                server.in_flight -= 1
            status = response.status_code
            if status == 200:
                server.failures = 0
                server.answered += 1
                return read_answer(response, request)
            reason, detail = f"HTTP {status}", " ".join(response.text.split())[:200]
            if status in BUSY:
                self._rest(server, response.headers.get("retry-after"))
            elif status not in PASSING:
                break
        raise LeftOut("failed", reason, detail)

    async def _next_server(self) -> Server:
        """The least busy of those that do not rest."""
        while True:
            now = time.monotonic()
            ready = [s for s in self.servers if s.rests_until <= now]
            if ready:
                return min(ready, key=lambda s: (s.in_flight, s.answered))
            await asyncio.sleep(min(s.rests_until for s in self.servers) - now)

    def _rest(self, server: Server, asked_for: str | None) -> None:
        now = time.monotonic()
        if server.rests_until > now:  # one of several requests that found it so
            return
        wait = wait_after(server.failures)
        if asked_for is not None and asked_for.isdecimal():
            wait = max(wait, min(float(asked_for), LONGEST_WAIT))
        server.failures += 1
        server.rests_until = now + wait
        if all(s.failures > self.retries for s in self.servers):
            urls = ", ".join(s.url for s in self.servers)
            raise UserError(
                f"--server {urls}: not reached in {self.retries + 1} tries; what was answered is "
                "kept: start a server and run the same command again"
            )

    async def _only_model(self, server: Server) -> str:
        response = await self.client.get(f"{server.url}/models")
        names = [m["id"] for m in response.json()["data"]] if response.status_code == 200 else []
        if len(names) != 1:
            found = ", ".join(names) or f"HTTP {response.status_code}"
            raise UserError(f"{server.url}/models: {found}: name the model to ask with --served-name")
        return names[0]

    async def _post(self, server: Server, request: Request) -> httpx.Response:
        body: dict[str, Any] = {
            "model": server.model,
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
        }
        if server.gives_ids:
            body["return_token_ids"] = True
        if request.ids is not None:
            body |= {"prompt": request.ids, "stop_token_ids": [request.stop_id]}
            return await self.client.post(f"{server.url}/completions", json=body)
        body["messages"] = request.messages
        if request.tools:
            body["tools"] = request.tools
        if self.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.thinking}
        return await self.client.post(f"{server.url}/chat/completions", json=body)


def wait_after(failures: int) -> float:
    """Seconds to wait after so many failures and one more, by chance up to half as long or as much again."""
    return min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(failures, 10)) * random.uniform(0.5, 1.5)


def read_answer(response: httpx.Response, request: Request) -> Answer:
    """What a server's 200 says; `LeftOut` where that is no answer."""
    try:
        value = response.json()
        choice = value["choices"][0]
        reason = choice["finish_reason"]
        if request.ids is not None:
            message: Message = {"role": "user", "content": choice["text"]}
        else:
            message = _message(choice["message"])
        prompt_ids = choice.get("prompt_token_ids") or value.get("prompt_token_ids")
        response_ids = choice.get("token_ids")
        tokens = len(response_ids or ()) or (value.get("usage") or {}).get("completion_tokens", 0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as e:
        raise LeftOut("failed", "not a completion", f"{e!r} in {response.text[:120]}") from None
    if reason not in ("stop", "tool_calls", "length"):
        raise LeftOut("failed", f"finish reason {reason}", response.text[:120])
    if not prompt_ids or not response_ids:
        prompt_ids = response_ids = None
    return Answer(message, reason, tokens, prompt_ids, response_ids)


def _message(said: dict[str, Any]) -> Message:
    """The assistant's message as templates and `prepare` read it. vLLM now says `reasoning`."""
    thought = said.get("reasoning_content") or said.get("reasoning")
    more = {"reasoning_content": thought, "tool_calls": said.get("tool_calls")}
    content = said.get("content") or ""
    return {"role": "assistant", "content": content, **{k: v for k, v in more.items() if v}}


def answer(config: RegenerateConfig, run: Regeneration, say: Callable[[str], None]) -> None:
    """Ends every missing conversation of `run`, `config.concurrency` of them at a time."""
    say(f"answering: {config.concurrency} at a time, at {', '.join(config.server)}")
    asyncio.run(_answer_all(config, run))


async def _answer_all(config: RegenerateConfig, run: Regeneration) -> None:
    key = read_environment(KEY)[KEY]
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=config.concurrency)
    timeout = httpx.Timeout(None, connect=10.0)
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout) as client:
        servers, talks = Servers(config, client), run.talks()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(config.concurrency):
                    group.create_task(_worker(servers, talks, run))
        except* UserError as several:
            raise several.exceptions[0] from None


async def _worker(servers: Servers, talks: Iterator[Talk], run: Regeneration) -> None:
    for talk in talks:  # shared: each takes the next one that nobody has
        while talk.request is not None:
            try:
                said = await servers.ask(talk.request)
            except LeftOut as why:
                talk.give_up(why)
            else:
                run.tokens += said.tokens
                talk.reply(said)
        run.end(talk)
