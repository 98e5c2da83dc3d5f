/* y = x W^T + b with W packed into panels of NR outputs.
 *
 * Every output is one chain of fused multiply-adds over k = 0, 1, ... in float32, for every M, tile and
 * thread count: a row's result never depends on the rows beside it (kind DOT: over k in pairs).
 *
 * Panel layouts, all [N / NR][K][...]:
 *   F32  NR floats.
 *   BF16 NR/2 words of 32 bits: lane i of vector pair j holds outputs of vectors 2j (low half) and 2j+1
 *        (high half), so that a shift and a mask widen them without a shuffle.
 *   DOT  (AVX512-BF16, K even) per pair of k, NR words: output n's weights at k (low) and k+1 (high).
 */
#include <string.h>
#include "linear_store.h"
#include "pool.h"
#if defined(__AVX512BF16__) && VL == 16
#include <immintrin.h>
#define HAS_DOT 1
#else
#define HAS_DOT 0
#endif

#define F32 0
#define BF16 1
#define DOT 2

typedef struct {
    int kind;
    const void *x;    /* F32, BF16: floats; DOT: bf16 */
    long ldx;
    void *y;
    const char *w;
    const float *bias;
    long M, N, K;
    long panels, panel_bytes, group, groups, rows_per_block;
} linear_job;

long kr_panel_width(void) { return NR; }
int kr_has_dot(void) { return HAS_DOT; }

INLINE void load_weights(const char *w, vf out[NV], int kind)
{
    if (kind == F32) {
        UNROLL for (int v = 0; v < NV; v++) out[v] = vload((const float *)w + v * VL);
        return;
    }
    UNROLL for (int v = 0; v < NV; v += 2) {
        vu pair = *(const vu_mem *)((const uint32_t *)w + v / 2 * VL);
        out[v] = (vf)(pair << 16);
        out[v + 1] = (vf)(pair & 0xffff0000u);
    }
}

#define KIND F32
#include "linear_kind.h"
#define KIND BF16
#include "linear_kind.h"
#if HAS_DOT
#define KIND DOT
#include "linear_kind.h"
#endif

static long step(const linear_job *j, long row, long panel, long end, int rows)
{
    if (j->kind == F32) return step_0(j, row, panel, end, rows);
#if HAS_DOT
    if (j->kind == DOT) return step_2(j, row, panel, end, rows);
#endif
    return step_1(j, row, panel, end, rows);
}

/* One block of rows times one group of panels; rows are cut into tiles of nearly equal height. */
static void linear_task(void *arg, long index)
{
    const linear_job *j = arg;
    long first = index % j->groups * j->group, last = first + j->group;
    if (last > j->panels) last = j->panels;
    long begin = index / j->groups * j->rows_per_block, end = begin + j->rows_per_block;
    if (end > j->M) end = j->M;
    long tiles = (end - begin + MR - 1) / MR;
    for (long panel = first; panel < last;) {
        long done = 1;
        for (long t = 0; t < tiles; t++) {
            long top = begin + (end - begin) * t / tiles, bottom = begin + (end - begin) * (t + 1) / tiles;
            done = step(j, top, panel, tiles == 1 ? last : panel + 1, (int)(bottom - top));
        }
        panel += done;
    }
}

typedef struct {
    const bf16 *x;
    float *out;
    long ldx, M, K;
} widen_job;

static void widen_task(void *arg, long index)
{
    const widen_job *j = arg;
    long end = (index + 1) * 32 < j->M ? (index + 1) * 32 : j->M;
    for (long m = index * 32; m < end; m++) {
        long k = 0;
        for (; k + VL <= j->K; k += VL) vstore(j->out + m * j->K + k, vload_bf16(j->x + m * j->ldx + k));
        for (; k < j->K; k++) j->out[m * j->K + k] = to_float(j->x[m * j->ldx + k]);
    }
}

/* x [M, K] with row stride ldx, y [M, N] contiguous; both bf16 unless kind is F32. bias: N floats or NULL. */
void kr_linear(pool *p, int kind, const void *x, long ldx, void *y, const void *w, const float *bias, long M, long N,
               long K)
{
    if (M < 1 || N < 1 || K < 1) return;
    linear_job j = {.kind = kind, .x = x, .ldx = ldx, .y = y, .w = w, .bias = bias, .M = M, .N = N, .K = K};
    if (kind == BF16) {
        widen_job widen = {x, pool_scratch(p, 0, M * K * 4), ldx, M, K};
        pool_run(p, widen_task, &widen, (M + 31) / 32);
        j.x = widen.out;
        j.ldx = K;
    }
    j.panels = (N + NR - 1) / NR;
    j.panel_bytes = K * NR * (kind == F32 ? 4 : 2);
    j.rows_per_block = rows_per_block(M, K);
    long blocks = (M + j.rows_per_block - 1) / j.rows_per_block;
    long wanted = 8L * pool_threads(p); /* tasks of one block: enough to balance two uneven threads */
    j.group = pool_threads(p) == 1 ? j.panels : (j.panels + wanted - 1) / wanted;
    j.group = (j.group + 3) / 4 * 4;
    j.groups = (j.panels + j.group - 1) / j.group;
    pool_run(p, linear_task, &j, j.groups * blocks);
}

typedef struct {
    int kind;
    const void *source;
    void *target;
    long N, K;
} pack_job;

static void pack_task(void *arg, long panel)
{
    const pack_job *j = arg;
    const bf16 *half = j->source;
    const float *full = j->source;
    for (long i = 0; i < NR; i++) {
        long n = panel * NR + i, v = i / VL, lane = i % VL;
        for (long k = 0; k < j->K; k++) {
            long at = n < j->N ? n * j->K + k : -1;
            if (j->kind == F32) ((float *)j->target)[(panel * j->K + k) * NR + i] = at < 0 ? 0.0f : full[at];
            else if (j->kind == BF16)
                ((bf16 *)j->target)[(panel * j->K + k) * NR + (v / 2 * VL + lane) * 2 + v % 2] = at < 0 ? 0 : half[at];
            else ((bf16 *)j->target)[(panel * j->K / 2 + k / 2) * NR * 2 + i * 2 + k % 2] = at < 0 ? 0 : half[at];
        }
    }
}

/* Re-order weight [N, K] (contiguous; float32 for F32, else bf16) into panels; N is padded with zeros to NR. */
void kr_pack(pool *p, int kind, const void *source, void *target, long N, long K)
{
    pack_job j = {kind, source, target, N, K};
    pool_run(p, pack_task, &j, (N + NR - 1) / NR);
}
