"""Errors cross Ray: every class of the tree survives pickle with its fields and its message."""

import copy
import inspect
import pickle

import pytest

from kvrelay import errors
from kvrelay.errors import KvrelayError, Overloaded, RequestError

pytestmark = pytest.mark.pure


SAMPLES = {"str": "why: ü", "float": 1.5, "int": 422, "str | None": "field"}


def tree(root=KvrelayError):
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


def sample(kind):
    """An instance with a value for every constructor argument."""
    if kind.__init__ is Exception.__init__:
        return kind("the setting is wrong")
    parameters = list(inspect.signature(kind).parameters.values())
    if any(p.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters):
        return kind("the setting is wrong")
    return kind(*(SAMPLES[p.annotation if isinstance(p.annotation, str) else _name(p.annotation)] for p in parameters))


def _name(annotation):
    return getattr(annotation, "__name__", None) if isinstance(annotation, type) else str(annotation)


CLASSES = list(tree())


def test_the_walk_sees_every_class_of_the_module():
    defined = {c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__}
    assert set(CLASSES) == defined
    assert len(defined) > 20


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_an_error_survives_pickle(kind):
    error = sample(kind)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert (again.args, vars(again), str(again)) == (error.args, vars(error), str(error))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_an_error_says_something(kind):
    assert str(sample(kind)).strip()
    assert (kind.__doc__ or "").strip()


def test_what_the_client_is_told():
    error = RequestError("no such model", "model", 404, "model_not_found")
    assert (str(error), error.param, error.status, error.code) == ("no such model", "model", 404, "model_not_found")
    full = Overloaded("full", 2.5)
    assert (full.status, full.code, full.retry_after_s) == (429, "overloaded", 2.5)
