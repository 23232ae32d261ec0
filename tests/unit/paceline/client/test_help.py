"""What `help` says: something of every field and argument, and no more than can be read."""

from __future__ import annotations

import inspect
import pydoc
import re
from dataclasses import fields, is_dataclass
from typing import get_args

import pytest

import paceline
from paceline.client.training_client import LossName
from trainer_service.engine.loss.losses import LOSSES

CLIENTS = (paceline.ServiceClient, paceline.TrainingClient, paceline.SamplingClient)
CLASSES = (*CLIENTS, paceline.SampleStream, paceline.PacelineFuture, paceline.Datum, paceline.ModelInput)
DATACLASSES = [name for name in paceline.__all__ if is_dataclass(getattr(paceline, name))]


def methods(cls):
    return [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_argument_is_explained(cls):
    for name in methods(cls):
        method = getattr(cls, name)
        for argument in inspect.signature(method).parameters:
            if argument not in {"self", "per_token"}:
                assert re.search(rf"\b{argument}\b", inspect.getdoc(method) or ""), f"{name}({argument})"


def test_the_arguments_of_a_connection_are_explained():
    for argument in inspect.signature(paceline.ServiceClient).parameters:
        assert re.search(rf"^ *[\w, ]*\b{argument}\b[\w, ]*: ", paceline.ServiceClient.__doc__, re.MULTILINE), argument


@pytest.mark.parametrize("name", DATACLASSES)
def test_every_field_is_explained(name):
    cls = getattr(paceline, name)
    shown = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    for field in fields(cls):
        assert re.search(rf"^[ |]+{field.name} \([^\n]*\): \w", shown, re.MULTILINE), field.name


def test_the_members_of_an_enum_are_explained():
    assert "LENGTH: max_tokens or the context length." in paceline.StopReason.__doc__


def test_the_names_of_losses_are_those_of_the_trainer():
    assert sorted(get_args(LossName)) == sorted(LOSSES)


def test_completion_offers_public_names_alone():
    assert dir(paceline) == sorted(paceline.__all__)
    client = paceline.ServiceClient("127.0.0.1:1")
    for each in (client, client.create_sampling_client()):
        assert {"close", "sample"} & set(dir(each))
        assert not [name for name in dir(each) if name.startswith("_") or name == "transport"]
    client.close()


def test_the_help_of_the_errors_names_each_and_can_be_read():
    shown = pydoc.render_doc(paceline.errors, renderer=pydoc.plaintext)
    classes = [
        name
        for name, each in vars(paceline.errors).items()
        if inspect.isclass(each) and issubclass(each, paceline.errors.PacelineError)
    ]
    assert [name for name in classes if name not in shown] == []
    assert len(shown.splitlines()) < 500
