"""`kvrelay keys`: a key is shown once, its hash is kept, and the file stays valid and private."""

import stat

import pytest

from kvrelay.cluster.commands.cli import USAGE_ERROR, run
from kvrelay.serve.tenants.access import Access, read_keys
from kvrelay.serve.tenants.quotas import TenantLimits

pytestmark = pytest.mark.alone


@pytest.fixture
def keys(tmp_path, capsys):
    """`status, printed, complaint = keys("add", "search", …)` on one file, which is `keys.file`."""

    def command(*words):
        status = run(["keys", *words, "--file", str(command.file)])
        return status, *capsys.readouterr()

    command.file = tmp_path / "keys.yaml"
    return command


def test_a_key_is_printed_once_and_opens_the_api(keys):
    status, printed, _ = keys("add", "search", "--max-running", "8", "--pin-share", "0.1", "--store-bytes", "4GiB")
    key = printed.strip()
    assert status == 0 and len(key) == len("kvr-") + 43  # 256 bits
    assert key not in keys.file.read_text() and stat.S_IMODE(keys.file.stat().st_mode) == 0o600
    limits = Access(None, str(keys.file), b"secret").caller(key).limits
    assert limits == TenantLimits(max_running=8, pin_share=0.1, store_bytes=4 << 30)


def test_two_keys_differ_and_one_can_be_removed(keys):
    one, two = (keys("add", name)[1].strip() for name in ("one", "two"))
    assert one != two and keys("remove", "one")[0] == 0
    assert [entry.name for entry in read_keys(keys.file).tenants] == ["two"]
    assert stat.S_IMODE(keys.file.stat().st_mode) == 0o600 and list(keys.file.parent.iterdir()) == [keys.file]


def test_the_list_shows_names_and_quotas_and_no_hash(keys):
    keys("add", "search", "--tokens-per-minute", "600000")
    keys("add", "chat", "--shared", "--weight", "2.5")
    keys("add", "batch", "--store-bytes", "4GiB")
    status, printed, _ = keys("list")
    assert status == 0 and all(one in printed for one in ("600,000", "shared", "2.5", f"{4 << 30:,}"))
    assert not any(entry.key_sha256[:8] in printed for entry in read_keys(keys.file).tenants)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("add",), "add needs a tenant's name"),
        (("add", "search"), "2 tenants have the same name: search"),
        (("add", "a b"), "tenants.0.name"),
        (("add", "other", "--pin-share", "0.9"), "pin_share"),
        (("add", "other", "--max-running", "0"), "max_running"),
        (("add", "other", "--weight", "nan"), "weight"),
        (("add", "other", "--store-bytes", "much"), "store_bytes: 'much' is not a size"),
        (("add", "default"), "the name default is that of serve.api_key"),
        (("remove", "nothing"), "has no tenant 'nothing'"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_the_file_as_it_was(keys, words, complaint):
    keys("add", "search")
    before = keys.file.read_text()
    status, printed, said = keys(*words)
    assert status == USAGE_ERROR and complaint in " ".join(said.split()) and printed == ""
    assert keys.file.read_text() == before


def test_a_file_that_is_not_there_is_made_by_add_alone(keys):
    assert keys("list")[0] == keys("remove", "x")[0] == USAGE_ERROR and not keys.file.exists()
