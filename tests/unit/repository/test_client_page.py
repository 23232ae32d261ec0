"""docs/client.md matches the Python client: every method, parameter, error, field and default, and no absent one."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, Field, fields, is_dataclass

import pytest
from support.doc_pages import page, rows, section, shown

import paceline
from paceline.client.service_client import MAX_IN_FLIGHT

CLASSES = {
    "ServiceClient": paceline.ServiceClient,
    "TrainingClient": paceline.TrainingClient,
    "SamplingClient": paceline.SamplingClient,
    "SampleStream": paceline.SampleStream,
    "MetricsStream": paceline.MetricsStream,
    "PacelineFuture": paceline.PacelineFuture,
    "Datum": paceline.Datum,
}
SETTINGS = {
    "Datum": paceline.Datum,
    "SamplingParams": paceline.SamplingParams,
    "AdamParams": paceline.AdamParams,
    "LoraConfig": paceline.LoraConfig,
    "Timeouts": paceline.Timeouts,
    "RetryPolicy": paceline.RetryPolicy,
}
BUILTIN_ERRORS = {"FileExistsError", "TimeoutError"}


def public(cls: type) -> dict[str, str]:
    """Return the signatures of a class's public methods by name, without annotations and without the async twins."""
    names = [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))]
    twins = {f"{name}_async" for name in names} if cls is not paceline.PacelineFuture else set()
    return {name: call(cls, name) for name in names if name not in twins}


def call(cls: type, name: str) -> str:
    """Format a method's signature as the page does."""
    signature = inspect.signature(getattr(cls, name))
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    text = str(inspect.Signature(parameters))
    return name + re.sub(r"<(\w+\.\w+): \d+>", r"\1", text)


def methods(heading: str) -> dict[str, list[str]]:
    """Return what a class's methods do, their answer and their errors, by their signature on the page."""
    listed = rows(section(page("client.md"), heading))
    return {key.replace("` †", ""): [*cells, ""][:3] for key, cells in listed.items() if "(" in key}


def default_of(field: Field[object]) -> str:
    if field.default is not MISSING:
        return "empty" if field.default == () else shown(field.default)
    return "{}" if field.default_factory is not MISSING else "required"


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_method_is_listed_with_its_parameters_and_no_absent_one(name):
    assert sorted(methods(name)) == sorted(public(CLASSES[name]).values())


@pytest.mark.parametrize("name", ["ServiceClient", "TrainingClient", "SamplingClient"])
def test_a_method_is_marked_if_it_sends_nothing(name):
    listed = rows(section(page("client.md"), name))
    marked = {key.partition("(")[0] for key in listed if key.endswith("†")}
    assert marked == {method for method in public(CLASSES[name]) if not can_be_awaited(CLASSES[name], method)}


def can_be_awaited(cls: type, method: str) -> bool:
    """Return whether a method returns a future, or has a twin to await."""
    returned = str(inspect.signature(getattr(cls, method)).return_annotation)
    return returned.startswith("PacelineFuture[") or hasattr(cls, f"{method}_async")


@pytest.mark.parametrize("name", CLASSES)
def test_methods_name_their_answer_and_errors_that_exist(name):
    for method, (_, answer, raised) in methods(name).items():
        function = getattr(CLASSES[name], method.partition("(")[0])
        returned = str(inspect.signature(function).return_annotation)
        assert ("future" in answer) == returned.startswith("PacelineFuture["), method
        named = [part for part in raised.split(", ") if part]
        assert [error for error in named if error not in BUILTIN_ERRORS and not is_error(error)] == [], method


def is_error(name: str) -> bool:
    found = getattr(paceline.errors, name, None)
    return isinstance(found, type) and issubclass(found, paceline.errors.PacelineError)


@pytest.mark.parametrize("name", CLASSES)
def test_every_error_that_a_methods_docstring_names_is_listed(name):
    for method, (_, _, raised) in methods(name).items():
        documented = getattr(CLASSES[name], method.partition("(")[0]).__doc__ or ""
        found = re.search(r"(?:Errors:|Raises) (.*)", documented, re.DOTALL)
        named = {word for word in re.findall(r"\w+", found[1]) if is_error(word)} if found else set()
        assert named <= set(raised.split(", ")), method


@pytest.mark.parametrize("name", SETTINGS)
def test_every_field_is_listed_with_its_default(name):
    listed = rows(section(page("client.md"), name))
    described = {field: cells[0] for field, cells in listed.items() if "(" not in field}
    assert described == {field.name: default_of(field) for field in fields(SETTINGS[name])}


@pytest.mark.parametrize("name", rows(section(page("client.md"), "Answers")))
def test_every_field_of_an_answer_is_listed(name):
    without_remarks = re.sub(r"\([^)]*\)|\[[^]]*\]", "", answers()[name][0])
    assert re.findall(r"\w+", without_remarks) == [field.name for field in fields(getattr(paceline, name))]


def answers() -> dict[str, list[str]]:
    return rows(section(page("client.md"), "Answers"))


def test_the_page_names_everything_that_the_package_exports():
    named = set(re.findall(r"\w+", page("client.md")))
    assert {name for name in paceline.__all__ if name not in named} <= {"__version__"}
    types = {name for name in paceline.__all__ if is_dataclass(getattr(paceline, name))}
    params = {name for name in types if name.endswith("Params")}
    assert answers().keys() == types - SETTINGS.keys() - params - {"FullParameters", "ModelInput"}


def test_the_constructors_parameters_are_listed():
    signature = str(inspect.signature(paceline.ServiceClient)).partition(" ->")[0]
    text = re.sub(r": '[^']*'", "", signature).replace(" = ", "=")
    assert f"ServiceClient{text}" in " ".join(page("client.md").split())
    assert str(MAX_IN_FLIGHT) in text
