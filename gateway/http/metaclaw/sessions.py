"""Sessions: runs whose commands this API numbers, so that a request that is sent again executes once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, TypeVar
from uuid import uuid4

from google.protobuf.message import Message

from gateway.http.metaclaw.bodies import named_as_here
from gateway.http.metaclaw.store import Unanswered, UnansweredRequests
from gateway.http.services import Services
from gateway.http.state import StateUnusable
from paceline import errors
from paceline.client.batching import sendable
from paceline.errors import Fate
from paceline.layout import is_run_id
from paceline.trainer.v1 import trainer_service_pb2 as pb

SECONDS = 600.0
"""How long to wait for an answer."""
MAX_SESSIONS = 4096
_SAMPLER = pb.CHECKPOINT_KIND_SAMPLER
Answer = TypeVar("Answer")
Commands = Sequence[Callable[..., Any]]
"""How each command of a request is made."""


@dataclass(slots=True, eq=False)
class _Work:
    """A request's commands."""

    commands: Sequence[Any]
    conclude: Callable[..., Any]
    digest: bytes
    replies: list[Message] = field(default_factory=list)
    """Those to the first commands."""
    is_sent: bool = False
    """Whether the next command may have arrived, with the number that it has."""

    @property
    def is_done(self) -> bool:
        return len(self.replies) == len(self.commands)


@dataclass(slots=True)
class Session:
    """A run whose commands this API numbers."""

    attachment: int = 0
    """Zero: this API is not attached to the run, so the next number is not known."""
    next_seq_id: int = 0
    step: int = 0
    losses: list[float] = field(default_factory=list)
    """Losses of the ForwardBackward calls since the last step."""
    unfinished: _Work | None = None
    """The last request, if some of its commands may have executed and the reply to another is not known."""
    users: int = 0
    """Requests that have it or wait for their turn."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while commands are sent, so that the next request begins after their outcome is known."""


