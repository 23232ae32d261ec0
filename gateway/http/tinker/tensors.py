"""Convert arrays, datums and samples between Tinker's format and Paceline's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import numpy as np

from paceline import codec, errors
from paceline.tinker.v1 import tinker_pb2 as pb
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb
from paceline.types import SampledSequence, SampleResult, StopReason, TopkLogprobs
from paceline.types.training import MASK_INPUTS, Array
from paceline.types.v1 import datum_pb2, tensor_pb2

_FLOAT32, _INT64, _INT32, _BFLOAT16 = 1, 2, 3, 4
_DTYPES = {_FLOAT32: "<f4", _INT64: "<i8", _INT32: "<i4", _BFLOAT16: "<u2"}
_WIRE = {_FLOAT32: tensor_pb2.DTYPE_FLOAT32, _INT64: tensor_pb2.DTYPE_INT64, _INT32: tensor_pb2.DTYPE_INT32}
_MAX_DENSE = 64 << 20
"""Most bytes of a request's sparse arrays once they are dense."""
_UNKNOWN_LOGPROB = -99999.0


def forward_backward_request(
    message: pb.ForwardBackwardRequest, run_id: str, seq_id: int
) -> trainer_pb.ForwardBackwardRequest:
    """Convert a batch. Raises InvalidArgument or a subclass of it, and Unsupported for images."""
    budget = _DenseBudget(_MAX_DENSE)
    return trainer_pb.ForwardBackwardRequest(
        run_id=run_id,
        seq_id=seq_id,
        data=[_datum(datum, message.loss_fn, f"data[{index}]", budget) for index, datum in enumerate(message.data)],
        loss_fn=message.loss_fn,
        loss_fn_config=_config(message),
        forward_only=message.forward_only,
    )


def _config(message: pb.ForwardBackwardRequest) -> Mapping[str, float]:
    config = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise errors.InvalidArgument("must be a number", field=f"loss_fn_config[{name}]")
        config[name] = value.number
    return config


@dataclass(slots=True)
class _DenseBudget:
    """Bytes that a request's sparse arrays may still expand to, since a shape of a few bytes can mean any number."""

    left: int

    def take(self, size: int, field: str) -> None:
        """Reserve bytes before they are allocated. Raises OutOfRange."""
        if size > self.left:
            raise errors.OutOfRange(f"needs {size} bytes once it is dense; {self.left} are left of 64 MiB", field=field)
        self.left -= size


def _datum(datum: pb.Datum, loss_fn: str, field: str, budget: _DenseBudget) -> datum_pb2.Datum:
    for index, chunk in enumerate(datum.model_input):
        if chunk.WhichOneof("chunk") is None:
            message = "is an image, audio or empty; this server accepts tokens (encoded_text)"
            raise errors.Unsupported(message, field=f"{field}.model_input[{index}]")
    tokens = b"".join(chunk.encoded_text.tokens for chunk in datum.model_input)
    inputs = {name: _tensor(name, tensor, f"{field}.{name}", budget) for name, tensor in datum.loss_fn_inputs.items()}
    shape = [len(tokens) // 4]
    if loss_fn == "cross_entropy" and "weights" not in inputs and "target_tokens" in inputs:
        targets = inputs["target_tokens"]
        # Count the elements that are present, since a shape alone may claim any number.
        elements = len(targets.data) // (8 if targets.dtype == tensor_pb2.DTYPE_INT64 else 4)
        ones = np.ones(elements, "<f4").tobytes()
        inputs["weights"] = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, shape=targets.shape, data=ones)
    return datum_pb2.Datum(
        model_input=tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_INT32, shape=shape, data=tokens), loss_inputs=inputs
    )


def _tensor(name: str, tensor: pb.Tensor, field: str, budget: _DenseBudget) -> tensor_pb2.Tensor:
    """Convert an array; a dense one whose dtype exists in both formats keeps its bytes."""
    if tensor.dtype not in _DTYPES:
        raise errors.InvalidDtype(f"is {tensor.dtype}; send float32, int64, int32 or bfloat16", field=f"{field}.dtype")
    is_dense = tensor.WhichOneof("layout") != "sparse_csr"
    if is_dense and tensor.dtype in _WIRE and name not in MASK_INPUTS:
        return tensor_pb2.Tensor(dtype=_WIRE[tensor.dtype], shape=tensor.shape, data=tensor.dense)
    array = _dense(tensor, field) if is_dense else _from_csr(tensor, field, budget)
    if name in MASK_INPUTS:
        return codec.tensor_to_proto((array != 0).astype(np.uint8), field)
    return codec.tensor_to_proto(array, field)


def _elements(data: bytes, dtype: int, field: str) -> Array:
    try:
        values = np.frombuffer(data, _DTYPES[dtype])
    except ValueError as error:
        raise errors.InvalidShape("ends in the middle of an element", field=field) from error
    if dtype == _BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def _dense(tensor: pb.Tensor, field: str) -> Array:
    values, shape = _elements(tensor.dense, tensor.dtype, field), tuple(tensor.shape)
    if any(extent < 0 for extent in shape) or prod(shape) != values.size:
        raise errors.InvalidShape(f"has {values.size} elements, and shape {list(shape)}", field=field)
    return values.reshape(shape)


