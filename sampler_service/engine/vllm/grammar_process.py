"""A process that builds the grammars of constraints first, so that one that crashes or exhausts it costs only itself.

Constraints come from tenants. xgrammar, which turns them into grammars, is native code: a constraint can crash it, or
take gigabytes or hours. vLLM runs it in the processes that serve all tenants.

The process is started at the first constraint, as vLLM starts its engine, and has xgrammar and the vocabulary loaded.
Each constraint is built in a fork of it, with limits that the kernel enforces. So every constraint starts from the same
state, and whether it is refused depends neither on those before it nor on the load of the machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from collections import OrderedDict
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import psutil
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.system_utils import set_process_title
from vllm.v1.engine import utils
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, validate_xgrammar_grammar
from vllm.v1.structured_output.request import get_structured_output_key

from paceline.background import Background
from paceline.child import fork
from paceline.errors import EngineUnavailable
from paceline.log import get_logger
from sampler_service.engine.protocol import Turn

_log = get_logger(__name__)

MEMORY = 1 << 30
"""Bytes that building a grammar may take. A schema of the greatest length takes about a third of it."""

BUILD_SECONDS = 5.0
"""CPU time for building a grammar. A schema of the greatest length takes about a fifth of it."""

HANG_SECONDS = 120.0
"""Time after which a fork that does not compute is ended too."""

TOO_MUCH = (
    f"building its grammar takes more than {BUILD_SECONDS:.0f} s or {MEMORY >> 20} MiB, or crashes; send a simpler one"
)

_LONGEST_ANSWER = 4096
"""Most bytes of an answer, which the pipe takes at once."""

_MOST_ANSWERS = 4096
"""Answers kept, each a digest and mostly an empty text."""


_FIELDS = ("json", "regex", "choice", "structural_tag")
"""Fields of vLLM's parameters of which one holds the constraint."""


@dataclass(frozen=True, slots=True)
class _Builder:
    process: BaseProcess
    connection: Connection

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class GrammarProcess:
    """Builds grammars one at a time, and remembers which could be built."""

    def __init__(self, config: VllmConfig) -> None:
        """`config` is the engine's, so that the grammars are those that the engine will build."""
        self._config = config
        self._builder: _Builder | None = None
        self._free = asyncio.Lock()
        self._asking = Background("a grammar was not built")
        self._is_closed = False
        self._answers: OrderedDict[bytes, str] = OrderedDict()

    async def refusal(self, constraint: StructuredOutputsParams, turn: Turn = nullcontext) -> str:
        """Return why no grammar can be built; empty if one can. A constraint that is not known waits for its `turn`.

        Raises EngineUnavailable if the process ended, which no constraint causes. It is replaced at the next call.
        """
        message = _encoded(constraint)
        key = sha256(message).digest()
        if key in self._answers:
            self._answers.move_to_end(key)
            return self._answers[key]
        async with AsyncExitStack() as resources:
            await resources.enter_async_context(turn())
            await resources.enter_async_context(self._free)
            # Continues if the caller is cancelled: its answer must be read before the next question is asked.
            asking = self._ask(key, message, resources.pop_all())
        return await self._asking.run(asking)

    def close(self) -> None:
        """End the process; calls in progress, and later ones, raise EngineUnavailable."""
        self._is_closed = True
        if self._builder is not None:
            self._builder.process.kill()

    async def _ask(self, key: bytes, message: bytes, resources: AsyncExitStack) -> str:
        async with resources:
            if key not in self._answers:  # it may have been asked while this call waited
                self._answers[key] = await asyncio.to_thread(self._exchange, message)
                if len(self._answers) > _MOST_ANSWERS:
                    self._answers.popitem(last=False)
            return self._answers[key]

    def _exchange(self, message: bytes) -> str:
        if self._is_closed:
            raise EngineUnavailable("the engine was stopped; try again")
        try:
            connection = (self._builder or self._start()).connection
            connection.send_bytes(message)
            return connection.recv_bytes().decode(errors="replace")
        except (EOFError, OSError) as error:
            if self._builder is not None:
                self._builder.end()
                self._builder = None
            raise EngineUnavailable("the process that checks constraints ended; try again") from error

    def _start(self) -> _Builder:
        context = utils.get_mp_context()  # type: ignore[attr-defined, no-untyped-call]
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(self._config, theirs), name="Grammars", daemon=True)
        process.start()
        theirs.close()
        self._builder = builder = _Builder(process, ours)
        if self._is_closed:  # `close` may have come too early to find it
            process.kill()
        ours.recv_bytes()  # it is ready
        _log.info("process for grammars started", pid=process.pid)
        return builder


def _encoded(constraint: StructuredOutputsParams) -> bytes:
    given = {name: getattr(constraint, name) for name in _FIELDS}
    return json.dumps({name: value for name, value in given.items() if value is not None}).encode()


def _serve(config: VllmConfig, connection: Connection) -> None:
    """Answer until the other end is closed."""
    set_process_title("Grammars")
    os.environ["VLLM_REGEX_COMPILATION_TIMEOUT_S"] = "0"  # none of vLLM's, which runs while the machine does other work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to every process; this one ends with its parent
    model = config.model_config
    backend = XgrammarBackend(config, cached_tokenizer_from_config(model), model.get_vocab_size())
    connection.send_bytes(b"")
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_in_fork(backend, message, connection))


def _in_fork(backend: XgrammarBackend, message: bytes, connection: Connection) -> bytes:
    """Build a grammar in a fork; return why it cannot be built, or nothing."""
    reader, writer = os.pipe()

    def build() -> None:
        connection.close()
        _limit()
        os.write(writer, _build(backend, message).encode(errors="replace")[:_LONGEST_ANSWER])

    pid = fork(build)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code > 0:
        raise RuntimeError("a fork that builds a grammar failed by itself")
    return TOO_MUCH.encode() if code < 0 else answer


def _limit() -> None:
    """Limit what this process takes from now on. The kernel ends it after any of the times."""
    most = psutil.Process().memory_info().data + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)


def _build(backend: XgrammarBackend, message: bytes) -> str:
    """Convert a constraint to a grammar and build it for the vocabulary; return why that fails, or nothing."""
    constraint = StructuredOutputsParams(**json.loads(message))
    try:
        signal.setitimer(signal.ITIMER_PROF, BUILD_SECONDS)
        validate_xgrammar_grammar(SamplingParams(structured_outputs=constraint))
        backend.compile_grammar(*get_structured_output_key(constraint))
    except Exception as error:
        is_out_of_memory = isinstance(error, MemoryError) or "bad_alloc" in f"{error} {error.__cause__}"
        return TOO_MUCH if is_out_of_memory else str(error)
    return ""
