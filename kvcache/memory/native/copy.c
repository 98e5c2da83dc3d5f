/* Copies of blocks between a pool and a slab, with or without XXH3 hashes. Called without the GIL. */

#include "xxh3.h"
#include <string.h>

#define FAR (4 << 20) /* bytes: larger copies bypass the caches */

void copy_runs(char *target, const char *source, const int64_t *target_offsets, const int64_t *source_offsets,
               int64_t num_runs, int64_t run_bytes)
{
    if (num_runs * run_bytes >= FAR && run_bytes >= XXH3_BLOCK) {
        kt_copy_pieces((uint8_t *)target, (const uint8_t *)source, target_offsets, source_offsets, num_runs, run_bytes);
        return;
    }
    for (int64_t i = 0; i < num_runs; i++)
        memcpy(target + target_offsets[i], source + source_offsets[i], (size_t)run_bytes);
}

/* XXH3-64 of each run of more than 240 bytes. */
void hash_runs(const char *base, const int64_t *offsets, int64_t num_runs, int64_t run_bytes, uint64_t *hashes)
{
    for (int64_t i = 0; i < num_runs; i++) {
        const uint8_t *after = (const uint8_t *)base + offsets[i + 1 < num_runs ? i + 1 : i];
        hashes[i] = kt_xxh3_long((const uint8_t *)base + offsets[i], run_bytes, after);
    }
}

/* copy_runs of more than 240 bytes, and the XXH3-64 of each. */
void copy_hashed(char *target, const char *source, const int64_t *target_offsets, const int64_t *source_offsets,
                 int64_t num_runs, int64_t run_bytes, uint64_t *hashes)
{
    for (int64_t i = 0; i < num_runs; i++) {
        const uint8_t *from = (const uint8_t *)source, *after = from + source_offsets[i + 1 < num_runs ? i + 1 : i];
        hashes[i] = kt_xxh3_copy((uint8_t *)target + target_offsets[i], from + source_offsets[i], run_bytes, after);
    }
}
