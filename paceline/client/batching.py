"""Split batches and lists of conversations into requests that fit one message, and merge the replies."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from paceline import codec, errors
from paceline.client.commands import Outcome
from paceline.spans import span
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import Datum, ForwardBackwardOutput, ForwardBackwardSpec, Reduction
from paceline.types.reductions import merge_metrics
from paceline.types.training import is_iterable

MAX_DATUMS = 1024
"""Maximum number of datums in one request."""

MAX_BYTES = 4 << 20
"""Maximum total size of the datums in one request; a larger datum is sent alone."""

_TENSOR_OVERHEAD = 64
"""Upper bound of a message's bytes around a tensor's elements."""

_MAX_CONVERSATION_BYTES, _MAX_CONVERSATIONS = 256 << 10, 4096
"""Limits of one RenderConversations; a longer conversation gets a call of its own."""

_DATUM_FIELD = re.compile(r"data\[(\d+)\]")
_LOSS_INPUTS = re.compile(r"\.loss_inputs\b")
"""What the contract calls `Datum.loss_fn_inputs`."""
_CONVERSATION_FIELD = re.compile(r"^conversations\[(\d+)\]")

RenderCall = Callable[[pb.RenderConversationsRequest], Awaitable[pb.RenderConversationsResponse]]


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of one forward (and backward) call, in the order of its datums."""

    requests: list[pb.ForwardBackwardRequest]
    sizes: list[int]
    """How many datums each has."""

    def merge(self, outcomes: Sequence[Outcome[pb.ForwardBackwardResponse]]) -> ForwardBackwardOutput:
        """Merge the replies; if any part failed, raise the first error, located within the whole batch.

        An error after which a part may have executed goes before one that says that its part did not.
        """
        failed = {part: outcome for part, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)}
        if failed:
            told = next((part for part, error in failed.items() if _may_have_executed(error)), min(failed))
            raise self._located(failed[told], told)
        replies = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        parts, start = [], 0
        for reply in replies:
            outputs = [
                codec.output_from_proto(output, f"outputs[{start + index}]")
                for index, output in enumerate(reply.outputs)
            ]
            parts.append(ForwardBackwardOutput(outputs, dict(reply.metrics)))
            start += len(outputs)
        outputs = [output for part_ in parts for output in part_.loss_fn_outputs]
        return ForwardBackwardOutput(outputs, merge_metrics([part_.metrics for part_ in parts]))

    def _located(self, error: BaseException, part: int) -> BaseException:
        if isinstance(error, errors.PacelineError):
            _name_as_datum_does(error)
        if len(self.sizes) > 1 and isinstance(error, errors.PacelineError):
            start = sum(self.sizes[:part])
            error.field = _DATUM_FIELD.sub(lambda place: f"data[{int(place[1]) + start}]", error.field)
            last = start + self.sizes[part] - 1
            which = f"{'datum' if last == start else 'datums'} {span(start, last, '')}"
            error.add_note(
                f"Part {part + 1} of {len(self.sizes)} failed: {which}. "
                "The gradient of the parts that succeeded stays in the run until the next optim_step."
            )
        return error


def _name_as_datum_does(error: errors.PacelineError) -> None:
    error.field = _LOSS_INPUTS.sub(".loss_fn_inputs", error.field)


def _may_have_executed(error: BaseException) -> bool:
    return isinstance(error, errors.PacelineError) and error.fate is errors.Fate.UNKNOWN


def make_batch(data: Sequence[Datum], spec: ForwardBackwardSpec) -> Batch:
    """Encode and split a batch. Raises EmptyBatch, InvalidDtype, InvalidArgument, before anything is sent.

    Every part carries the divisor of the mean over the whole batch, so that losses and gradients of the parts add up
    to those of the whole.
    """
    data = as_datums(data)
    count = None if spec.reduction is Reduction.SUM else spec.reduction.count(data)
    template = codec.spec_to_proto(replace(spec, reduction_count=count))
    batch = Batch([], [])
    for part in split([_size(datum) for datum in data]):
        request = pb.ForwardBackwardRequest()
        request.CopyFrom(template)
        try:
            request.data.extend(codec.datum_to_proto(data[index], f"data[{index}]") for index in part)
        except errors.PacelineError as error:
            _name_as_datum_does(error)
            raise
        batch.requests.append(request)
        batch.sizes.append(len(part))
    return batch


def as_datums(data: Iterable[Datum]) -> list[Datum]:
    """Return the datums of a batch as a new list. Raises EmptyBatch, InvalidArgument for anything else."""
    if isinstance(data, Datum):
        raise errors.InvalidArgument("is one Datum; give a list of them, [datum]", field="data")
    if isinstance(data, Mapping | str | bytes) or not is_iterable(data):
        raise errors.InvalidArgument(f"is a {type(data).__name__}; give a list of Datum", field="data")
    datums = [_as_datum(datum, index) for index, datum in enumerate(data)]
    if not datums:
        raise errors.EmptyBatch("holds no datum; give at least one", field="data")
    return datums


def _as_datum(value: Any, index: int) -> Datum:
    """Return a datum, also one of another library with the same fields, such as Tinker's."""
    if isinstance(value, Datum):
        return value
    if hasattr(value, "model_input") and hasattr(value, "loss_fn_inputs"):
        try:
            return Datum(value.model_input, value.loss_fn_inputs)
        except errors.PacelineError as error:
            error.field = f"data[{index}].{error.field}"
            raise
    message = f"is a {type(value).__name__}; give a Datum, such as Datum.from_completion(prompt, completion)"
    raise errors.InvalidArgument(message, field=f"data[{index}]")


def split(sizes: Sequence[int], max_items: int = MAX_DATUMS, max_bytes: int = MAX_BYTES) -> Iterator[range]:
    """Split items of these sizes in bytes, in order, into parts given as ranges of indices.

    A part has at most `max_items` items and `max_bytes` bytes, except that a larger item is a part of its own.
    """
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and (index - start == max_items or total + size > max_bytes):
            yield range(start, index)
            start, total = index, 0
        total += size
    if sizes:
        yield range(start, len(sizes))


def _size(datum: Datum) -> int:
    # Computed from the arrays, because protobuf encodes a message to determine its size.
    tensors = {"": datum.model_input, **datum.loss_fn_inputs}
    return sum(values.nbytes + len(name) + _TENSOR_OVERHEAD for name, values in tensors.items())


async def render_all(
    call: RenderCall, conversations: Sequence[bytes], base_model: str = ""
) -> AsyncIterator[pb.RenderedConversation]:
    """Yield the rendered conversations in order. Raises the errors of `call`, with indices into `conversations`."""
    sizes, done = [len(conversation) for conversation in conversations], 0
    while done < len(conversations) or not conversations:
        part = next(split(sizes[done:], _MAX_CONVERSATIONS, _MAX_CONVERSATION_BYTES), range(0))
        some = conversations[done : done + len(part)]
        request = codec.make(pb.RenderConversationsRequest, base_model=base_model, conversations=some)
        try:
            reply = await call(request)
        except errors.PacelineError as error:
            error.field = _CONVERSATION_FIELD.sub(lambda found: f"conversations[{done + int(found[1])}]", error.field)  # noqa: B023
            raise
        for rendered in reply.conversations:
            yield rendered
        done += len(reply.conversations)


@contextmanager
def sendable(field: str) -> Iterator[None]:
    """Convert the error of a value that cannot be converted for its message into InvalidArgument. See `codec.make`."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as problem:
        raise errors.InvalidArgument(f"cannot be sent: {problem}", field=field) from problem
