"""A trainer small enough for the client's tests: with a real order of commands and a real gradient.

The model is a bigram table: the logits of the next token are the row of the current one.
"""

# ruff: noqa: N802

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime

import grpc
import numpy as np

from paceline import codec, errors
from paceline.codec.commands import put_answer
from paceline.layout import new_run_id
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceServicer
from paceline.types import Datum, LoraConfig, Run, RunState
from paceline.types.v1 import model_pb2
from support.models.formulas import log_softmax

VOCABULARY = 7


def make_data(count=2, length=5, seed=0, **inputs):
    """Make random datums for cross_entropy, with additional inputs if given."""
    rng = np.random.default_rng(seed)
    return [
        Datum(
            rng.integers(VOCABULARY, size=length).astype(np.int32),
            {
                "target_tokens": rng.integers(VOCABULARY, size=length),
                "weights": rng.normal(size=length).astype(np.float32),
                **inputs,
            },
        )
        for _ in range(count)
    ]


class ToyTrainer(TrainerServiceServicer):
    """One run. Commands execute in the order of their seq_id; the same command again has the state of the first."""

    def __init__(self) -> None:
        self.run_id = new_run_id()
        self.theta = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY))
        self.gradient = np.zeros_like(self.theta)
        self.steps = self.last = self.waiting_tokens = 0
        self.lost = self.has_gradient = False
        self.arrivals: list[int] = []
        self.executed: list[str] = []
        self.accepted: dict[int, tuple[bytes, asyncio.Future]] = {}
        """Each command's payload, and its answer to come."""
        self.replies_to_drop: Counter[int] = Counter()
        self.refusals: dict[int, list[errors.PacelineError | None]] = {}
        """How each arrival of a command is refused; None for not at all."""
        self.denial: errors.PacelineError | None = None
        """With which every command is turned away."""
        self.load_may_end = asyncio.Event()
        self.load_may_end.set()
        self.load_began = asyncio.Event()
        self.step_errors: list[errors.PacelineError] = []
        """What the next steps are refused with."""
        self.places: asyncio.Semaphore | None = None
        """How many more commands may execute; None for any number."""
        self.created: list[str] = []
        self.attachments: list[str] = []
        self.requests: list[object] = []
        self.metadata: dict[str, str | bytes] = {}
        self.tokenizer_files: dict[str, bytes] = {}
        self._turn = asyncio.Condition()

    async def CreateRun(self, request, context):
        self.created.append(request.request_id)
        self.requests.append(request)
        if len(self.created) == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        if request.like_checkpoint.endswith("/gone"):
            raise errors.CheckpointNotFound("no such checkpoint", field="like_checkpoint")
        return pb.CreateRunResponse(run=codec.run_to_proto(self._run()))

    async def GetRun(self, request, context):
        self.metadata = dict(context.invocation_metadata())
        if request.run_id != self.run_id:
            raise errors.RunNotFound("no such run", field="run_id", metadata={"run_id": request.run_id})
        return pb.GetRunResponse(run=codec.run_to_proto(self._run()))

    async def AttachRun(self, request, context):
        run = (await self.GetRun(request, context)).run
        if request.request_id not in self.attachments:
            self.attachments.append(request.request_id)
        answers = {seq_id: answer for seq_id, (_, answer) in self.accepted.items() if not answer.done()}
        if answers and request.outstanding == pb.OUTSTANDING_POLICY_WAIT:
            await asyncio.wait(answers.values(), timeout=request.wait_seconds)
            run = codec.run_to_proto(self._run())
        outstanding = [pb.CommandStatus(seq_id=seq_id, state=self._status(seq_id).state) for seq_id in answers]
        return pb.AttachRunResponse(run=run, attachment=len(self.attachments), outstanding=outstanding)

    async def GetTokenizer(self, request, context):
        return pb.GetTokenizerResponse(files=self.tokenizer_files)

    async def ListRuns(self, request, context):
        number = int(request.page_token or 0)
        return pb.ListRunsResponse(
            runs=[codec.run_to_proto(self._run())], next_page_token=str(number + 1) if number < 2 else ""
        )

    async def Execute(self, request, context):
        seq_id = request.seq_id
        method = request.WhichOneof("command")
        command = getattr(request, method)
        self.arrivals.append(seq_id)
        self.requests.append(command)
        if (refusals := self.refusals.get(seq_id)) and (refusal := refusals.pop(0)) is not None:
            raise refusal
        if self.denial is not None:
            raise self.denial
        if 0 < request.attachment < len(self.attachments):
            raise errors.ClientSuperseded("another client attached", field="attachment")
        if self.lost and method != "load_checkpoint":
            raise errors.RunStateLost("load a state checkpoint", metadata={"checkpoint": "paceline://c"})
        payload = command.SerializeToString(deterministic=True)
        if seq_id not in self.accepted:
            self.accepted[seq_id] = payload, asyncio.ensure_future(self._in_order(seq_id, command))
        known, _ = self.accepted[seq_id]
        if self.replies_to_drop[seq_id]:
            self.replies_to_drop[seq_id] -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        yield pb.ExecuteResponse(status=self._status(seq_id, is_another=known != payload))

    async def Follow(self, request, context):
        (seq_id,) = request.seq_ids
        yield pb.FollowResponse(status=self._status(seq_id))
        if not request.HasField("max_seconds"):
            await asyncio.wait({self.accepted[seq_id][1]})
            yield pb.FollowResponse(status=self._status(seq_id))

    def _status(self, seq_id, **told):
        if seq_id not in self.accepted:
            return pb.CommandStatus(seq_id=seq_id, state=pb.COMMAND_STATE_NOT_ARRIVED)
        _, task = self.accepted[seq_id]
        if not task.done():
            ahead = seq_id - self.last - 1
            return pb.CommandStatus(seq_id=seq_id, state=pb.COMMAND_STATE_ACCEPTED, commands_ahead=ahead, **told)
        answer = task.result()
        is_refused = isinstance(answer, errors.PacelineError)
        state = pb.COMMAND_STATE_REFUSED if is_refused else pb.COMMAND_STATE_SUCCEEDED
        status = pb.CommandStatus(seq_id=seq_id, state=state, **told)
        put_answer(status, answer)
        return status

    async def _in_order(self, seq_id, command):
        async with self._turn:
            await self._turn.wait_for(lambda: seq_id == self.last + 1)
            answer = await self._execute(command)
            self.last = seq_id
            self._turn.notify_all()
        return answer

    async def _execute(self, command):
        if self.places is not None:
            await self.places.acquire()
        name = type(command).__name__.removesuffix("Request")
        self.executed.append(name)
        execute = {
            "ForwardBackward": self._forward_backward,
            "OptimStep": self._optim_step,
            "LoadCheckpoint": self._load,
            "PublishWeights": self._publish,
        }[name]
        try:
            return await execute(command)
        except errors.PacelineError as error:
            return error

    async def _forward_backward(self, request):
        if request.loss_fn not in {"cross_entropy", "grpo"}:
            raise errors.UnknownLoss("is not served", field="loss_fn")
        data = [codec.datum_from_proto(datum, f"data[{index}]") for index, datum in enumerate(request.data)]
        loss, tokens, outputs, gradient = 0.0, 0, [], np.zeros_like(self.theta)
        for index, datum in enumerate(data):
            inputs, targets = datum.model_input, datum.loss_fn_inputs["target_tokens"]
            if inputs.max() >= VOCABULARY:
                raise errors.TokenOutOfRange("is not in the vocabulary", field=f"data[{index}].model_input")
            mask = datum.loss_fn_inputs.get("mask", np.ones(len(inputs), np.uint8)) != 0
            columns = targets.reshape(len(inputs), -1)
            # With a ratio of 1, grpo's gradient is that of cross_entropy weighted by advantages.
            given = datum.loss_fn_inputs["advantages" if request.loss_fn == "grpo" else "weights"]
            weights = np.where(mask[:, None], given.reshape(columns.shape), 0.0)
            table = log_softmax(self.theta)[inputs]
            logprobs = np.take_along_axis(table, columns, 1)
            onehot = np.eye(VOCABULARY)[columns]
            np.add.at(gradient, inputs, -(weights[..., None] * (onehot - np.exp(table)[:, None])).sum(1))
            loss -= float((weights * logprobs).sum())
            tokens += int(mask.sum())
            logprobs = np.where(mask[:, None], logprobs, 0.0).reshape(targets.shape)
            outputs.append({"logprobs": logprobs.astype(np.float32)})
        if not request.forward_only:
            self.gradient += gradient
            self.has_gradient = True
            self.waiting_tokens += tokens
        return pb.ForwardBackwardResponse(
            outputs=[codec.output_to_proto(output) for output in outputs],
            metrics={"loss:sum": loss, "tokens:sum": tokens, "logprob:mean": -loss / max(tokens, 1)},
        )

    async def _optim_step(self, request):
        if request.HasField("discard_gradient"):
            self.executed[-1] = "DiscardGradient"
            discarded, self.waiting_tokens = self.waiting_tokens, 0
            self.gradient[:], self.has_gradient = 0, False
            return pb.OptimStepResponse(step=self.steps, tokens=discarded)
        if self.step_errors:
            raise self.step_errors.pop(0)
        if not self.has_gradient:
            raise errors.NoGradient("call forward_backward first")
        norm = float(np.linalg.norm(self.gradient))
        self.theta -= request.adamw.learning_rate * self.gradient
        self.gradient[:] = 0
        self.has_gradient, self.waiting_tokens = False, 0
        self.steps += 1
        return pb.OptimStepResponse(step=self.steps, grad_norm=norm, learning_rate=request.adamw.learning_rate)

    async def _load(self, request):
        self.load_began.set()
        await self.load_may_end.wait()
        self.lost = False
        return pb.LoadCheckpointResponse(run=codec.run_to_proto(self._run()))

    async def _publish(self, request):
        model = model_pb2.ServedModel(base_model="toy", run_id=self.run_id, version=3, blake3="f0")
        return pb.PublishWeightsResponse(model=model, stage_milliseconds=1.5, total_milliseconds=2.5)

    def _run(self):
        return Run(
            run_id=self.run_id,
            base_model="toy",
            parameters=LoraConfig(rank=8, alpha=16.0),
            step=self.steps,
            last_seq_id=self.last,
            latest_version=0,
            state=RunState.LOST if self.lost else RunState.READY,
            latest_state_checkpoint="",
            create_time=datetime(2030, 1, 1, tzinfo=UTC),
            trainable_parameters=self.theta.size,
        )
