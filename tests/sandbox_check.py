"""What Bazel promises to every test: no network, and no distribution that the target did not declare.

No *_test.py, so that a plain `pytest` leaves it alone: outside Bazel's sandbox neither holds. The network is not part
of the key under which Bazel keeps results, so a flag that gives it back would not run the other tests again: it fails
here.
"""

import importlib.util
import socket
import sys

import pytest


@pytest.mark.skipif(sys.platform != 'linux', reason='only Linux gives a test a network of its own')
def test_the_only_interface_is_loopback():
  assert [name for _, name in socket.if_nameindex()] == ['lo']


def test_nothing_outside_is_reached():
  with pytest.raises(OSError):
    socket.create_connection(('192.0.2.1', 80), timeout=2).close()  # a documentation address: nobody's


def test_loopback_works():
  with socket.create_server(('127.0.0.1', 0)) as server:
    with socket.create_connection(server.getsockname(), timeout=2) as client:
      connection, _ = server.accept()
      with connection:
        client.sendall(b'x')
        assert connection.recv(1) == b'x'


def test_only_declared_distributions_are_there():
  """This target declares pytest and nothing else."""
  assert importlib.util.find_spec('pytest')
  assert not importlib.util.find_spec('jax')
