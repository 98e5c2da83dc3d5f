"""Steps of the wall clock that the Python code of one process sees; its monotonic clock goes on.

Only what Python itself asks for is shifted, by a library that is preloaded: libfaketime also shifts what native code
asks for, whose waits until a time (absl's, in Ray) the kernel would then measure by another clock, for up to an hour.
"""

import os
import shutil
import struct
import subprocess
from pathlib import Path

CLOCK = "KVRELAY_CHAOS_CLOCK"  # variable of the processes: a file of two integers, the process and the seconds to add
_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static int (*real)(clockid_t, struct timespec *);
static const volatile int64_t *step;
static uintptr_t python, low, high; /* a function of Python's, and the code around it */

static int look(struct dl_phdr_info *object, size_t size, void *unused) {
    for (int i = 0; i < object->dlpi_phnum; i++) {
        uintptr_t start = object->dlpi_addr + object->dlpi_phdr[i].p_vaddr, end = start + object->dlpi_phdr[i].p_memsz;
        if (object->dlpi_phdr[i].p_type == PT_LOAD && start <= python && python < end) low = start, high = end;
    }
    return 0;
}

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("KVRELAY_CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *map = mmap(NULL, 2 * sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (map == MAP_FAILED || !(python = (uintptr_t)dlsym(RTLD_DEFAULT, "Py_GetVersion"))) return;
    dl_iterate_phdr(look, NULL);
    step = map;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    uintptr_t caller = (uintptr_t)__builtin_return_address(0);
    if (step && clock == CLOCK_REALTIME && low <= caller && caller < high)
        if (step[0] == getpid()) now->tv_sec += step[1];
    return status;
}
"""


def clock_library(folder: Path) -> Path | None:
    """The library to preload, built there; None: there is no C compiler."""
    compiler = shutil.which("cc")
    source, library = folder / "clock.c", folder / "clock.so"
    if compiler is None:
        return None
    source.write_text(_SOURCE)
    command = [compiler, "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    return library if subprocess.run(command, capture_output=True).returncode == 0 else None


def open_clock(path: Path) -> int:
    """A descriptor of the file, made where there is none; its processes see the right time. Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    set_clock(file)
    return file


def set_clock(file: int, pid: int = 0, step_s: int = 0) -> None:
    """Shift the clock of this process, which was started with this file, at once; and all others' back."""
    os.pwrite(file, struct.pack("qq", pid, step_s), 0)
