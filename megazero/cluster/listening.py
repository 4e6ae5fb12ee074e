"""Key-value stores that listen at one address. torch's own listen at all addresses of a machine."""

import socket
from ipaddress import ip_address
from typing import Any

import torch.distributed as dist

LOOPBACK = "127.0.0.1"


def host_store(host: str, port: int, **options: Any) -> dist.TCPStore:
    """Return a new store of this process, at the address of `host`; port 0: a free one. OSError as from `listen`."""
    socket = listen(host, port)
    port = socket.getsockname()[1]
    options = {"wait_for_workers": False, **options}
    return dist.TCPStore(host, port, is_master=True, master_listen_fd=socket.detach(), **options)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the address of `host` alone, IPv4 if it has both.

    It listens at all addresses where it cannot know at which one the other machines arrive: `host` has several here, or
    none (a router translates it), or /etc/hosts maps the name of this machine to a loopback address.

    Raises:
        OSError: the port is taken, or `host` is unknown.
    """
    local = is_loopback(host)
    own = [each for each in _addresses(host) if is_loopback(each[1]) == local and _is_own(*each)]
    if own and (local or len({family for family, _ in own}) == len(own)):
        family, address = own[0]
        return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=both)


def is_here(host: str) -> bool:
    """Return whether `host` is this machine."""
    return host == socket.gethostname() or any(_is_own(*each) for each in _addresses(host))


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address, or localhost. A name in /etc/hosts is neither."""
    try:
        return host == "localhost" or ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Return family and address of each address of `host`, IPv4 first."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return sorted({(family, str(where[0])) for family, *_, where in found})


def _is_own(family: socket.AddressFamily, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:  # EADDRNOTAVAIL; EAFNOSUPPORT without IPv6; EINVAL for a link's address
        return False
    return True
