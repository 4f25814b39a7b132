"""Whether an address belongs to this host, and whether this host can connect to it."""

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

_PATIENCE_S = 5.0  # enough for a link that fails for a short time
_AGAIN_S = 0.2
_SIOCGIFADDR = 0x8915
_LINK_LOCAL = "20"  # as the kernel prints the scope


def addresses_of(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """All addresses that the name resolves to, in the resolver's order; empty for an unknown name."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def is_own(family: socket.AddressFamily, address: str) -> bool:
    """Whether the address belongs to this host: the kernel binds a socket only to the addresses of its own NICs."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)
    return True


def obstacle_to_listening(host: str) -> str:
    """Why the store cannot listen on `host`, or "". Like the store, this uses only the first address of the name."""
    try:
        family, _type, _proto, _name, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except socket.gaierror as error:
        return "" if error.errno == socket.EAI_AGAIN else "this machine cannot resolve the name"
    except OSError as error:
        return "the address does not belong to this machine" if error.errno == errno.EADDRNOTAVAIL else ""
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
    """The address of this host that `host` resolves to, or "" if it is another machine."""
    return next((address for family, address in addresses_of(host, port) if is_own(family, address)), "")


def default_route_address() -> str:
    """The source address of the default route, or "" without one. Does not send a packet."""
    return source_address("192.0.2.1", 9)  # reserved for documentation: no host has it


def address_for_others() -> str:
    """An address at which other machines can reach this one: of the default route, or else of the first interface."""
    found = (default_route_address(), *map(address_of_interface, interfaces()))
    return next((address for address in found if address and not is_loopback(address)), "")


def source_address(host: str, port: int) -> str:
    """The source address of packets to `host` in the routing table, or "" without a route."""
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
    """The interface's IPv4 address, else an IPv6 address that is not link-local, else ""."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as lines:
        for line in lines:
            digits, _index, _prefix, scope, _flags, interface = line.split()
            if interface == name and scope != _LINK_LOCAL:
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return ""


# --- reaching others -----------------------------------------------------------------------------------


async def obstacle_to(host: str, port: int, *, listens: bool, within_s: float = _PATIENCE_S) -> str:
    """Why `host` cannot be reached, or "". With `listens` False, a refused connection also counts as reached."""
    loop = asyncio.get_running_loop()
    give_up_at, error_text = loop.time() + within_s, ""
    while True:
        try:
            async with asyncio.timeout_at(give_up_at):
                _reader, writer = await asyncio.open_connection(host, port)
        except TimeoutError:  # also if this process did not get CPU time for another attempt
            return error_text or f"no answer within {within_s:g} s"
        except OSError as error:
            if isinstance(error, ConnectionRefusedError) and not listens:
                return ""
            # The message of an error. Lookup errors, and errors of several addresses, have only a text.
            error_text = (
                os.strerror(error.errno).lower()
                if error.errno is not None and error.errno > 0
                else str(error)
            )
            if loop.time() + _AGAIN_S > give_up_at:
                return error_text
        else:
            writer.close()
            return ""
        await asyncio.sleep(_AGAIN_S)


def unreachable_store(here: str, there: str, store: StoreAddress, generation: int, why: str) -> str:
    address = f"[{store.host}]:{store.port}" if ":" in store.host else f"{store.host}:{store.port}"
    return (
        f"{here} cannot connect to the store of generation {generation} on {there}, {address}: {why}; "
        f"check the firewall, or set --interface or --local-addr on {there}"
    )
