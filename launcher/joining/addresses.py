"""What this host can say of addresses: which are its own, and which others it reaches from here."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rendezvous.values.types import StoreAddress

_PATIENCE_S = 5.0  # a link that is gone for a moment is back by then
_AGAIN_S = 0.2
_SIOCGIFADDR = 0x8915
_LINK_LOCAL = "20"  # as the kernel prints the scope


def addresses_of(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """Every address the name stands for, in the resolver's order; none for an unknown name."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def is_own(family: socket.AddressFamily, address: str) -> bool:
    """The kernel lets a socket be bound to the host's own addresses only: aliases, IPv6 and every NIC included."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)
    return True


def obstacle_to_listening(host: str) -> str:
    """Why no store of ours will ever listen there, which looks at the first address as this does; "" if it may."""
    try:
        family, _type, _proto, _name, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except socket.gaierror as error:
        return (
            "" if error.errno == socket.EAI_AGAIN else "not a name or address that this machine can resolve"
        )
    except OSError as error:
        return "not an address of this machine" if error.errno == errno.EADDRNOTAVAIL else ""
    return ""


def is_free(address: str, port: int) -> bool:
    """Whether the port is free. gRPC would also detect this, but it writes to stderr."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def is_loopback(host: str) -> bool:
    return host.startswith("127.") or host in ("::1", "localhost")


def own_address_of(host: str, port: int) -> str:
    """The address of ours that `host` stands for; "" when it is another machine's."""
    return next((address for family, address in addresses_of(host, port) if is_own(family, address)), "")


def outward_address() -> str:
    """The address of ours that the default route leaves from; "" where there is none. Nothing is sent."""
    return source_address("192.0.2.1", 9)  # kept for documentation: nobody's


def source_address(host: str, port: int) -> str:
    """From which of our addresses packets to `host` leave, by the routing table; "" without a route."""
    for family, address in addresses_of(host, port):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, port))  # sends nothing
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return ""


def interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def address_of_interface(name: str) -> str:
    """Its IPv4 address, else one of IPv6 that others can use; "" without any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks, contextlib.suppress(OSError):
        answer = fcntl.ioctl(asks, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as lines:
        for line in lines:
            digits, _index, _prefix, scope, _flags, interface = line.split()
            if interface == name and scope != _LINK_LOCAL:
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return ""


# --- reaching others -----------------------------------------------------------------------------------


async def obstacle_to(host: str, port: int, *, listens: bool, within_s: float = _PATIENCE_S) -> str:
    """Why the address does not answer; "" if it does. `listens` False: a refused connection is an answer."""
    loop = asyncio.get_running_loop()
    give_up_at, heard = loop.time() + within_s, ""
    while True:
        try:
            async with asyncio.timeout_at(give_up_at):
                _reader, writer = await asyncio.open_connection(host, port)
        except TimeoutError:  # perhaps of this process, which had the time for one more try taken from it
            return heard or f"no answer within {within_s:g} s"
        except OSError as error:
            if isinstance(error, ConnectionRefusedError) and not listens:
                return ""
            heard = _in_words(error)
            if loop.time() + _AGAIN_S > give_up_at:
                return heard
        else:
            writer.close()
            return ""
        await asyncio.sleep(_AGAIN_S)


def _in_words(error: OSError) -> str:
    """The message of an error. Lookup errors, and errors of several addresses, have only a text."""
    return os.strerror(error.errno).lower() if error.errno is not None and error.errno > 0 else str(error)


def cannot_talk(here: str, there: str, store: StoreAddress, generation: int, why: str) -> str:
    address = f"[{store.host}]:{store.port}" if ":" in store.host else f"{store.host}:{store.port}"
    return (
        f"{here} cannot reach {there} at {address} (store of generation {generation}): {why}; "
        "use --interface or --local-addr, or check the firewall"
    )
