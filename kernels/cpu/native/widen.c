/* bf16 to float32, for logits: torch's own conversion wakes the threads of OpenMP, a second pool on the same cores. */
#include "pool.h"
#include "vec.h"

#define CHUNK 16384 /* numbers per task: 96 KiB read and written; small work runs on the caller alone */

typedef struct {
    const bf16 *x;
    float *out;
    long count;
} widen_job;

static void widen_task(void *arg, long index)
{
    const widen_job *j = arg;
    long i = index * CHUNK, end = i + CHUNK < j->count ? i + CHUNK : j->count;
    widen_row(j->x, i, end - i, 0, j->out + i);
}

/* out[count] = x[count], exactly. */
void kr_widen(pool *p, const void *x, float *out, long count)
{
    widen_job j = {x, out, count};
    pool_run(p, widen_task, &j, (count + CHUNK - 1) / CHUNK);
}
