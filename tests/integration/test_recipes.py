"""The recipes against the real services: what they train, refuse, log, and how they go on after a kill."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys

import numpy as np
import pytest
from support.models.tiny_models import make_tiny_llama
from support.stacks.cluster import Cluster, wait_for
from typer.testing import CliRunner

from paceline import CheckpointKind
from paceline.cli.app import make_app

pytestmark = pytest.mark.services
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    model = make_tiny_llama(folder / "model", context=512)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    cluster = Cluster.make(folder / "state", model)
    with cluster.running():
        yield cluster


@pytest.fixture(autouse=True)
def elsewhere(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_ADDRESS", cluster.address)
    monkeypatch.setenv("PACELINE_API_KEY", cluster.api_key)


@pytest.fixture(autouse=True)
def tidy(service):
    yield
    for run in service.list_runs():
        service.delete_run(run.run_id, delete_checkpoints=True)


def told(*arguments, status=0):
    """Run a command; return what it prints. It must end with `status`."""
    result = CliRunner().invoke(make_app(), [str(argument) for argument in arguments])
    assert result.exit_code == status, (result.output, result.exception)
    return result.stderr if status else result.stdout


def write(path, rows):
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def said(user, assistant):
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]}


def killed_and_resumed(service, *options):
    """Run a recipe, and again with a SIGKILL in the middle, after which it is resumed: the weights must be the same."""
    told(*options, "--name", "calm")
    command = [sys.executable, "-m", "paceline.cli", *map(str, options), "--name", "killed"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def steps():
        return max((run.step for run in service.list_runs() if run.user_metadata["name"] == "killed"), default=0)

    wait_for(lambda: steps() >= 3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    told(*options, "--name", "killed", "--resume")
    killed, calm = finals(service)
    assert (killed.step, killed.blake3) == (calm.step, calm.blake3)


@pytest.fixture
def conversations(tmp_path):
    return write(tmp_path / "data.jsonl", [said(f"number {number}", "aa bb") for number in range(12)])


def finals(service):
    return service.list_checkpoints(kind=CheckpointKind.SAMPLER)


def test_sft_lowers_the_loss_of_what_is_held_out_and_says_how_to_use_the_adapter(service, conversations, tmp_path):
    options = ["--epochs", 3, "--batch", 4, "--learning-rate", 1e-2, "--eval", 0.25, "--eval-every", 2, "--rank", 4]
    out = told("sft", conversations, *options, "--log", "jsonl:log.jsonl", "--out", "adapter", "--name", "mine")
    assert "9 rows to train on, 3 held out, 9 steps" in out
    assert "paceline chat --model 'mine'" in out
    (run,) = service.list_runs()
    curves = service.metrics(run.run_id, ["eval/loss", "loss:mean"])
    assert curves["eval/loss"][-1] < curves["eval/loss"][0] / 2
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 10))
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 2, 4, 6, 8, 9]
    trained = [row["loss"] for row in rows if "loss" in row]
    assert trained == pytest.approx(curves["loss:mean"][1:], rel=1e-5)
    (final,) = finals(service)
    assert f"adapter: {final.path}" in out
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_prompts_and_completions_are_texts_as_they_are_or_messages(tmp_path):
    rows = [
        {"prompt": "Country: Peru\nCapital:", "completion": " Lima"},
        {"prompt": [{"role": "user", "content": "x"}], "completion": [{"role": "assistant", "content": "y"}]},
    ]
    out = told("sft", write(tmp_path / "rows.jsonl", rows), "--eval", 0, "--steps", 2)
    assert "step 2 of 2" in out


def test_bad_rows_are_named_by_their_lines_before_anything_is_trained(service, tmp_path):
    rows = [said("x", "y"), "", {"messages": [{"content": "x"}]}, "{bad", "[]", {"prompt": "x"}, {"other": 1}]
    message = told("sft", write(tmp_path / "rows.jsonl", rows), status=1)
    assert [line.split(": ")[0].rpartition(":")[2] for line in message.splitlines()] == ["3", "4", "5", "6", "7"]
    assert "messages[0].role" in message
    refused = write(tmp_path / "refused.jsonl", [said("x", "y"), "", {"messages": [{"role": "user", "content": "x"}]}])
    assert "refused.jsonl:3: messages: " in told("sft", refused, status=1)
    assert not service.list_runs()


@pytest.mark.parametrize(
    "given", [["--eval", "2"], ["--eval", "absent.jsonl"], ["--log", "wand:x"], ["--log", "jsonl"], ["--out", "."]]
)
def test_options_that_mean_nothing_are_refused_before_anything_is_trained(service, conversations, given):
    assert told("sft", conversations, *given, status=1)
    assert not service.list_runs()


def test_a_run_is_continued_only_when_asked_and_with_its_settings(service, conversations):
    options = ["sft", conversations, "--name", "mine", "--batch", 4, "--eval", 0]
    told(*options, "--steps", 2)
    assert "--resume" in told(*options, "--steps", 4, status=1)
    message = told(*options, "--steps", 4, "--resume", "--seed", 1, status=1)
    assert "seed 0, not 1" in message
    assert "continuing 'mine'" in told(*options, "--steps", 4, "--resume")
    (run,) = service.list_runs()
    assert run.step == 4


def test_sft_that_was_killed_goes_on_as_if_nothing_had_been(service, conversations):
    killed_and_resumed(service, "sft", conversations, "--steps", 40, "--batch", 1, "--eval-every", 7, "--rank", 4)


def test_training_begins_from_a_checkpoint(service, conversations):
    options = ["sft", conversations, "--batch", 4, "--eval", 0.25, "--rank", 4, "--learning-rate", 1e-2]
    told(*options, "--name", "first", "--epochs", 3)
    (final,) = finals(service)
    told(*options, "--name", "second", "--steps", 1, "--from", final.path)
    second, first = service.list_runs()
    assert second.user_metadata["name"] == "second"
    after, before = (service.metrics(run.run_id, ["eval/loss"])["eval/loss"] for run in (first, second))
    assert before[0] == pytest.approx(after[-1], rel=1e-4)


@pytest.fixture
def pairs(tmp_path):
    rows = [{"prompt": f"number {number}\n", "chosen": "aa bb cc", "rejected": "dd ee"} for number in range(10)] + [
        {
            "prompt": [{"role": "user", "content": f"{number}"}],
            "chosen": [{"role": "assistant", "content": "aa bb"}],
            "rejected": [{"role": "assistant", "content": "dd ee ff"}],
        }
        for number in range(10)
    ]
    return write(tmp_path / "pairs.jsonl", rows)


def test_dpo_orders_the_pairs_that_are_held_out(service, pairs):
    options = ["--epochs", 2, "--batch", 4, "--eval", 0.2, "--eval-every", 3, "--learning-rate", 5e-3, "--rank", 4]
    out = told("dpo", pairs, *options, "--log", "jsonl:log.jsonl")
    assert "16 pairs to train on, 4 held out, 8 steps" in out
    (run,) = service.list_runs()  # that of the reference is deleted
    curves = service.metrics(run.run_id)
    assert curves["eval/margin"][0] == curves["margin"][1] == 0  # of the untrained weights, exactly
    assert curves["eval/loss"][0] == pytest.approx(math.log(2))
    assert curves["eval/accuracy"][-1] == 1
    assert curves["eval/margin"][-1] > 0.1
    assert curves["eval/loss"][-1] < curves["eval/loss"][0]


def test_dpo_that_was_killed_goes_on_as_if_nothing_had_been(service, pairs):
    killed_and_resumed(service, "dpo", pairs, "--steps", 25, "--batch", 2, "--eval-every", 10, "--rank", 4)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"prompt": "x", "chosen": "y"}, "rejected: is not set"),
        ({"prompt": "x", "chosen": "y", "rejected": [{"role": "assistant", "content": "z"}]}, "rejected: must be text"),
        ({"chosen": "y", "rejected": "z"}, "prompt: is not set"),
    ],
)
def test_bad_pairs_are_named_by_their_lines(service, tmp_path, row, field):
    good = {"prompt": "x", "chosen": "y", "rejected": "z"}
    assert f"pairs.jsonl:2: {field}" in told("dpo", write(tmp_path / "pairs.jsonl", [good, row]), status=1)
    assert not service.list_runs()


TASK = '''
PROMPTS = [{"prompt": f"number {number}:", "wanted": 1} for number in range(20)]
STOP = "\\n"


def EVAL():
    return ["number 30:", [{"role": "user", "content": "31"}]]


def reward(prompt, completion):
    """Of a random model's completions half get 1."""
    assert prompt in PROMPTS + EVAL()
    return sum(completion.encode()) % 2
