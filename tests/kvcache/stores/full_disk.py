"""A real disk that becomes full and one that is read-only. Runs as root of a mount namespace: `unshare -rm python
full_disk.py`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from kvrelay.errors import StoreError
from kvrelay.kvcache.stores.disk.tier import DiskOptions, DiskStore
from kvrelay.kvcache.stores.namespace import Namespace
from tests.kvcache.stores.store_contract import BLOCK_BYTES, assert_right, chain, check, fetch, keep


def mount(path, size):
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)], capture_output=True)
    if done.returncode:
        print(done.stderr.decode())
        sys.exit(77)


def open_store(path, now, *, limit_bytes=4 << 20, segment_bytes=128 << 10):
    options, clock = DiskOptions(is_admission_on=False, segment_bytes=segment_bytes), lambda: now[0]
    store = DiskStore(path, limit_bytes, BLOCK_BYTES, Namespace.of({"model": "m"}), options=options, clock=clock)
    store.start()
    return store


def main(path):
    mount(path, "1m")
    now = [0.0]
    filler = path / "filler"
    filler.write_bytes(bytes(512 << 10))
    store = open_store(path / "kv", now)
    kept = sum(sum(keep(store, *chain(8, salt=str(number)))) for number in range(40))
    stats = store.stats()
    assert kept == 320, kept  # goes on in the room that it got
    assert 16 <= stats.num_blocks <= 42, stats  # half of 1 MiB, less what is not whole segments
    assert stats.failures >= 1
    assert assert_right(chain(8, salt="39")[0], fetch(store, chain(8, salt="39")[0])) == 8
    check(store)
    filler.write_bytes(bytes(256 << 10))
    small = open_store(path / "small", now, limit_bytes=1 << 30, segment_bytes=None)  # 128 MiB, were there room
    assert sum(keep(small, *chain(8))) == 8, small.stats()
    small.close()
    shutil.rmtree(path / "small")
    filler.unlink()
    now[0] = 61.0
    for number in range(40):
        keep(store, *chain(8, salt=str(number)))
    assert store.stats().num_blocks > stats.num_blocks  # uses the room that came free
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", "none", str(path)], check=True)
    try:
        open_store(path / "kv", now)
    except StoreError as error:
        assert "not writable" in str(error) and "set cache.disk_path" in str(error), error
    else:
        raise AssertionError("a read-only folder was opened")
    os.write(1, b"held\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