class Sessions:
    """The sessions of all tenants."""

    def __init__(self, services: Services, unanswered: UnansweredRequests) -> None:
        self._services = services
        self._unanswered = unanswered
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()

    async def send(self, tenant: str, run_id: str, commands: Commands, conclude: Callable[..., Answer]) -> Answer:
        """Send the commands of a request, the next of a session, and return what `conclude` makes of their replies.

        `conclude` also notes in the session what the replies say, before the next request has its turn. A command whose
        reply was lost may have executed, or will. The same request after it continues with the same command, also at
        the next gateway. Another request first has the reply to it, because it may depend on what that says. Raises
        RunNotFound, StateUnusable, and what the trainer answers.
        """
        if not is_run_id(run_id):
            raise _unknown()
        async with self._using(tenant, run_id) as session, session.turn:
            work = _make(run_id, commands, conclude)
            if session.unfinished is not None and session.unfinished.digest == work.digest:
                work = session.unfinished
            elif session.unfinished is not None:
                await self._take_reply_of_abandoned(tenant, session, session.unfinished)
            await self._attach(tenant, run_id, session)
            if work is not session.unfinished:
                await self._begin(tenant, run_id, session, work)
            try:
                while not work.is_done:
                    await self._advance(tenant, session, work)
            finally:
                if session.unfinished is None:
                    with suppress(StateUnusable):  # the next request replaces it
                        await self._unanswered.remove(tenant, run_id)
            return conclude(session, *work.replies)

    async def _begin(self, tenant: str, run_id: str, session: Session, work: _Work) -> None:
        """Note a request that is about to be sent, or find that an earlier gateway sent it and had no answer."""
        known = self._unanswered.find(tenant, run_id)
        if known is not None and known.digest == work.digest and known.seq_id < session.next_seq_id:
            session.next_seq_id = known.seq_id
        else:
            await self._unanswered.put(tenant, run_id, Unanswered(work.digest, session.next_seq_id))

    async def _take_reply_of_abandoned(self, tenant: str, session: Session, work: _Work) -> None:
        """Have the reply to a request's command that may have arrived; its caller has given up the request."""
        if work.is_sent:
            try:
                await self._advance(tenant, session, work)
            except errors.PacelineError:
                if work.is_sent:
                    raise
            else:
                if work.is_done:
                    work.conclude(session, *work.replies)
        session.unfinished = None

    async def _advance(self, tenant: str, session: Session, work: _Work) -> None:
        """Send the next command of a request, once more with its number if it may have arrived."""
        message = work.commands[len(work.replies)]
        if not work.is_sent:
            session.unfinished = work if work.replies else None  # should its name not be found out
            await self._name(tenant, message)
            message.seq_id, message.attachment = session.next_seq_id, session.attachment
        try:
            with named_as_here():
                answer = await self._services.execute(tenant, message, seconds=SECONDS)
        except BaseException as error:
            fate = error.fate if isinstance(error, errors.PacelineError) else Fate.UNKNOWN
            # One that is turned away may have arrived before.
            is_turned_away = fate is Fate.TURNED_AWAY
            work.is_sent = fate is Fate.UNKNOWN or (work.is_sent and is_turned_away)
            may_come_later = isinstance(error, errors.Denied | errors.Exhausted) and is_turned_away
            is_unfinished = work.is_sent or (work.replies and may_come_later)
            session.unfinished = work if is_unfinished else None
            if fate is Fate.ANSWERED:
                session.next_seq_id += 1
            if isinstance(error, errors.SeqIdReused) or (fate is not Fate.ANSWERED and not work.is_sent):
                session.attachment = 0  # the run may be gone, lost, or another client's
            if isinstance(error, errors.NonFiniteGradient):
                session.losses = []
            raise
        work.replies.append(answer)
        work.is_sent, session.unfinished = False, None
        session.next_seq_id += 1

    async def _attach(self, tenant: str, run_id: str, session: Session) -> None:
        """Attach a session to its run unless it is. The caller holds its turn. Raises RunNotFound."""
        if session.attachment:
            return
        request = pb.AttachRunRequest(run_id=run_id, request_id=uuid4().hex)
        try:
            reply = await self._services.call(tenant, request, pb.AttachRunResponse)
        except errors.RunNotFound as error:
            raise _unknown() from error
        if reply.run.step != session.step:
            session.losses = []
        session.attachment, session.step = reply.attachment, reply.run.step
        session.next_seq_id = reply.run.last_seq_id + 1

    async def _name(self, tenant: str, message: Message) -> None:
        """Name saved weights after their step if the caller gave no name.

        A command of the same weights has been answered, so none before it is outstanding that could still step.
        """
        if isinstance(message, pb.SaveCheckpointRequest) and not message.name and message.kind == _SAMPLER:
            run = await self._services.call(tenant, pb.GetRunRequest(run_id=message.run_id), pb.GetRunResponse)
            message.name = f"adapter_step_{run.run.step:04d}"

    @asynccontextmanager
    async def _using(self, tenant: str, run_id: str) -> AsyncIterator[Session]:
        """Keep a run's session, attached or not, while the block runs: the same one to all callers, who take turns.

        Of idle sessions, the newest are kept, and those with a command that may have executed.
        """
        key = tenant, run_id
        session = self._sessions.setdefault(key, Session())
        self._sessions.move_to_end(key)
        session.users += 1
        try:
            yield session
        finally:
            session.users -= 1
            if not session.users and not session.next_seq_id:  # it was never attached
                del self._sessions[key]
            if (excess := len(self._sessions) - MAX_SESSIONS) > 0:
                idle = [each for each, one in self._sessions.items() if not one.users and one.unfinished is None]
                for each in idle[:excess]:
                    del self._sessions[each]


def _make(run_id: str, commands: Commands, conclude: Callable[..., Any]) -> _Work:
    with sendable("request"):
        messages = [make(run_id=run_id) for make in commands]
    digest = sha256()
    for message in messages:
        digest.update(sha256(message.SerializeToString(deterministic=True)).digest())
    return _Work(messages, conclude, digest.digest())


def _unknown() -> errors.RunNotFound:
    return errors.RunNotFound("no such session; POST /v1/lora/create", field="session_id")
