"""An S3 server on this machine (moto's), and a line to it that can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

from ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "anybody",
    "AWS_SECRET_ACCESS_KEY": "anything",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",  # of botocore; ours come on top
    "NO_PROXY": "*",
}


class Line:
    """Passes bytes to a server. While it is cut, connections break, and new ones are refused."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self.port = free_port()
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._stops = threading.Event()
        self._flows = threading.Event()
        self._flows.set()
        self._on_upload: tuple[int, Callable[[], None]] | None = None
        self.uploaded = 0
        self.on_answer: Callable[[bytes], bytes] = lambda data: data  # may change what the server says
        self.mend()

    def mend(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
            self._sockets.clear()

    def hold(self) -> None:
        """Nothing passes, and nothing breaks."""
        self._flows.clear()

    def release(self) -> None:
        self._flows.set()

    def when_uploaded(self, n_bytes: int, action: Callable[[], None]) -> None:
        """Act once, as soon as so many more bytes have been sent to the server."""
        self._on_upload = (self.uploaded + n_bytes, action)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _address = listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:
                return
            with self._lock:
                if listener.fileno() < 0:  # the line was cut meanwhile
                    client.close()
                    server.close()
                    return
                self._sockets += [client, server]
            for source, target, is_upload in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pass, args=(source, target, is_upload), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, is_upload: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flows.wait()
                if not is_upload:
                    data = self.on_answer(data)
                else:
                    self.uploaded += len(data)
                    if self._on_upload and self.uploaded >= self._on_upload[0]:
                        action, self._on_upload = self._on_upload[1], None
                        action()
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    """The port of a server that has the bucket `bucket`."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=free_port(), verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()[1]
    finally:
        server.stop()
