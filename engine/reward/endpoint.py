"""One address of an HTTP service: bounded repetitions, a hard deadline for every reply, a token that is never shown."""

import json
import os
import random
import threading
import time
from collections.abc import Generator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from engine.reward.scorer import Unscored

LARGEST_REPLY = 64 * 2**20  # bytes; a service that never ends its reply would fill the memory
LONGEST_PAUSE_S = 60.0  # between two attempts, whatever Retry-After asks
_PASSING = {408, 425, 429}  # besides 5xx: answers that another attempt may better
_ABOUT_THE_SAMPLE = {400, 413, 422}  # with one sample in a call, it is the sample that the service cannot take
_SHOWN = 200  # characters of a reply in a message


class Endpoint:
    """A JSON service behind one URL; safe to call from several threads.

    token_env: environment variable with a bearer token, read for each call and kept nowhere. timeout_s: for one attempt,
    its reply read to the end. After a lost connection, a timeout, 408, 425, 429 or 5xx the call is repeated up to
    `retries` times, after pauses that start at backoff_s, double, vary at random and respect Retry-After.
    """

    def __init__(self, url: str, *, token_env: str | None, timeout_s: float, retries: int, backoff_s: float) -> None:
        self.url = url
        self._token_env = token_env
        self._timeout_s = timeout_s
        self._retries = retries
        self._backoff_s = backoff_s
        self._client = httpx.Client(timeout=timeout_s, auth=_Bearer(token_env) if token_env else None)
        self._closed = threading.Event()
        self._random = random.Random()  # of its own: the run's random state stays as it is

    def post(self, body: dict[str, Any], *, one_sample: bool = False) -> Any | Unscored:
        """The decoded reply, or why there is none.

        Cause "unreachable": every attempt failed. "refused": the service answered with another status than 2xx, or with
        no JSON; the user has to change something. one_sample: with 400, 413 and 422 it is the sample that is refused
        ("input"), not the service.
        """
        if self._token_env is not None and (fault := token_fault(self._token_env)):
            return Unscored("refused", fault)
        try:
            content = json.dumps(body, allow_nan=False).encode()
        except ValueError as error:
            return Unscored("input", f"the row cannot be written as JSON: {error}")
        for attempt in range(self._retries + 1):
            asked_pause = 0.0
            try:
                status, headers, reply = self._attempt(content)
            except httpx.RequestError as error:
                found = f"{type(error).__name__}: {error}"
            else:
                if status not in _PASSING and status < 500:
                    return self._read(status, reply, one_sample)
                found, asked_pause = self._shown(status, reply), _retry_after(headers)
            if attempt < self._retries and self._closed.wait(self._pause(attempt, asked_pause)):
                break
        return Unscored("unreachable", f"{self.url} failed {attempt + 1} times; the last time: {found}")

    def close(self) -> None:
        """End pauses and connections."""
        self._closed.set()
        self._client.close()

    def _attempt(self, content: bytes) -> tuple[int, httpx.Headers, bytes]:
        """Status, headers and body. Every chunk may take timeout_s in httpx; here all of them together."""
        deadline = time.monotonic() + self._timeout_s
        reply = bytearray()
        headers = {"Content-Type": "application/json"}
        with self._client.stream("POST", self.url, content=content, headers=headers) as response:
            for chunk in response.iter_bytes():
                reply += chunk
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout(f"the reply was not complete after {self._timeout_s:g} s")
                if len(reply) > LARGEST_REPLY:
                    raise httpx.DecodingError(f"the reply is longer than {LARGEST_REPLY} bytes")
        return response.status_code, response.headers, bytes(reply)

    def _read(self, status: int, reply: bytes, one_sample: bool) -> Any | Unscored:
        if one_sample and status in _ABOUT_THE_SAMPLE:
            return Unscored("input", f"{self.url} does not take the sample: {self._shown(status, reply)}")
        if not 200 <= status < 300:
            return Unscored("refused", f"{self.url} answered {self._shown(status, reply)}")
        try:
            return json.loads(reply)
        except (ValueError, RecursionError):
            return Unscored("refused", f"{self.url} answered with no JSON: {self._shown(status, reply)}")

    def _pause(self, attempt: int, asked: float) -> float:
        drawn = self._backoff_s * 2**attempt * self._random.uniform(0.5, 1.0)
        return min(max(drawn, asked), LONGEST_PAUSE_S)

    def _shown(self, status: int, reply: bytes) -> str:
        """Status and the beginning of the body, in which a service may have echoed the token."""
        text = reply.decode(errors="replace")
        if self._token_env is not None:
            text = text.replace(_token(self._token_env), "***")
        return f"{status} {' '.join(text.split())[:_SHOWN]}".rstrip()


class _Bearer(httpx.Auth):
    """Reads the token when a request is sent, so that no object that could be shown or logged holds it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["Authorization"] = f"Bearer {_token(self._name)}"
        yield request


def token_fault(name: str) -> str | None:
    """Why the environment variable gives no usable token; None if it does. Says nothing about its value."""
    token = _token(name)
    if not token:
        return f"the environment variable {name} is not set where rewards are scored; export it there"
    if not (token.isascii() and token.isprintable()):  # the HTTP library would show it in its own message
        return f"the environment variable {name} holds characters that no HTTP header can carry"
    return None


def _token(name: str) -> str:
    return os.environ.get(name, "").strip()


def _retry_after(headers: httpx.Headers) -> float:
    """Seconds that the service asks to wait, given as a number or as a date; 0 if it does not."""
    text = headers.get("Retry-After", "")
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max((parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return 0.0
