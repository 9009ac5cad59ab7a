"""The interface over which workers of several hosts connect."""

import socket

import psutil
import pytest

from servd.core.executor.ray import interface_of


def test_the_interface_of_an_address():
    """As psutil says it, for the first IPv4 address of each interface, which is its own."""
    for name, entries in psutil.net_if_addrs().items():
        addresses = [entry.address for entry in entries if entry.family == socket.AF_INET]
        for address in addresses[:1]:
            assert interface_of(address) == name


@pytest.mark.parametrize("address", ["192.0.2.1", "::1", "a name"])
def test_an_address_of_no_interface(address: str):
    assert interface_of(address) is None
