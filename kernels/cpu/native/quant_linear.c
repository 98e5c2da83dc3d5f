/* y = x W^T + b with W in groups of 4- or 8-bit integers; quant.h describes their format.
 *
 * Sums are in float32. Every output is, group by group, one chain of fused multiply-adds over the group's inputs and
 * one or two more that scale it, for every M, tile and thread count: a row's result never depends on the rows beside it.
 * Few rows turn integers into floats in registers; many rows do it once for all, into a scratch panel. bf16 rows take
 * quant_dot.c's kernels where the processor has them.
 *
 * An integer is not shifted down to its value: i of a word stays q * 2^(bits i), and x was multiplied by 2^-(bits i)
 * before. Both are exact, and a mask and a conversion are all that is left to do for it.
 */
#pragma GCC optimize("no-tree-pre") /* else gcc keeps words and masks that it could reload, and spills the sums: 1.4 times as slow */
#include "experts.h"
#include "linear_store.h"
#include "quant_job.h"

#define FEW_TILES 3       /* of so many it is faster to turn integers into floats for each */
#define PLAIN_BYTES 16384 /* of integers turned into floats at once: half of a first-level cache */

#define OVER(bits) (1.0f / (1ll << (bits)))
#define UNITS4 1.0f, OVER(4), OVER(8), OVER(12), OVER(16), OVER(20), OVER(24), 1.0f
#define UNITS8 1.0f, OVER(8), OVER(16), 1.0f
static const float UNITS[2][16] = {{UNITS4, UNITS4}, {UNITS8, UNITS8, UNITS8, UNITS8}};

/* Integer i of each word, times 2^(bits i); the last one, whose top bit would be a sign, as it is. */
INLINE vf integers(vu words, int i, int bits)
{
    const uint32_t mask = (1u << bits) - 1;
    return __builtin_convertvector((vi)((i + 1) * bits == 32 ? words >> (32 - bits) : words & mask << i * bits), vf);
}

/* Kinds: 4 or 8 bits, or (0) floats in a scratch panel. */
#define TILE_TYPE quant_tile
#define TILE_FILE "quant_tile.h"
#define KIND 4
#include "tiles.h"
#define KIND 8
#include "tiles.h"
#define KIND 0
#define NARROW
#include "tiles.h"

/* `count` groups at w as floats, [count * group][NR]. */
static void unpack(const quant_job *j, const char *w, long count, float *out)
{
    for (long g = 0; g < count; g++, w += j->group_bytes) {
        const char *at = w + quant_scale_bytes(j->bits);
        __builtin_prefetch(at + j->group_bytes);
        for (long k = 0; k < j->group; k += 32 / j->bits, at += NR * 4, out += 32 / j->bits * NR)
            UNROLL for (int v = 0; v < NV; v++) {
                vu words = *(const vu_mem *)(at + v * VL * 4);
                if (j->bits == 4) UNROLL for (int i = 0; i < 8; i++) vstore(out + i * NR + v * VL, integers(words, i, 4));
                else UNROLL for (int i = 0; i < 4; i++) vstore(out + i * NR + v * VL, integers(words, i, 8));
            }
    }
}

/* Sums of units, [rows][width], to y. */
static void finish(const quant_job *j, long row, long panel, long rows, long width, float *acc)
{
    for (long i = 0; i < rows * width; i += VL) vstore(acc + i, vload(acc + i) * j->unit);
    store_tile(j->y, j->N, j->bias, j->wide, row, panel * NR, (int)rows, (int)width, acc);
}

/* Rows that fit one tile, against panels first..last. */
static void few_rows(const quant_job *j, long row, int rows, long first, long last)
{
    const long np = rows == 1 ? j->kernels->alone : side_by_side(rows);
    for (long panel = first; panel < last;) {
        const long taken = panel + np <= last ? np : 1;
        float acc[MR * NR] = {0};
        (taken == np ? j->kernels->wide : j->kernels->narrow)[rows](
            j, j->x + row * j->x_bytes, j->sums + row * j->groups, j->w + panel * j->panel_bytes, 0, j->groups, acc);
        finish(j, row, panel, rows, taken * NR, acc);
        panel += taken;
    }
}

/* The part's rows against one panel, whose integers become floats some groups at a time. */
static void many_rows(const quant_job *j, const linear_part *part, long panel)
{
    const long rows = part->end - part->begin, tiles = part_tiles(part), at_once = PLAIN_BYTES / (j->group * NR * 4) + 1;
    float *plain = thread_scratch((at_once * j->group + rows) * NR * sizeof(float));
    float *acc = plain + at_once * j->group * NR;
    for (long i = 0; i < rows * NR; i++) acc[i] = 0.0f;
    for (long g = 0; g < j->groups; g += at_once) {
        const long count = g + at_once < j->groups ? at_once : j->groups - g;
        const char *w = j->w + panel * j->panel_bytes + g * j->group_bytes;
        unpack(j, w, count, plain);
        for (long t = 0; t < tiles; t++) {
            const long top = tile_begin(part, t), bottom = tile_begin(part, t + 1);
            j->kernels->plain[bottom - top](j, j->x + top * j->x_bytes + g * j->group * sizeof(float),
                                            j->sums + top * j->groups + g, w, plain, count, acc + (top - part->begin) * NR);
        }
    }
    finish(j, part->begin, panel, rows, NR, acc);
}

