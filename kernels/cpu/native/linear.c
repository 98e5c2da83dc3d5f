/* y = x W^T + b with W packed into panels of NR outputs.
 *
 * Every output is one chain of fused multiply-adds over k = 0, 1, ... in float32, for every M, tile and
 * thread count: a row's result never depends on the rows beside it (kind DOT: over k in pairs).
 *
 * Panel layouts, all but AMX [N / NR][K][...]:
 *   F32  NR floats.
 *   BF16 NR/2 words of 32 bits: element i of vector pair j holds outputs of vectors 2j (low half) and 2j+1
 *        (high half), so that a shift and a mask widen them without a shuffle.
 *   DOT  (AVX512-BF16, K even) per pair of k, NR words: output n's weights at k (low) and k+1 (high).
 *   AMX  (K a multiple of 32) [N / 32][K / 32][2] tiles of 16 outputs, each as DOT; the products are linear_amx.h's.
 */
#include <string.h>
#include "experts.h"
#include "linear_amx.h"

#define F32 0
#define BF16 1
#define DOT 2
#define AMX 3
/* Bytes of each panel that are prefetched before their use where rows are few: of several panels side by side, and of one. */
#define AHEAD_WIDE 1024
#define AHEAD 2048
#define INPUTS 1536 /* of a block: several tiles' rows by more of them fall out of a first-level cache */

typedef struct {
    int kind;
    const void *x; /* F32, BF16: floats; DOT: bf16 */
    long ldx;
    void *y;
    const char *w;
    const float *bias;
    long N, K, panel_bytes;
    long begin, end, top; /* inputs of this pass; row that `carry` begins with */
    float *carry;         /* [rows of the part][NR] sums up to `begin` */
    linear_cut cut;
} linear_job;

typedef void (*linear_tile)(const linear_job *, long row, long panel, long ahead);

long kr_panel_width(void) { return NR; }
int kr_has_dot(void) { return HAS_DOT; }

INLINE void load_weights(const char *w, vf out[NV], int kind)
{
    if (kind != BF16) { /* DOT: pairs, used as they are */
        UNROLL for (int v = 0; v < NV; v++) out[v] = vload((const float *)w + v * VL);
        return;
    }
    UNROLL for (int v = 0; v < NV; v += 2) {
        vu pair = *(const vu_mem *)((const uint32_t *)w + v / 2 * VL);
        out[v] = (vf)(pair << 16);
        out[v + 1] = (vf)(pair & 0xffff0000u);
    }
}

/* A float, or a pair of bf16, in every element. */
INLINE vf load_input(const char *x)
{
    uint32_t bits;
    memcpy(&bits, x, 4);
    return (vf)((vu){0} + bits);
}

INLINE vf multiply_add(vf sum, vf a, vf b, int kind)
{
#if HAS_DOT
    if (kind == DOT) return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
    return sum + a * b;
}

#define TILE_TYPE linear_tile
#define TILE_FILE "linear_tile.h"
#define KIND F32
#include "tiles.h"
#define KIND BF16
#include "tiles.h"
#if HAS_DOT
#define KIND DOT
#include "tiles.h"
#endif

static const linear_tile *narrow_tiles(int kind)
{
#if HAS_DOT
    if (kind == DOT) return narrow_2;
#endif
    return kind == F32 ? narrow_0 : narrow_1;
}

static const linear_tile *wide_tiles(int kind)
{
#if HAS_DOT
    if (kind == DOT) return wide_2;
#endif
    return kind == F32 ? wide_0 : wide_1;
}

/* The same sums, over blocks of inputs: those of a tile's rows stay in the first-level cache then. */
static void multiply_by_blocks(const linear_job *whole, const linear_part *part)
{
    float carry[MOST_ROWS * NR];
    linear_job j = *whole;
    const long blocks = (j.K + INPUTS - 1) / INPUTS, most = (j.K / blocks + 31) / 32 * 32, tiles = part_tiles(part);
    j.carry = carry, j.top = part->begin;
    for (long panel = part->first; panel < part->last; panel++)
        for (j.begin = 0; j.begin < j.K; j.begin = j.end) {
            j.end = j.begin + most < j.K ? j.begin + most : j.K;
            for (long t = 0; t < tiles; t++) {
                const long top = tile_begin(part, t), high = tile_begin(part, t + 1) - top;
                narrow_tiles(j.kind)[high](&j, top, panel, most * (j.panel_bytes / j.K));
            }
        }
}

