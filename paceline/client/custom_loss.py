"""Client-side losses C(log-probabilities), differentiated by the client and back-propagated by the trainer.

The trainer computes the log-probabilities lp (forward), the client computes C and dC/dlp (autograd), and the trainer
then runs cross_entropy, the sum of -lp * w, with w = -dC/dlp: its gradient equals that of C. This takes two passes
instead of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from copy import copy
from numbers import Real

import numpy as np
import torch

from paceline import errors
from paceline.client.batching import Batch, as_datums, make_batch
from paceline.client.commands import CommandSender, outcomes
from paceline.client.futures import HOLD, Hold, IssuedCommand, PacelineFuture
from paceline.client.transport import Worker
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import Datum, ForwardBackwardOutput, ForwardBackwardSpec
from paceline.types.training import Array

LossFn = Callable[[list[Datum], list[torch.Tensor]], tuple[torch.Tensor, Mapping[str, float]]]

_SENT_INPUTS = ("target_tokens", "mask")
_OWN_METRICS = ("loss:sum", "surrogate_loss:sum", "tokens:sum")


def put_custom_loss(
    sender: CommandSender, data: Sequence[Datum], loss_fn: LossFn
) -> PacelineFuture[ForwardBackwardOutput]:
    """Issue the forward and the backward pass of a client-side loss.

    Later commands are not sent before the backward pass is, or the forward pass or `loss_fn` has failed. The data is
    copied: `loss_fn` runs after the forward pass, when the caller may have changed its arrays.
    """
    if not callable(loss_fn):
        raise errors.InvalidArgument.of_type(loss_fn, "a function of the data and the log-probabilities", "loss_fn")
    own = [_copied(datum) for datum in as_datums(data)]
    spec = ForwardBackwardSpec("cross_entropy", forward_only=True)
    forward = make_batch([_without_weights(datum, f"data[{index}]") for index, datum in enumerate(own)], spec)
    worker = Worker()

    async def work(issued: IssuedCommand) -> ForwardBackwardOutput:
        with worker:
            return await two_passes(issued)

    async def two_passes(issued: IssuedCommand) -> ForwardBackwardOutput:
        async with sender.sending(issued):
            hold = Hold(issued)
            HOLD.set(hold)
            try:
                answers = await sender.send(issued, list(forward.requests))
                logprobs = [output["logprobs"] for output in forward.merge(await outcomes(answers)).loss_fn_outputs]
                loss, metrics, weights = await worker.run(copy_context().run, evaluate, own, logprobs, loss_fn)
            except errors.PacelineError as error:
                error.fate = error.fate or errors.Fate.TURNED_AWAY  # the second pass was not sent
                raise
            finally:
                hold.is_over = True
            backward = _backward(forward, weights)
            answers = await sender.send(issued, backward.requests)
        output = backward.merge(await outcomes(answers))
        surrogate = output.metrics.pop("loss:sum")
        output.metrics |= {"loss:sum": loss, "surrogate_loss:sum": surrogate, **metrics}
        return output

    return sender.issue("ForwardBackward with a custom loss", 2 * len(forward.requests), work, is_pass=True)


def evaluate(
    data: list[Datum], logprobs: Sequence[Array], loss_fn: LossFn
) -> tuple[float, Mapping[str, float], list[Array]]:
    """Return C, the metrics of `loss_fn`, and -dC/dlp of each datum (float32, shape of lp; 0 where the mask is 0).

    Raises InvalidArgument if `loss_fn` does not return a scalar that depends on the log-probabilities, and a dict of
    numbers; NonFinite if C or its gradient is not finite.
    """
    masks = [_mask_like(row, datum) for row, datum in zip(logprobs, data, strict=True)]
    leaves = [
        torch.from_numpy(np.where(mask, row, np.float32(0))).requires_grad_()
        for mask, row in zip(masks, logprobs, strict=True)
    ]
    loss, metrics = _checked(_call(loss_fn, data, leaves))
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise errors.InvalidArgument("must return a scalar tensor computed from the log-probabilities", field="loss_fn")
    found = torch.autograd.grad(loss.reshape(()), leaves, allow_unused=True)
    if all(gradient is None for gradient in found):
        raise errors.InvalidArgument("returned a scalar that does not depend on the log-probabilities", field="loss_fn")
    gradients = [torch.zeros_like(leaf) if one is None else one for one, leaf in zip(found, leaves, strict=True)]
    weights = [np.where(mask, -gradient.numpy(), 0.0) for mask, gradient in zip(masks, gradients, strict=True)]
    if not torch.isfinite(loss) or not all(np.isfinite(row).all() for row in weights):
        raise errors.NonFinite("its value or its gradient is not finite; nothing was accumulated", field="loss_fn")
    return loss.item(), metrics, [row.astype("<f4") for row in weights]


def _call(loss_fn: LossFn, data: list[Datum], leaves: list[torch.Tensor]) -> object:
    try:
        return loss_fn(data, leaves)
    except BaseException as error:
        # SystemExit would end the thread of all clients, and StopIteration cannot be the error of a future: every later
        # call would wait.
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise errors.InvalidArgument(f"raised {error!r}", field="loss_fn") from error


def _checked(returned: object) -> tuple[torch.Tensor, Mapping[str, float]]:
    """Check the form of what a `loss_fn` returned. Its metrics must not have the names of the trainer's."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise errors.InvalidArgument.of_type(returned, "a pair: the loss, and a dict of metrics", "loss_fn")
    loss, metrics = returned
    if not isinstance(metrics, Mapping):
        raise errors.InvalidArgument.of_type(metrics, "a dict of metrics beside the loss", "loss_fn")
    for name, value in metrics.items():
        if not isinstance(name, str) or not isinstance(value, Real):
            raise errors.InvalidArgument(
                f"returned the metric {name!r}: {value!r}; give names and numbers", field="loss_fn"
            )
        if name in _OWN_METRICS:
            raise errors.InvalidArgument(f"returned the metric {name}, which the client makes itself", field="loss_fn")
    return loss, metrics


def _mask_like(row: Array, datum: Datum) -> Array:
    """Return the mask of counted positions of `row`, [N] or [N, K], as bool in its shape."""
    mask = datum.loss_fn_inputs.get("mask", np.ones(len(row), np.uint8)) != 0
    return np.broadcast_to(mask.reshape(-1, *[1] * (row.ndim - 1)), row.shape)


def _copied(datum: Datum) -> Datum:
    own = copy(datum)
    own.model_input = copy(datum.model_input)
    own.loss_fn_inputs = {name: copy(values) for name, values in datum.loss_fn_inputs.items()}
    return own


def _without_weights(datum: Datum, place: str) -> Datum:
    kept = {name: datum.loss_fn_inputs[name] for name in _SENT_INPUTS if name in datum.loss_fn_inputs}
    if "target_tokens" not in kept:
        message = "is not set; give the token that each position predicts"
        raise errors.MissingField(message, field=f"{place}.loss_fn_inputs[target_tokens]")
    return Datum(datum.model_input, {**kept, "weights": np.zeros(kept["target_tokens"].shape, np.float32)})


def _backward(forward: Batch, weights: Sequence[Array]) -> Batch:
    rows, backward = iter(weights), Batch([], forward.sizes)
    for request in forward.requests:
        own = pb.ForwardBackwardRequest()
        own.CopyFrom(request)
        own.forward_only = False
        for datum in own.data:
            datum.loss_inputs["weights"].data = next(rows).tobytes()
        backward.requests.append(own)
    return backward
