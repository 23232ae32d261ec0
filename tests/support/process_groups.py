"""Process groups without services, with one process per member."""

from __future__ import annotations

import asyncio

from paceline.collective import GroupMember, GroupMembership


async def make_group(stack, size=3, seconds=5.0, backend="gloo", prepare=lambda rank: None):
    """Start a group of `size` members; return them joined, in the order of their ranks.

    `prepare` is called before each member's process starts.
    """
    prepare(0)
    first = await GroupMember.start(GroupMembership(backend, "127.0.0.1:0", 1, 0, size, seconds))
    stack.push_async_callback(first.stop)
    address, members = f"127.0.0.1:{await first.listening()}", [first]
    for rank in range(1, size):
        prepare(rank)
        members.append(await GroupMember.start(GroupMembership(backend, address, 1, rank, size, seconds)))
        stack.push_async_callback(members[-1].stop)
    await asyncio.gather(*(member.join() for member in members))
    return members


def send(members, paths, size):
    transfers = (member.transfer(path, size) for member, path in zip(members, paths, strict=True))
    return asyncio.gather(*transfers, return_exceptions=True)
