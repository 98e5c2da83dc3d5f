/* Copies equally long runs of bytes between two buffers. Called without the interpreter's lock. */

#include <stdint.h>
#include <string.h>

void copy_runs(char *target, const char *source, const int64_t *target_offsets, const int64_t *source_offsets,
               int64_t num_runs, int64_t run_bytes)
{
    for (int64_t i = 0; i < num_runs; i++)
        memcpy(target + target_offsets[i], source + source_offsets[i], (size_t)run_bytes);
}
