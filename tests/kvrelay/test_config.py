"""Settings: sizes, YAML, overrides, and errors that name the key and its nearest neighbour."""

import pytest
from pydantic import ValidationError

from kvrelay.config import Settings, load_settings, settings_from, with_secrets
from kvrelay.environment import cache_dir, hub_offline, native_disabled
from kvrelay.errors import ConfigError
from kvrelay.settings.section import parse_bytes
from kvrelay.types import Role

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("1k", 1024),
        ("512MiB", 512 << 20),
        ("512 MiB", None),
        ("2g", 2 << 30),
        ("2GB", 2 << 30),
        ("1.5GB", 3 << 29),
        (" 1TiB ", 1 << 40),
        ("", None),
        ("MiB", None),
        ("lots", None),
        ("1e", None),
        ("infG", None),
        ("nang", None),
    ],
)
def test_sizes(text, expected):
    if expected is not None:
        assert parse_bytes(text) == expected
        return
    try:
        size = parse_bytes(text)
    except ValueError as error:
        assert repr(text) in str(error)
    else:
        assert (text, size) == ("512 MiB", 512 << 20)  # a space is harmless


@pytest.mark.parametrize(
    ("given", "share"),
    [("50%", 0.5), ("0.5", 0.5), (0.25, 0.25), (" 12.5% ", 0.125), ("512MiB", None), ("1.5GB", None), (4096, None)],
)
def test_a_pool_is_a_size_or_a_share_of_the_free_memory(given, share):
    settings = settings_from({"engine": {"kv_memory": given}, "decode": {"kv_memory": given}})
    assert settings.engine.kv_memory_share == settings.for_role(Role.DECODE).engine.kv_memory_share == share
    if share is None:
        assert settings.engine.kv_memory_bytes == parse_bytes(given)


@pytest.mark.parametrize(
    "wrong", ["0%", "100%", "1.0", 1.0, 0.0, -0.5, "150%", "nan%", "1.5", float("nan"), "half%", "0", "-1", "1..5"]
)
def test_what_is_neither_a_size_nor_a_share_is_told_by_its_key(wrong):
    with pytest.raises(ConfigError, match=r"^decode\.kv_memory: .*(share|size|room)"):
        settings_from({"decode": {"kv_memory": wrong}})


def test_kv_has_the_models_dtype_or_its_own():
    assert settings_from({"model": {"dtype": "float32"}}).kv_dtype == "float32"
    settings = settings_from({"engine": {"kv_dtype": "fp8_e4m3"}})
    assert [settings.for_role(role).kv_dtype for role in Role] == ["fp8_e4m3", "fp8_e4m3"]
    assert settings.model.compute_dtype == "bfloat16"


def test_the_defaults_are_valid_and_frozen():
    settings = Settings()
    assert settings.engine.kv_memory_bytes is settings.engine.kv_memory_share is settings.engine.kv_memory is None
    with pytest.raises(ValidationError, match="frozen"):
        settings.engine.block_size = 32  # type: ignore[misc]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"engine": {"blok_size": 16}}, "unknown setting engine.blok_size; did you mean engine.block_size?"),
        ({"engin": {}}, "unknown setting engin; did you mean engine?"),
        ({"router": {"local_prefill_token": 1}}, "did you mean router.local_prefill_tokens?"),
        ({"zzz": 1}, "unknown setting zzz"),
    ],
)
def test_an_unknown_key_is_told_with_its_nearest_neighbour(data, message):
    with pytest.raises(ConfigError) as caught:
        settings_from(data)
    assert message in str(caught.value)


