"""Keys: which are valid, what comes with each, and what happens when their file changes."""

import logging

import pytest

from kvrelay.errors import ConfigError, InvalidRequest
from kvrelay.hashing import block_hashes, root_hash, tenant_name
from kvrelay.serve.tenants.access import Access
from kvrelay.serve.tenants.key_file import TenantEntry, file_text, key_hash

OPERATOR, SECRET = "operators-key", b"the cluster's secret"


def written(path, **tenants):
    """A file of tenants: name -> fields. The key of NAME is "key of NAME"."""
    entries = [TenantEntry(name=name, key_sha256=key_hash(f"key of {name}"), **one) for name, one in tenants.items()]
    path.write_text(file_text(entries))
    return str(path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.yaml"


def refused(check, key):
    with pytest.raises(InvalidRequest) as caught:
        check(key)
    return caught.value.status, caught.value.code


def test_without_keys_every_request_is_the_operators():
    access = Access()
    assert access.caller("").is_operator and access.caller("anything").name == "" and access.shows_tenants("")


def test_one_key_is_the_only_one_and_names_no_tenant():
    access = Access(OPERATOR)
    assert access.operator(OPERATOR).name == ""
    for wrong in ("", "operators-ke", OPERATOR + "y", "ключ"):
        assert refused(access.caller, wrong) == (401, "invalid_api_key") and not access.shows_tenants(wrong)


def test_a_tenants_key_is_valid_and_not_the_operators(path):
    access = Access(OPERATOR, written(path, search={}), SECRET)
    assert access.caller("key of search").name == "search" and access.operator(OPERATOR).name == "default"
    assert refused(access.operator, "key of search") == (403, "operator_key_required")
    assert refused(access.caller, "key of chat") == refused(access.operator, "") == (401, "invalid_api_key")
    assert access.shows_tenants(OPERATOR) and not access.shows_tenants("key of search")


def test_the_hash_in_the_file_is_no_key(path):
    access = Access(None, written(path, search={}), SECRET)
    assert refused(access.caller, key_hash("key of search")) == (401, "invalid_api_key")
    assert refused(access.caller, "") == (401, "invalid_api_key")


def test_each_key_has_a_namespace_of_its_own_and_shared_ones_have_none(path):
    access = Access(OPERATOR, written(path, a={}, b={}, c={"shared": True}, d={"shared": True}), SECRET)
    salts = [access.caller(f"key of {name}").salt("the same") for name in "abcd"]
    assert len({*salts[:2]}) == 2 and salts[2] == salts[3] == access.caller(OPERATOR).salt("the same") == "the same"
    hashes = [set(block_hashes(range(64), 16, salt)) for salt in salts[:3]]
    assert not hashes[0] & hashes[1] and not hashes[0] & hashes[2]


def test_a_namespace_is_the_same_at_each_ingress_and_another_in_another_cluster(path):
    file = written(path, a={})
    one, other, foreign = (Access(None, file, secret).caller("key of a") for secret in (SECRET, SECRET, b"another"))
    assert one.namespace == other.namespace != foreign.namespace
    assert key_hash("key of a") not in one.namespace and "key of a" not in one.namespace


def test_no_cache_salt_names_a_namespace(path):
    access = Access(OPERATOR, written(path, a={}), SECRET)
    guess = access.caller("key of a").salt("x")
    for key in (OPERATOR, "key of a"):
        with pytest.raises(InvalidRequest, match="NUL"):
            access.caller(key).salt(guess)


def test_quotas_of_the_store_are_of_the_names_that_blocks_carry_whatever_their_salt(path):
    access = Access(None, written(path, a={"store_bytes": 1 << 20}, b={}), SECRET)
    of_a, of_b = (
        {tenant_name(root_hash(access.caller(f"key of {name}").salt(salt))) for salt in (None, "x", "y")}
        for name in "ab"
    )
    assert access.store_quotas() == dict.fromkeys(of_a, 1 << 20) and len(of_a) == len(of_b) == 1 and of_a != of_b


# ---- the file changes


def test_keys_come_and_go_with_the_file(path):
    access = Access(None, written(path, search={"max_running": 2}), SECRET)
    assert access.counted()["search"].max_running == 2
    written(path, chat={})
    access.reload()
    assert access.caller("key of chat").name == "chat" and access.counted() == {}
    assert refused(access.caller, "key of search") == (401, "invalid_api_key")


@pytest.mark.parametrize("damage", ["tenants: [", "tenants: [{name: x}]", None])
def test_a_bad_file_changes_nothing_and_is_one_line_in_the_log(path, caplog, damage):
    access = Access(None, written(path, search={}), SECRET)
    if damage is None:
        path.unlink()
    else:
        path.write_text(damage)
    with caplog.at_level(logging.WARNING):
        access.reload()
        access.reload()
    assert access.caller("key of search").name == "search"
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(path) in line and "\n" not in line
    written(path, chat={})
    access.reload()
    assert access.caller("key of chat").name == "chat"


@pytest.mark.parametrize("damage", ["tenants: [", "tenant: []", None])
def test_a_bad_file_stops_the_start(path, damage):
    if damage is not None:
        path.write_text(damage)
    with pytest.raises(ConfigError, match=str(path)):
        Access(None, str(path), SECRET)
