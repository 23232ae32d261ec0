"""Members of a process group, each in its own process, without any service."""

from __future__ import annotations

import os
import signal
from contextlib import AsyncExitStack

import pytest
from support.process_groups import make_group, send
from support.stacks.warm_processes import behind

from paceline.collective.member import CHUNK_BYTES
from paceline.errors import PeerLost

pytestmark = pytest.mark.usefixtures("forked_engines")


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
async def test_every_member_gets_each_file_and_a_lost_peer_is_an_error_at_all_within_the_deadline(
    tmp_path, signal_number
):
    contents = [os.urandom(3 * CHUNK_BYTES + 12_345), os.urandom(77)]
    async with AsyncExitStack() as stack:
        members = await make_group(stack)
        for number, content in enumerate(contents):
            source = tmp_path / f"source-{number}"
            source.write_bytes(content)
            assert await send(members, [source, tmp_path / f"got-{number}", None], len(content)) == [None] * 3
        assert [(tmp_path / f"got-{number}").read_bytes() for number in range(2)] == contents

        os.kill(behind(members[2].pid), signal_number)
        paths = [tmp_path / "source-0", tmp_path / "one", tmp_path / "two"]
        results = await send(members, paths, len(contents[0]))
        assert [type(result) for result in results] == [PeerLost] * 3
        assert [type(result) for result in await send(members, [source, None, None], 1)] == [PeerLost] * 3