'''


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "parity.py"
    path.write_text(TASK)
    return path


RL = ["--batch", 2, "--group", 4, "--rank", 4, "--max-tokens", 4]


def test_rl_trains_on_a_task_and_keeps_its_rollouts(service, task):
    out = told("rl", task, *RL, "--steps", 3, "--eval-every", 2, "--learning-rate", 1e-3, "--log", "jsonl:log.jsonl")
    assert "20 prompts, 2 held out, 3 steps" in out
    (run,) = service.list_runs()
    assert run.step == 3
    assert service.get_run(run.run_id).user_metadata["name"] == "rl parity"
    rollouts = service.rollouts(run.run_id, 3)
    assert len(rollouts) >= 8
    assert {row.rollout.reward for row in rollouts} == {0.0, 1.0}
    assert all(row.rollout.reward == sum(row.rollout.completion.encode()) % 2 for row in rollouts)
    curves = service.metrics(run.run_id)
    assert curves["reward"][-1] == pytest.approx(sum(row.rollout.reward for row in rollouts) / len(rollouts))
    evaluated = ~np.isnan(curves["eval/reward"])
    assert curves.steps[evaluated].tolist() == [0, 2, 3]
    assert all("\n" not in row.rollout.completion for row in rollouts)


def test_rl_learns_to_give_what_is_rewarded(service, task):
    task.write_text(
        TASK.replace("% 2", "% 2 or 0.01 * len(completion)").replace('["number 30:"', '[*PROMPTS, "number 30:"')
    )
    told("rl", task, *RL, "--steps", 20, "--eval-every", 100, "--learning-rate", 1e-2)
    (run,) = service.list_runs()
    rewards = service.metrics(run.run_id, ["reward"])["reward"]
    assert rewards[-5:].mean() > rewards[:5].mean() + 0.2


def test_rl_ends_when_nothing_is_left_to_learn(service, task):
    task.write_text(TASK.replace("return sum(completion.encode()) % 2", "return 1"))
    assert "nothing is left to learn" in told("rl", task, *RL, "--steps", 3)
    (run,) = service.list_runs()
    assert run.step == 0


def test_rl_that_was_killed_goes_on_as_if_nothing_had_been(service, task):
    killed_and_resumed(service, "rl", task, *RL, "--batch", 1, "--steps", 12)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("PROMPTS = ['x']", "has no function reward"),
        ("def reward(prompt, completion): return 0", "has no PROMPTS"),
        ("PROMPTS = [3]\ndef reward(prompt, completion): return 0", r"PROMPTS[0] is neither"),
        ("PROMPTS = [{'prompt': ''}]\ndef reward(prompt, completion): return 0", r"PROMPTS[0] is empty"),
    ],
)
def test_a_file_that_is_no_task_is_refused_before_anything_is_trained(service, task, text, said):
    task.write_text(text)
    assert said in told("rl", task, status=1)
    assert not service.list_runs()


def test_a_reward_that_is_no_number_ends_with_a_sentence(task):
    task.write_text(TASK.replace("% 2", "and None"))
    assert "reward returned None" in told("rl", task, *RL, status=1)


def test_a_system_message_makes_messages_of_texts(service, task):
    task.write_text(TASK + 'SYSTEM = "Be short."\n')
    told("rl", task, *RL, "--steps", 1)
    (run,) = service.list_runs()
    prompt = service.rollouts(run.run_id)[0].rollout.prompt
    assert prompt.startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nnumber ")
    assert prompt.endswith("<|im_start|>assistant\n")
