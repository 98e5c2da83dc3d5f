"""A slice of the schema fuzz (schema_fuzz.py), and the schema set of bench/grammar."""

import json

import pytest

from bench.grammar.schemas import schemas
from kvrelay.plane.messages import GrammarSpec
from tests.kvrelay.grammar.schema_fuzz import fault_of, fuzz, sampler_of
from tests.serve.text.family_folders import write_family


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    return sampler_of(write_family("qwen2.5", tmp_path_factory.mktemp("qwen"))[0])


def test_random_schemas_are_refused_by_name_or_lead_to_valid_outputs(sampler):
    reports = []
    counts = fuzz(sampler, 200, 7_000_000, report=reports.append)
    assert not reports
    assert counts["valid"] > 120 and 10 < counts["refused"] < 60
    assert not counts["invalid"] + counts["fault"] + counts["unnamed"] + counts["slow"]


def test_without_masks_outputs_are_invalid(sampler):
    counts = fuzz(sampler, 60, 7_000_000, has_masks=False)
    assert counts["invalid"] > 10 * counts["valid"]


def test_every_schema_of_the_set_compiles_and_its_outputs_are_valid(sampler):
    num_ended = 0
    for name, schema in schemas().items():
        grammar = sampler.compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))
        text = sampler.output(grammar, seed=1)
        num_ended += text is not None
        assert text is None or fault_of(schema, text) == "", (name, text)
    assert num_ended > 150