def test_a_key_like_no_other_gets_no_hint():
    with pytest.raises(ConfigError) as caught:
        settings_from({"zzz": 1})
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"engine": {"block_size": 24}}, "engine.block_size: a block holds a power of two"),
        ({"engine": {"block_size": 0}}, "engine.block_size"),
        ({"engine": {"block_size": 1024}}, "engine.block_size"),
        ({"engine": {"token_budget": 1}}, "engine.token_budget"),
        ({"serve": {"port": 70000}}, "serve.port"),
        ({"transfer": {"transport": "carrier-pigeon"}}, "transfer.transport"),
        ({"cluster": {"decode": 0}}, "cluster.decode"),
        ({"model": {"dtype": "int3"}}, "model.dtype"),
        ({"cluster": {"prefill": "many"}}, "cluster.prefill"),
        ({"engine": {"kv_memory": "lots"}}, "engine.kv_memory: 'lots' is not a size"),
        ({"engine": {"kv_memory": "infG"}}, "engine.kv_memory: 'infG' is not a size"),
        ({"engine": {"kv_memory": "-1g"}}, "engine.kv_memory"),
        ({"engine": {"kv_memory": [1]}}, "engine.kv_memory: "),
        ({"cache": {"disk_size": "lots"}}, "cache.disk_size: 'lots' is not a size"),
        ({"cache": {"disk_size": 0}}, "cache.disk_size"),
        ({"serve": {"port": 0}}, "serve.port"),
        ({"cluster": {"dashboard_port": 0}}, "cluster.dashboard_port"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(data, key):
    with pytest.raises(ConfigError) as caught:
        settings_from(data)
    assert key in str(caught.value)


def test_yaml_then_overrides(tmp_path):
    path = tmp_path / "kvrelay.yaml"
    path.write_text("cluster:\n  prefill: 2\n  decode: 3\nengine:\n  kv_memory: 1GiB\n")
    settings = load_settings(path, {"cluster": {"decode": 5, "prefill": None}, "serve": {"port": None}})
    assert (settings.cluster.prefill, settings.cluster.decode) == (2, 5)
    assert settings.engine.kv_memory_bytes == 1 << 30
    assert settings.serve.port == 8000


def test_off_needs_no_quotes(tmp_path):
    path = tmp_path / "kvrelay.yaml"
    path.write_text("engine: {speculation: off, prefix_caching: off}\ntransfer: {checks: off}\n")
    settings = load_settings(path)
    assert (settings.engine.speculation, settings.transfer.checks) == ("off", "off")
    assert load_settings(None, {"engine": {"speculation": False}}).engine.speculation == "off"
    assert settings.engine.prefix_caching is False
    with pytest.raises(ConfigError, match="speculation"):
        load_settings(path, {"engine": {"speculation": True}})


def test_an_override_needs_no_file():
    assert load_settings(None, {"serve": {"port": 9000}}).serve.port == 9000


@pytest.mark.parametrize("text", ["", "{}", "# nothing\n"])
def test_an_empty_file_is_the_default(tmp_path, text):
    path = tmp_path / "empty.yaml"
    path.write_text(text)
    assert load_settings(path) == Settings()


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text", "a: [1", "\t- x"])
def test_yaml_that_is_no_configuration_is_refused_with_its_path(tmp_path, text):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert "bad.yaml" in str(caught.value)


@pytest.mark.parametrize("text", ["engine: 5\n", "engine: [1]\n", "engine: kv_memory\n"])
def test_a_section_that_is_no_mapping_is_named_with_overrides_or_without(tmp_path, text):
    path = tmp_path / "k.yaml"
    path.write_text(text)
    for overrides in ({}, {"engine": {"kv_memory": "1GiB"}}):
        with pytest.raises(ConfigError, match=r"k\.yaml: engine: expected settings"):
            load_settings(path, overrides)


@pytest.mark.parametrize(("text", "name"), [("5: {}\n", "5"), ("engine: {5: 1}\n", "engine.5")])
def test_a_key_that_is_no_text_is_named(tmp_path, text, name):
    path = tmp_path / "k.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=name):
        load_settings(path)


@pytest.mark.parametrize(
    ("text", "whose"),
    [
        ("applications: []\n", "serve deploy"),
        ("apiVersion: ray.io/v1\n", "kubectl"),
        ("available_node_types:\n", "ray up"),
    ],
)
def test_somebody_elses_file_is_told_with_what_takes_it(tmp_path, text, whose):
    path = tmp_path / "theirs.yaml"
    path.write_text(f"proxy_location: EveryNode\n{text}")
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert f"{whose}" in str(caught.value) and str(caught.value).endswith(str(path))


@pytest.mark.parametrize("text", ["a: [1\n\n\nb: c", "a: b: c", "\x00"])
def test_broken_yaml_is_told_in_one_line(tmp_path, text):
    path = tmp_path / "k.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert len(str(caught.value).splitlines()) == 1


def test_secrets_come_of_the_settings_then_of_the_environment(monkeypatch):
    for name in ("KVRELAY_API_KEY", "KVRELAY_SECRET"):
        monkeypatch.delenv(name, raising=False)
    assert with_secrets(Settings()) == Settings()
    monkeypatch.setenv("KVRELAY_API_KEY", "key")
    monkeypatch.setenv("KVRELAY_SECRET", "secret")
    assert (with_secrets(Settings()).serve.api_key, with_secrets(Settings()).cluster.secret) == ("key", "secret")
    own = settings_from({"serve": {"api_key": "mine"}, "cluster": {"secret": "ours"}})
    assert with_secrets(own) == own


@pytest.mark.parametrize(
    "outlives, cache, store",
    [
        (True, {"disk_path": "/kv"}, {}),
        (True, {"remote": "redis://kv:6379"}, {}),
        (True, {"remote": "s3://bucket/kv"}, {}),
        (True, {"remote": "cluster"}, {"disk_path": "/kv"}),
        (False, {"remote": "cluster"}, {}),
        (False, {}, {"disk_path": "/kv"}),
    ],
)
def test_what_is_sealed_and_outlives_the_cluster_needs_a_secret_that_does(monkeypatch, outlives, cache, store):
    monkeypatch.delenv("KVRELAY_SECRET", raising=False)
    data = {"cache": {"host_memory": "1MiB", "sealed": True, **cache}, "store": store}
    if outlives:
        with pytest.raises(ConfigError, match=r"cache\.sealed: .*cluster\.secret"):
            with_secrets(settings_from(data))
    else:
        with_secrets(settings_from(data))
    with_secrets(settings_from(data | {"cluster": {"secret": "ours"}}))
    with_secrets(settings_from(data | {"cache": data["cache"] | {"sealed": False}}))
    monkeypatch.setenv("KVRELAY_SECRET", "secret")
    with_secrets(settings_from(data))


def test_a_secret_can_stand_in_a_file_that_the_environment_names(monkeypatch, tmp_path):
    file = tmp_path / "key"
    monkeypatch.delenv("KVRELAY_API_KEY", raising=False)
    monkeypatch.setenv("KVRELAY_API_KEY_FILE", str(file))
    with pytest.raises(ConfigError, match=f"KVRELAY_API_KEY_FILE: {file}: .*No such file"):
        with_secrets(Settings())
    file.write_text("\n")
    with pytest.raises(ConfigError, match=f"KVRELAY_API_KEY_FILE: {file} is empty"):
        with_secrets(Settings())
    file.write_text("from a file\n")
    assert with_secrets(Settings()).serve.api_key == "from a file"
    monkeypatch.setenv("KVRELAY_API_KEY", "nearer")
    assert with_secrets(Settings()).serve.api_key == "nearer"


def test_yaml_cannot_run_code(tmp_path):
    path = tmp_path / "evil.yaml"
    path.write_text("model: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ConfigError):
        load_settings(path)


def test_a_missing_file_is_refused_with_its_path(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_settings(tmp_path / "none.yaml")
    assert "none.yaml" in str(caught.value)


def test_the_cache_folder_is_ours_then_xdgs(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("KVRELAY_CACHE", raising=False)
    assert cache_dir() == tmp_path / "xdg" / "kvrelay"
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "env"))
    assert cache_dir() == tmp_path / "env"


def test_switches_of_the_environment(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "KVRELAY_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    assert (hub_offline(), native_disabled()) == (False, False)
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "true")
    monkeypatch.setenv("KVRELAY_NATIVE", "0")
    assert (hub_offline(), native_disabled()) == (True, True)


def test_a_roles_own_section_goes_over_the_common_one():
    settings = settings_from(
        {
            "engine": {"block_size": 16, "token_budget": 256},
            "prefill": {"block_size": 32, "kv_memory": "1GiB"},
            "decode": {"token_budget": 64, "kv_layout": "HND", "backend": "reference"},
        }
    )
    prefill, decode = settings.for_role(Role.PREFILL).engine, settings.for_role(Role.DECODE).engine
    assert (prefill.block_size, prefill.kv_memory_bytes, prefill.token_budget) == (32, 1 << 30, 256)
    assert prefill.kv_layout == "NHD"
    assert (decode.block_size, decode.token_budget, decode.kv_layout, decode.backend) == (16, 64, "HND", "reference")


def test_a_role_without_a_section_is_as_the_common_one():
    settings = settings_from({"engine": {"block_size": 32}, "model": {"dtype": "float32"}})
    for role in Role:
        assert settings.for_role(role) == settings


def test_in_one_roles_settings_no_role_differs():
    prefill = settings_from({"prefill": {"block_size": 32}}).for_role(Role.PREFILL)
    assert prefill.for_role(Role.DECODE) == prefill.for_role(Role.PREFILL) == prefill


@pytest.mark.parametrize(
    ("prefill", "decode", "smallest"), [(None, None, 16), (32, None, 16), (32, 64, 32), (None, 4, 4)]
)
def test_prompts_are_hashed_by_the_smallest_block_of_any_role(prefill, decode, smallest):
    settings = settings_from({"prefill": {"block_size": prefill}, "decode": {"block_size": decode}})
    assert settings.tokens_per_hash == smallest


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"prefill": {"block_size": 24}}, "prefill.block_size: a block holds a power of two"),
        ({"decode": {"kv_memory": "lots"}}, "decode.kv_memory: 'lots' is not a size"),
        ({"prefill": {"blok_size": 8}}, "unknown setting prefill.blok_size; did you mean prefill.block_size?"),
        ({"decode": {"dtype": "int3"}}, "decode.dtype"),
        ({"engine": {"kv_layout": "DNH"}}, "engine.kv_layout"),
        ({"prefill": {"dtype": "float32"}}, "prefill.dtype is float32 and model.dtype is bfloat16"),
        ({"prefill": {"dtype": "float32"}}, "transfer.convert_dtype"),
        ({"decode": {"kv_dtype": "fp8_e4m3"}}, "engine.kv_dtype is bfloat16 and decode.kv_dtype is fp8_e4m3"),
        ({"decode": {"kv_dtype": "fp8"}}, "decode.kv_dtype"),
    ],
)
def test_a_roles_wrong_value_is_told_by_its_own_key(data, message):
    with pytest.raises(ConfigError) as caught:
        settings_from(data)
    assert message in str(caught.value)


def test_unequal_dtypes_are_taken_where_they_are_converted():
    data = {"prefill": {"dtype": "float32"}, "transfer": {"convert_dtype": True}}
    settings = settings_from(data)
    assert [settings.for_role(role).model.compute_dtype for role in Role] == ["float32", "bfloat16"]
    assert settings_from({"prefill": {"dtype": "bfloat16"}}).for_role(Role.PREFILL).model.dtype == "bfloat16"


def test_the_key_of_a_roles_setting_is_where_it_stands():
    settings = settings_from({"prefill": {"kv_memory": "1GiB"}})
    assert settings.key_of(Role.PREFILL, "kv_memory") == "prefill.kv_memory"
    assert settings.key_of(Role.DECODE, "kv_memory") == "engine.kv_memory"
    assert settings.key_of(Role.DECODE, "dtype") == "model.dtype"