static void multiply(const linear_job *j, const linear_part *part)
{
#if HAS_TILES
    if (j->kind == AMX) {
        const amx_job tiles = {j->x, j->ldx, j->y, j->w, j->bias, j->N, j->K};
        amx_multiply(&tiles, part);
        return;
    }
#endif
    const long tiles = part_tiles(part), rows = part->end - part->begin, np = tiles == 1 ? side_by_side(rows) : 1;
    const linear_tile *narrow = narrow_tiles(j->kind);
    long panel = part->first;
    for (; tiles == 1 && panel + np <= part->last; panel += np) wide_tiles(j->kind)[rows](j, part->begin, panel, AHEAD_WIDE);
    if (tiles > 1 && j->K > INPUTS) {
        multiply_by_blocks(j, part);
        return;
    }
    for (; panel < part->last; panel++)
        for (long t = 0; t < tiles; t++) {
            const long top = tile_begin(part, t), bottom = tile_begin(part, t + 1);
            narrow[bottom - top](j, top, panel, tiles == 1 ? AHEAD : j->panel_bytes);
        }
}

static void linear_task(void *arg, long index)
{
    const linear_job *j = arg;
    const linear_part part = cut_part(&j->cut, index);
    multiply(j, &part);
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
    for (long m = index * 32; m < end; m++) widen_row(j->x, m * j->ldx, j->K, 0, j->out + m * j->K);
}

/* x [M, K] in the form that the tiles take. */
static void prepare(pool *p, linear_job *j, long M)
{
    if (j->kind != BF16) return;
    widen_job widen = {j->x, pool_scratch(p, 0, M * j->K * 4), j->ldx, M, j->K};
    pool_run(p, widen_task, &widen, (M + 31) / 32);
    j->x = widen.out;
    j->ldx = j->K;
}

/* x [M, K] with row stride ldx, y [M, N] contiguous; both bf16 unless kind is F32. bias: N floats or NULL. */
void kr_linear(pool *p, int kind, const void *x, long ldx, void *y, const void *w, const float *bias, long M, long N,
               long K)
{
    if (M < 1 || N < 1 || K < 1) return;
    linear_job j = {.kind = kind, .x = x, .ldx = ldx, .y = y, .w = w, .bias = bias, .N = N, .K = K,
                    .panel_bytes = K * NR * (kind == F32 ? 4 : 2), .end = K,
                    .cut = kind == AMX ? cut_tiles(p, M, N, K) : cut_linear(p, M, N, K < INPUTS ? K : INPUTS)};
    prepare(p, &j, M);
    pool_run(p, linear_task, &j, cut_tasks(&j.cut));
}

typedef struct {
    linear_job job;
    const void *const *weights;
    const expert_part *parts;
} grouped_job;

static void grouped_task(void *arg, long index)
{
    const grouped_job *g = arg;
    linear_job j = g->job;
    j.w = g->weights[g->parts[index].expert];
    multiply(&j, &g->parts[index].part);
}

void linear_grouped(pool *p, int kind, const void *x, void *y, const void *const *weights, const expert_part *parts,
                    long num_parts, long M, long N, long K)
{
    grouped_job g = {{.kind = kind, .x = x, .ldx = K, .y = y, .N = N, .K = K, .end = K,
                      .panel_bytes = K * NR * (kind == F32 ? 4 : 2)}, weights, parts};
    prepare(p, &g.job, M);
    pool_run(p, grouped_task, &g, num_parts);
}

typedef struct {
    int kind;
    const void *source;
    void *target;
    long N, K;
} pack_job;

/* The pair of weights of output n that holds input k. */
static long pair_at(const pack_job *j, long n, long k)
{
    if (j->kind == DOT) return (n / NR * (j->K / 2) + k / 2) * NR + n % NR;
    return ((n / 32 * (j->K / 32) + k / 32) * 2 + n % 32 / 16) * 256 + k % 32 / 2 * 16 + n % 16;
}

static void pack_task(void *arg, long panel)
{
    const pack_job *j = arg;
    const bf16 *half = j->source;
    const float *full = j->source;
    for (long i = 0; i < NR; i++) {
        long n = panel * NR + i, v = i / VL, element = i % VL;
        for (long k = 0; k < j->K; k++) {
            long at = n < j->N ? n * j->K + k : -1;
            if (j->kind == F32) ((float *)j->target)[(panel * j->K + k) * NR + i] = at < 0 ? 0.0f : full[at];
            else if (j->kind == BF16)
                ((bf16 *)j->target)[(panel * j->K + k) * NR + (v / 2 * VL + element) * 2 + v % 2] = at < 0 ? 0 : half[at];
            else ((bf16 *)j->target)[pair_at(j, n, k) * 2 + k % 2] = at < 0 ? 0 : half[at];
        }
    }
}

/* Re-order weight [N, K] (contiguous; float32 for F32, else bf16) into panels; N is padded with zeros to NR. */
void kr_pack(pool *p, int kind, const void *source, void *target, long N, long K)
{
    pack_job j = {kind, source, target, N, K};
    pool_run(p, pack_task, &j, (N + NR - 1) / NR);
}
