"""The ledger of tokens trained: what it counts, what it finds again, and a volume that takes nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from paceline import codec
from paceline.files.usage_files import read_usage
from paceline.trainer.v1 import trainer_service_pb2 as pb
from trainer_service.journal.format import AnswerRecord
from trainer_service.usage import UsageLedger


def reply(*lengths: int, has_gradient: bool = True) -> pb.ForwardBackwardResponse:
    outputs = [codec.output_to_proto({"logprobs": np.zeros(length, np.float32)}) for length in lengths]
    return pb.ForwardBackwardResponse(outputs=outputs, metrics={"nonfinite_gradient:sum": 0.0} if has_gradient else {})


def run_with(answers=(), run_id: str = "run-1", tenant: str = "team-a"):
    """What the ledger reads of a run."""
    return SimpleNamespace(run_id=run_id, tenant=tenant, sequencer=SimpleNamespace(answers=answers))


def answer(seq_id: int, given: pb.ForwardBackwardResponse | None, method: str = "ForwardBackward") -> AnswerRecord:
    return AnswerRecord(seq_id, b"", method, None if given is None else given.SerializeToString())


def counted(ledger: UsageLedger, tenant: str = "team-a") -> list[tuple[str, int, int]]:
    return [(one.run_id, one.tokens, one.passes) for one in ledger.of(tenant)]


def test_a_pass_counts_once_and_one_without_a_gradient_not_at_all(tmp_path):
    registry = CollectorRegistry()
    ledger, run = UsageLedger(tmp_path, registry), run_with()
    for seq_id in (1, 2, 2, 1):
        ledger.passed(run, seq_id, reply(3, 4))
    ledger.passed(run, 3, reply(9, has_gradient=False))
    assert counted(ledger) == [("run-1", 14, 2)]
    assert registry.get_sample_value("paceline_trainer_tokens_trained_total", {"tenant": "team-a"}) == 14


def test_a_start_counts_from_the_answers_what_the_files_lack(tmp_path):
    before = UsageLedger(tmp_path, CollectorRegistry())
    before.passed(run_with(), 1, reply(3))
    before.write()
    before.passed(run_with(), 2, reply(5))  # and is killed before it writes
    answers = [answer(number, reply(length)) for number, length in ((3, 7), (1, 3), (2, 5))]
    answers += [answer(4, None), answer(5, reply(9), "OptimStep")]
    for _ in range(2):
        ledger = UsageLedger(tmp_path, CollectorRegistry())
        ledger.load([run_with(answers), run_with([answer(1, reply(2))], "run-2", "team-b")])
        assert counted(ledger) == [("run-1", 15, 3)]
        assert counted(ledger, "team-b") == [("run-2", 2, 1)]
        ledger.write()


def test_what_cannot_be_written_is_written_later(tmp_path):
    ledger = UsageLedger(tmp_path, CollectorRegistry())
    ledger.passed(run_with(), 1, reply(3))
    (tmp_path / "usage").write_text("no folder can be here")
    ledger.write()
    (tmp_path / "usage").unlink()
    ledger.write()
    assert [one.tokens for one in read_usage(tmp_path)["team-a"]] == [3]


def test_counts_while_another_thread_writes_are_not_lost(tmp_path):
    ledger, runs = UsageLedger(tmp_path, CollectorRegistry()), [run_with(run_id=f"run-{n}") for n in range(20)]

    async def count() -> None:
        for seq_id in range(1, 51):
            writing = asyncio.create_task(asyncio.to_thread(ledger.write))
            for run in runs:
                ledger.passed(run, seq_id, reply(1))
                await asyncio.sleep(0)
            await writing

    asyncio.run(count())
    ledger.write()
    assert sum(one.tokens for one in read_usage(tmp_path)["team-a"]) == 20 * 50


@pytest.mark.parametrize("damage", ["[{", "{}", '[{"day": 1}]', '[["2026-01-01", "run-1", 3, 1, 1]]', "\\0"])
def test_a_damaged_file_is_set_aside_and_counting_goes_on(tmp_path, damage):
    ledger = UsageLedger(tmp_path, CollectorRegistry())
    ledger.passed(run_with(), 1, reply(3))
    ledger.passed(run_with(run_id="run-2", tenant="team-b"), 1, reply(5))
    ledger.write()
    (file,) = (tmp_path / "usage" / "team-a").iterdir()
    file.write_text(damage)
    with pytest.raises(ValueError, match=f"{file.name} is damaged"):
        read_usage(tmp_path)
    again = UsageLedger(tmp_path, CollectorRegistry())
    again.load([])
    assert (counted(again), counted(again, "team-b")) == ([], [("run-2", 5, 1)])
    again.passed(run_with(), 2, reply(7))
    again.write()
    assert [one.tokens for one in read_usage(tmp_path)["team-a"]] == [7]
    (aside,) = file.parent.glob("*.damaged-*")
    assert aside.read_text() == damage
