"""The HTTP port of the service and of the agent, as clients see it: heads, bodies, methods, connections."""

import asyncio
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from socket import SHUT_WR, create_connection

import pytest

from rendezvous.service.web import Web

METRICS = "up 1\n"


@pytest.fixture
def port() -> Iterator[int]:
    listening: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    web = Web(lambda: False, lambda: METRICS)
    asyncio.run_coroutine_threadsafe(_listen(web, listening), loop).result(60)
    yield listening.get_nowait()
    asyncio.run_coroutine_threadsafe(web.close(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _listen(web: Web, listening: asyncio.Queue[int]) -> None:
    listening.put_nowait(await web.listen("127.0.0.1", 0))


def answer(port: int, request: bytes) -> tuple[bytes, dict[str, str], bytes]:
    """Status line, headers and body: all bytes until the service closes the connection."""
    with create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(request)
        client.shutdown(SHUT_WR)
        data = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    return status, dict(line.decode().split(": ", 1) for line in lines), body


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics", "/elsewhere"])
def test_head_has_the_headers_of_get_and_no_body(port: int, path: str) -> None:
    get = answer(port, f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    head = answer(port, f"HEAD {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    assert get[2]
    assert head == (get[0], get[1], b"")
    assert int(get[1]["Content-Length"]) == len(get[2])
    assert get[1]["Connection"] == "close"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "get"])
def test_other_methods_are_refused_and_the_permitted_ones_are_listed(port: int, method: str) -> None:
    status, headers, _ = answer(port, f"{method} /livez HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    assert status.startswith(b"HTTP/1.1 405 ")
    assert headers["Allow"] == "GET, HEAD"


@pytest.mark.parametrize("line", ["GET", "GET /livez", "GET /livez x HTTP/1.1", "GET /livez SIP/2.0"])
def test_a_malformed_request_line_is_a_bad_request(port: int, line: str) -> None:
    assert answer(port, f"{line}\r\n\r\n".encode())[0].startswith(b"HTTP/1.1 400 ")
    assert answer(port, f"HEAD{line[3:]} x x x\r\n\r\n".encode())[2] == b"", "HEAD never has a body"


def test_pipelined_requests_get_one_answer_and_the_end_of_the_connection(port: int) -> None:
    once = answer(port, b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
    assert answer(port, b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n" * 3) == once


def test_a_refused_body_does_not_cost_the_client_its_answer(port: int) -> None:
    """It would, if the connection were closed with the body unread: the kernel then resets it."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/metrics", body=bytes(4 << 20))
    assert connection.getresponse().status == 405
    connection.close()
