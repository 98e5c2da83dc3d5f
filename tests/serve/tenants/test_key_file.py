"""The file of API keys: what it may hold, and that a mistake is one line that names the place and the tenant."""

import pytest

from kvrelay.errors import ConfigError
from kvrelay.serve.tenants.key_file import KeyFile, TenantEntry, file_text, key_hash, parse_keys

pytestmark = pytest.mark.pure

ONE, TWO = key_hash("one"), key_hash("two")


def entry(**fields):
    return {"name": "search", "key_sha256": ONE} | fields


def parsed(*entries):
    return parse_keys(str({"tenants": list(entries)}), "keys.yaml")  # a list of plain dicts is YAML, too


def test_a_tenant_has_a_name_a_hash_and_quotas_or_none():
    keys = parsed(entry(), entry(name="chat", key_sha256=TWO, shared=True, max_running=4, tokens_per_minute=6000))
    assert keys.tenants[0] == TenantEntry(name="search", key_sha256=ONE)
    assert (keys.tenants[1].shared, keys.tenants[1].max_running, keys.tenants[1].tokens_per_minute) == (True, 4, 6000)


def test_what_is_written_is_what_is_read():
    own = entry(weight=2.5, pin_share=0.1, store_bytes="4GiB")
    tenants = (TenantEntry(**own), TenantEntry(**entry(name="b", key_sha256=TWO, shared=True)))
    assert parse_keys(file_text(tenants), "keys.yaml") == KeyFile(tenants=tenants)
    assert tenants[0].store_bytes == 4 << 30
    assert parse_keys("", "keys.yaml") == parse_keys(file_text(()), "keys.yaml") == KeyFile()


@pytest.mark.parametrize(
    ("entries", "line"),
    [
        ([entry(name="a b")], "tenants.0.name: String should match"),
        ([entry(name="default")], "the name default is that of serve.api_key (tenant default)"),
        ([entry(key_sha256="abc")], "tenants.0.key_sha256: String should match"),
        ([entry(), entry(name="chat", key_sha256=TWO, max_running=0)], "tenants.1.max_running: Input should be"),
        (
            [entry(max_runing=4)],
            "unknown key tenants.0.max_runing; did you mean tenants.0.max_running? (tenant search)",
        ),
        ([entry(tokens_per_minute="many")], "(tenant search)"),
        ([entry(shared="yes")], "tenants.0.shared: Input should be a valid boolean (tenant search)"),
        ([entry(pin_share=0.6)], "tenants.0.pin_share: Input should be less than or equal to 0.5 (tenant search)"),
        ([entry(pin_share=0.1, shared=True)], "pin_share is of a namespace of its own"),
        ([entry(store_bytes=1, shared=True)], "store_bytes is of a namespace of its own"),
        ([entry(store_bytes="4GiBs")], "tenants.0.store_bytes: '4GiBs' is not a size"),
        ([entry(weight=0)], "tenants.0.weight: Input should be greater than 0 (tenant search)"),
        ([entry(), entry(key_sha256=TWO)], "2 tenants have the same name: search, search"),
        ([entry(), entry(name="chat")], "2 tenants have the same key_sha256: search, chat"),
    ],
)
def test_a_mistake_is_named_with_its_tenant(entries, line):
    with pytest.raises(ConfigError) as caught:
        parsed(*entries)
    assert str(caught.value).startswith("keys.yaml: ") and line in str(caught.value) and "\n" not in str(caught.value)


def test_broken_yaml_is_named_by_its_line_and_not_shown():
    with pytest.raises(ConfigError) as caught:
        parse_keys("tenants:\n- name: a\n  key_sha256: [secret\n", "keys.yaml")
    assert "(line 4)" in str(caught.value) and "secret" not in str(caught.value)
