"""A process that stores blocks until it is killed: `python disk_writer.py <folder> <first number>`.

Prints a line after each batch. Its store holds few blocks, so that rows are written over and over.
"""

import sys

from kvrelay.kvcache.stores.disk.tier import DiskOptions, DiskStore
from kvrelay.kvcache.stores.namespace import Namespace
from tests.kvcache.stores.store_contract import chain, keep

NAMESPACE = Namespace.of({"model": "written by a process that is killed"})
BLOCK_BYTES = 8192
LIMIT_BYTES = 40 * 3 * 4096
OPTIONS = DiskOptions(is_admission_on=False, segment_bytes=8 * 3 * 4096)


def prompt(number):
    return chain(8, salt=f"prompt {number}")


def main():
    store = DiskStore(sys.argv[1], LIMIT_BYTES, BLOCK_BYTES, NAMESPACE, options=OPTIONS)
    store.start()
    number = int(sys.argv[2])
    while True:
        hashes, metas = prompt(number)
        if number % 5 == 4:
            store.delete(prompt(number - 2)[0])
        assert keep(store, hashes, metas) == [True] * 8
        print(number, flush=True)
        number += 1


if __name__ == "__main__":
    main()
