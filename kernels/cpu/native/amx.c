/* Asks the system for AMX tiles. */
#include "amx.h"
#if HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>

#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM of arch_prctl, for all threads of the process */
#define TILE_DATA 18              /* XFEATURE_XTILEDATA */
#endif

static int in_use;

int uses_tiles(void) { return in_use; }

/* Use tiles from now on, or no longer, in this process. Returns whether they are in use. */
int kr_use_tiles(int wanted)
{
#if HAS_TILES
    in_use = wanted && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#endif
    return in_use;
}