def _from_csr(tensor: pb.Tensor, field: str, budget: _DenseBudget) -> Array:
    """Return a sparse matrix as a dense one."""
    sparse, shape = tensor.sparse_csr, tuple(tensor.shape)
    values = _elements(sparse.values, tensor.dtype, field)
    rows, columns = _elements(sparse.crow_indices, _INT64, field), _elements(sparse.col_indices, _INT64, field)
    if len(shape) != 2 or any(extent < 0 for extent in shape):
        raise errors.InvalidShape(f"is {list(shape)[:8]}; a sparse array has two dimensions", field=field)
    counts = np.diff(rows)
    is_sound = (
        rows.size == shape[0] + 1
        and rows[0] == 0
        and rows[-1] == values.size == columns.size
        and bool((counts >= 0).all())
        and (columns.size == 0 or (columns.min() >= 0 and columns.max() < shape[1]))
    )
    if not is_sound:
        raise errors.InvalidShape("has indices outside its shape", field=field)
    budget.take(prod(shape) * values.itemsize, field)
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def forward_backward_output(reply: trainer_pb.ForwardBackwardResponse) -> bytes:
    """Convert a batch's outputs to records, in order; each record holds datums whose rows have the same width."""
    outputs = [codec.output_from_proto(output, f"outputs[{index}]") for index, output in enumerate(reply.outputs)]
    records = [_record(list(alike)) for _, alike in groupby(outputs, _widths)]
    message = pb.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=records, metrics=reply.metrics
    )
    return message.SerializeToString()


def _widths(output: Mapping[str, Array]) -> Mapping[str, tuple[int, ...]]:
    return {name: values.shape[1:] for name, values in output.items()}


def _record(outputs: Sequence[Mapping[str, Array]]) -> pb.ArrayRecord:
    fields = {}
    for name, first in outputs[0].items():
        parts = [np.ascontiguousarray(output[name], "<f4").tobytes() for output in outputs]
        offsets = np.cumsum([0, *map(len, parts)], dtype="<i8")
        fields[name] = pb.BatchedTensor(
            data=b"".join(parts), offsets=offsets.tobytes(), dtype=_FLOAT32, trailing_shape=first.shape[1:]
        )
    return pb.ArrayRecord(fields=fields, num_datums=len(outputs))


def sample_response(result: SampleResult, last_n: int | None) -> bytes:
    """Convert samples, with the last `last_n` of the prompt's log-probabilities; None means all."""
    message = pb.SampleResponse(
        sequences=map(_sequence, result.sequences), prompt_cache_hit_tokens=result.prompt_cache_hit_tokens
    )
    if result.prompt_logprobs is not None:
        logprobs = np.array(result.prompt_logprobs, "<f4")
        logprobs[: _hidden(len(logprobs), last_n)] = np.nan
        message.prompt_logprobs = logprobs.tobytes()
    if result.topk_prompt_logprobs is not None:
        topk = result.topk_prompt_logprobs
        message.topk_prompt_logprobs.CopyFrom(_topk(topk, _hidden(len(topk.token_ids), last_n)))
    return message.SerializeToString()


def _hidden(length: int, last_n: int | None) -> int:
    """Return how many of the first positions are left out."""
    return 0 if last_n is None else max(0, length - last_n)


def _sequence(sequence: SampledSequence) -> pb.SampledSequence:
    return pb.SampledSequence(
        stop_reason=0 if sequence.stop_reason is StopReason.STOP else 1,
        tokens=np.ascontiguousarray(sequence.tokens, "<i4").tobytes(),
        logprobs=np.ascontiguousarray(sequence.logprobs, "<f4").tobytes(),
        topk_sampled_logprobs=None if sequence.topk_logprobs is None else _topk(sequence.topk_logprobs, 0),
    )


def _topk(topk: TopkLogprobs, hidden: int) -> pb.TopkLogprobs:
    ids, logprobs = np.array(topk.token_ids, "<i4"), np.array(topk.logprobs, "<f4")
    unknown = (ids < 0) | np.isnan(logprobs)
    unknown[:hidden] = True
    ids[unknown], logprobs[unknown] = 0, _UNKNOWN_LOGPROB
    length, k = ids.shape
    return pb.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=length)


def prompt_tokens(chunks: Iterable[Mapping[str, Any]], field: str = "prompt") -> Array:
    """Return the tokens of a prompt's chunks in JSON. Raises Unsupported, InvalidArgument, EmptyBatch."""
    tokens: list[int] = []
    for index, chunk in enumerate(chunks):
        place = f"{field}.chunks[{index}]"
        if chunk.get("type", "encoded_text") != "encoded_text":
            message = f"is {str(chunk.get('type'))[:40]}; this server accepts tokens (encoded_text)"
            raise errors.Unsupported(message, field=place)
        given = chunk.get("tokens")
        if not isinstance(given, list) or not all(type(token) is int for token in given):
            raise errors.InvalidArgument("must be a list of token ids", field=f"{place}.tokens")
        tokens += given
    if not tokens:
        raise errors.EmptyBatch("has no tokens; send at least one", field=field)
    if min(tokens) < 0 or max(tokens) > np.iinfo(np.int32).max:
        raise errors.TokenOutOfRange("has a number that is not a token id", field=field)
    return np.array(tokens, np.int32)