static void multiply(const quant_job *j, const linear_part *part)
{
    const long tiles = part_tiles(part);
    if (tiles == 1) {
        few_rows(j, part->begin, (int)(part->end - part->begin), part->first, part->last);
        return;
    }
    for (long panel = part->first; panel < part->last; panel++) {
        if (j->kernels->plain && tiles > FEW_TILES) many_rows(j, part, panel);
        else
            for (long t = 0; t < tiles; t++) {
                const long top = tile_begin(part, t);
                few_rows(j, top, (int)(tile_begin(part, t + 1) - top), panel, panel + 1);
            }
    }
}

static void quant_task(void *arg, long index)
{
    const quant_job *j = arg;
    const linear_part part = cut_part(&j->cut, index);
    multiply(j, &part);
}

/* A row of x: as floats, zeros up to whole groups, sums of groups, and then in the units of the integers. */
static void prepare_row(const quant_job *j, long m)
{
    const float *units = UNITS[j->bits == 8];
    const long padded = j->groups * j->group;
    float *x = (float *)(j->x + m * j->x_bytes);
    widen_row(j->source, m * j->source_ldx, j->K, j->wide, x);
    for (long k = j->K; k < padded; k++) x[k] = 0.0f;
    for (long g = 0; g < j->groups; g++) {
        vf sum = {0};
        for (float *from = x + g * j->group; from < x + (g + 1) * j->group; from += VL) {
            vf value = vload(from);
            sum += value;
            vstore(from, value * vload(units + (from - x) % 8));
        }
        j->sums[m * j->groups + g] = vsum(sum);
    }
}

static const quant_kernels PLAIN[2] = {{wide_4, narrow_4, 4, prepare_row, sizeof(float), narrow_0},
                                       {wide_8, narrow_8, 4, prepare_row, sizeof(float), narrow_0}};

static const quant_kernels *kernels_for(int bits, int wide)
{
    return !wide && quant_dot_kernels(bits) ? quant_dot_kernels(bits) : &PLAIN[bits == 8];
}

static void prepare_task(void *arg, long index)
{
    const quant_job *j = arg;
    const long end = (index + 1) * 8 < j->M ? (index + 1) * 8 : j->M;
    for (long m = index * 8; m < end; m++) j->kernels->prepare(j, m);
}

/* The sizes of groups and panels, and x in the form that the tiles take. */
static void prepare(pool *p, quant_job *j)
{
    j->kernels = kernels_for(j->bits, j->wide);
    j->groups = (j->K + j->group - 1) / j->group;
    j->group_bytes = quant_group_bytes(j->bits, j->group);
    j->panel_bytes = j->groups * j->group_bytes;
    j->x_bytes = j->groups * j->group * j->kernels->input_bytes;
    j->x = pool_scratch(p, 0, j->M * (j->x_bytes + j->groups * sizeof(float)));
    j->sums = (float *)(j->x + j->M * j->x_bytes);
    pool_run(p, prepare_task, j, (j->M + 7) / 8);
}

/* x [M, K] with row stride ldx, y [M, N] contiguous: floats if `wide`, else bf16. bias: N floats or NULL. w, `group`
 * (a multiple of 32) and `unit`: see quant.h. */
void kr_quant_linear(pool *p, int bits, int wide, const void *x, long ldx, void *y, const void *w, const float *bias,
                     long M, long N, long K, long group, float unit)
{
    if (M < 1 || N < 1 || K < 1) return;
    quant_job j = {.bits = bits, .wide = wide, .source = x, .source_ldx = ldx, .y = y, .w = w, .bias = bias, .M = M,
                   .N = N, .K = K, .group = group, .unit = unit, .cut = cut_linear(p, M, N, K)};
    prepare(p, &j);
    pool_run(p, quant_task, &j, cut_tasks(&j.cut));
}

typedef struct {
    quant_job job;
    const void *const *weights;
    const float *units;
    const expert_part *parts;
} grouped_job;

static void grouped_task(void *arg, long index)
{
    const grouped_job *g = arg;
    const expert_part *part = g->parts + index;
    quant_job j = g->job;
    j.w = g->weights[part->expert];
    j.unit = g->units[part->expert];
    multiply(&j, &part->part);
}

void quant_grouped(pool *p, int bits, int wide, const void *x, void *y, const void *const *weights, const float *units,
                   const expert_part *parts, long num_parts, long M, long N, long K, long group)
{
    grouped_job g = {{.bits = bits, .wide = wide, .source = x, .source_ldx = K, .y = y, .M = M, .N = N, .K = K,
                      .group = group}, weights, units, parts};
    prepare(p, &g.job);
    pool_run(p, grouped_task, &g, num_parts);
}
