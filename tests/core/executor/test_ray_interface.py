"""The interface over which workers of several hosts connect."""

import socket

import psutil
import pytest

from servd.core.executor.ray import interface_of


def test_the_interface_of_an_address():
    """As psutil says it, for every IPv4 address of this host."""
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family == socket.AF_INET:
                assert interface_of(entry.address) == name


@pytest.mark.parametrize("address", ["192.0.2.1", "::1", "a name"])
def test_an_address_of_no_interface(address: str):
    assert interface_of(address) is None
