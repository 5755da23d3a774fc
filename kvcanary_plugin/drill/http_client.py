"""Plain HTTP to a server on this machine. No proxy settings are read, no connection is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit


def get(url: str, path: str, *, timeout: float) -> tuple[int, str]:
    """Status and body of ``GET url + path``; OSError or HTTPException when no answer comes."""
    with open_request(url, path, None, timeout=timeout) as connection:
        return _read(connection.getresponse())


def post(url: str, path: str, payload: dict[str, Any], *, timeout: float) -> tuple[int, str]:
    """Status and body of a JSON ``POST``; OSError or HTTPException when no answer comes."""
    with open_request(url, path, payload, timeout=timeout) as connection:
        return _read(connection.getresponse())


@contextmanager
def open_request(
    url: str, path: str, payload: dict[str, Any] | None, *, timeout: float
) -> Iterator[HTTPConnection]:
    """Send a request (with a payload: a JSON ``POST``) and hand out the connection.

    The caller reads as much of the response as it wants; leaving the block hangs up.
    """
    address = urlsplit(url)
    if address.scheme != "http" or not address.hostname or not address.port:
        raise ValueError(
            f"kvcanary: url ... got {url!r}; allowed http://HOST:PORT; give the server's own url"
        )
    connection = HTTPConnection(address.hostname, address.port, timeout=timeout)
    try:
        if payload is None:
            connection.request("GET", path)
        else:
            body = json.dumps(payload).encode()
            connection.request("POST", path, body, {"Content-Type": "application/json"})
        yield connection
    finally:
        connection.close()


def stream_events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, until ``[DONE]`` or the end of the body."""
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)


def _read(response: HTTPResponse) -> tuple[int, str]:
    return response.status, response.read().decode()
