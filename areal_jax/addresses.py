"""Addresses that a part of a run listens on: "host:port", a host of IPv6 in brackets, port 0 for any free one.

In: texts of the config. Out: their parts, or an error that names the address, the rule and the remedy. Called by the
rules of the config, the servers and the launchers. Waits for nobody.
"""

import contextlib
import ipaddress
import re
import socket
from collections.abc import Sequence

_ADDRESS = re.compile(r"(?P<host>\[[^\[\]]+\]|[^\[\]:]+):(?P<port>[0-9]{1,5})")


def parse(address: str) -> tuple[str, int] | None:
    """Host, of IPv6 without its brackets, and port; None for what is no address."""
    found = _ADDRESS.fullmatch(address)
    if not found or int(found["port"]) >= 2**16:
        return None
    return found["host"].strip("[]"), int(found["port"])


def split(address: str, what: str = "address") -> tuple[str, int]:
    """As `parse`, and raises ValueError for what is no address, which the error calls `what`."""
    parts = parse(address)
    if not parts:
        raise ValueError(
            f'{what}={address!r} must be "host:port" with a port of 0 (any free one) to 65535, like 127.0.0.1:8000 or '
            "[::1]:8000"
        )
    return parts


def with_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"


def check_guarded(address: str, token: str) -> None:
    """Raises ValueError for an address that is none, or that others can reach without a token."""
    split(address)
    if not token and not is_loopback(address):
        raise ValueError(
            f"address={address} can be reached from other machines and no token is set, so anyone could use it; "
            "set the same AREAL_JAX_TOKEN in the environment of every process of the run, or listen on 127.0.0.1"
        )


def is_loopback(address: str) -> bool:
    """Whether nobody but this machine can reach an address."""
    host, _ = split(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def with_free_ports(addresses: Sequence[str]) -> list[str]:
    """The addresses with a free port each where it is 0. Raises OSError for one on which nothing can listen now."""
    with contextlib.ExitStack() as stack:
        found = []
        for address in addresses:
            host, port = split(address)
            probe = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise OSError(cannot_listen(address, str(error.strerror))) from error
            found.append(with_port(address, probe.getsockname()[1]))
    return found


def cannot_listen(address: str, reason: str) -> str:
    return f"cannot listen on {address}: {reason}; choose another port, or port 0 for a free one"
