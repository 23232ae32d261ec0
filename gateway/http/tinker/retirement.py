"""Runs of sessions that are over: saved if their newest steps are not, then deleted, so that they take no space.

The SDK has no call that ends a run, and hosted Tinker's runs end with their sessions too. Checkpoints stay.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from uuid import uuid4
from weakref import WeakValueDictionary

from gateway.http.services import Services
from gateway.http.tinker.store import Model, Store
from paceline import codec, errors
from paceline.background import Background
from paceline.log import get_logger
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import CommandState, Run, RunState

NAME = "session-end"
"""How the name of the state checkpoint begins that a run with unsaved steps leaves."""
KEPT_SECONDS = 7 * 86_400
"""How long that checkpoint is kept."""
_SECONDS = 600.0
_WAIT_SECONDS = 590.0
"""How long the commands that the session left may take; less than the call."""
_log = get_logger(__name__)


class Retirement:
    """Deletes the runs of sessions that are over, once nothing of them is lost with it."""

    def __init__(self, services: Services, store: Store) -> None:
        self._services = services
        self._store = store
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By model; locked while its run is deleted."""
        self._tenants: dict[str, asyncio.Task[None]] = {}
        self._background = Background("runs of ended sessions were not deleted; it is tried again")

    def wake(self) -> None:
        """Delete the runs of all sessions that are over, each tenant's one after another, in the background."""
        for tenant in {model.tenant for model in self._store.abandoned()}:
            if (task := self._tenants.get(tenant)) is None or task.done():
                self._tenants[tenant] = self._background.spawn(self._retire_all(tenant))

    async def delete_oldest(self, tenant: str) -> bool:
        """Delete the tenant's oldest run whose session is over; return whether one was deleted."""
        for model in self._store.abandoned(tenant):
            if await self._retire(model):
                return True
        return False

    async def delete(self, model: Model) -> None:
        """Delete a model's run, whatever it holds."""
        with suppress(errors.RunNotFound):
            request = pb.DeleteRunRequest(run_id=model.run_id)
            await self._services.call(model.tenant, request, pb.DeleteRunResponse, seconds=_SECONDS)
        await self._store.end_model(model.model_id)

    async def close(self) -> None:
        """Stop; the next gateway continues."""
        await self._background.close()

    async def _retire_all(self, tenant: str) -> None:
        for model in self._store.abandoned(tenant):
            if not await self._retire(model):
                break  # the others would most likely meet the same; the next sweep tries again

    async def _retire(self, model: Model) -> bool:
        """Save what of a run is not saved, and delete it; return whether it is deleted. Failures are logged."""
        async with self._turns.setdefault(model.model_id, asyncio.Lock()):
            known = self._store.model(model.model_id)
            if known is None or known.ended is not None:
                return True
            saved = ""
            try:
                with suppress(errors.RunNotFound, errors.RunStateLost):  # then there is nothing left to save
                    saved = await self._save(known)
                await self.delete(known)
            except errors.PacelineError as error:
                _log.warning("run of a session that is over is kept", run=model.run_id, error=str(error))
                return False
        _log.info("run of a session that is over deleted", run=model.run_id, model=model.model_id, saved=saved)
        return True

    async def _save(self, model: Model) -> str:
        """Save a run's state unless nothing of it would be lost; return the checkpoint's path. Raises as the trainer.

        Other clients of the run are superseded, so that none adds to it meanwhile.
        """
        request = pb.AttachRunRequest(
            run_id=model.run_id,
            request_id=uuid4().hex,
            outstanding=pb.OUTSTANDING_POLICY_WAIT,
            wait_seconds=_WAIT_SECONDS,
        )
        attached = await self._services.call(model.tenant, request, pb.AttachRunResponse, seconds=_SECONDS)
        if any(not CommandState(status.state).has_ended for status in attached.outstanding):
            raise errors.TimedOut("the commands of its last client have not ended")
        run = codec.run_from_proto(attached.run)
        if run.state is RunState.LOST or not run.step or await self._is_saved(model, run):
            return ""
        save = pb.SaveCheckpointRequest(
            run_id=model.run_id,
            seq_id=run.last_seq_id + 1,
            attachment=attached.attachment,
            name=f"{NAME}-{run.last_seq_id + 1}",
            kind=pb.CHECKPOINT_KIND_STATE,
            ttl_seconds=KEPT_SECONDS,
        )
        made = await self._services.execute(model.tenant, save, seconds=_SECONDS)
        return str(made.checkpoint.path)

    async def _is_saved(self, model: Model, run: Run) -> bool:
        """Return whether the run's newest state checkpoint has all of its steps, for sure."""
        if model.reloaded or not run.latest_state_checkpoint:
            return False
        request = pb.ListCheckpointsRequest(run_id=run.run_id, kind=pb.CHECKPOINT_KIND_STATE, page_size=1000)
        while True:
            page = await self._services.call(model.tenant, request, pb.ListCheckpointsResponse)
            for found in map(codec.checkpoint_from_proto, page.checkpoints):
                if found.path == run.latest_state_checkpoint:
                    return found.step == run.step
            if not page.next_page_token:
                return False
            request.page_token = page.next_page_token
