"""The bed itself."""

import socket

import pytest
from bed_fixtures import PROMPT

from pagealign.bed import Request


@pytest.fixture
def taken_ports(monkeypatch):
    """The ports that SGLang takes for free, before it finds free ones."""
    from sglang.srt.server_args import PortArgs

    listening = [socket.create_server(("", 0)) for _ in range(2)]
    ports = [server.getsockname()[1] for server in listening]
    init_new = PortArgs.init_new

    def first_taken(*args):
        found = init_new(*args)
        if ports:
            found.nccl_port = ports.pop()
        return found

    monkeypatch.setattr(PortArgs, "init_new", first_taken)
    yield ports
    for server in listening:
        server.close()


def test_a_port_that_is_taken_meanwhile(make_bed, whisper, taken_ports):
    bed = make_bed(whisper(40), "torch_native", 64)
    assert taken_ports == []
    assert len(bed.run_one(Request(PROMPT, max_new_tokens=3)).output_ids) == 3
