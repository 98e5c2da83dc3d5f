/* Products of bf16 by AMX tiles, for K a multiple of 32.
 *
 * A tile of B is 16 outputs at 16 pairs of k, 1 KiB in one piece; a strip of 32 outputs lies in one piece, too, so that it
 * stays in the first-level cache while rows pass by, which are loaded with a hint to leave it there. Every output is one
 * chain of tile products over k = 0, 32, ... in float32, whatever the rows beside it: a row's result depends on no other,
 * as in linear_tile.h. Longer strips go by blocks of inputs, with sums kept between them. Prefetches gained nothing
 * (bench/results/2026-11-27-cpu-batch.md).
 */
#ifndef KVRELAY_LINEAR_AMX_H
#define KVRELAY_LINEAR_AMX_H

#include "amx.h"
#include "linear_cut.h"
#include "linear_store.h"

#if HAS_TILES
#define TILE_BYTES 1024
#define STEP (2 * TILE_BYTES) /* of a strip for 32 inputs */
#define STRIPS 8              /* that meet a block of inputs while its rows and their sums are in the second-level cache */

typedef struct {
    const bf16 *x;
    long ldx;
    void *y;
    const char *w;
    const float *bias;
    long N, K;
} amx_job;

static inline const char *strip_at(const amx_job *j, long strip) { return j->w + strip * (j->K / 32) * STEP; }

/* Up to 16 rows times one panel. */
static inline void amx_narrow(const amx_job *j, long row, int rows, long panel)
{
    const bf16 *x = j->x + row * j->ldx;
    const char *w = strip_at(j, 2 * panel), *next = strip_at(j, 2 * panel + 1);
    float out[TILE_ROWS * NR];
    zero_sums();
    for (long k = 0; k < j->K; k += 32, w += STEP, next += STEP) {
        _tile_loadd(4, x + k, j->ldx * 2);
        MULTIPLY_FOUR(w, w + TILE_BYTES, next, next + TILE_BYTES, 64);
    }
    STORE_PAIR(0, 1, out, NR * 4);
    STORE_PAIR(2, 3, out + 32, NR * 4);
    store_tile(j->y, j->N, j->bias, 0, row, panel * NR, rows, NR, out);
}

/* 16 rows and up to 16 more times one strip's inputs begin .. end - 1. sums [32][32]: of the inputs before, and of these. */
static void amx_wide(const amx_job *j, long row, int rows, long strip, long begin, long end, float *sums)
{
    const bf16 *x = j->x + row * j->ldx, *below = x + TILE_ROWS * j->ldx;
    const char *w = strip_at(j, strip) + begin / 32 * STEP;
    if (begin == 0) {
        zero_sums();
    } else {
        LOAD_PAIR(0, 1, sums, 128);
        LOAD_PAIR(2, 3, sums + TILE_ROWS * 32, 128);
    }
    for (long k = begin; k < end; k += 32, w += STEP) {
        _tile_stream_loadd(4, x + k, j->ldx * 2);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + TILE_BYTES, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_stream_loadd(5, below + k, j->ldx * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    STORE_PAIR(0, 1, sums, 128);
    STORE_PAIR(2, 3, sums + TILE_ROWS * 32, 128);
    if (end == j->K) store_tile(j->y, j->N, j->bias, 0, row, strip * 32, rows, 32, sums);
}

static void amx_multiply(const amx_job *j, const linear_part *part)
{
    const long rows = part->end - part->begin, rest = rows % 32, even = part->end - rest;
    const long blocks = input_blocks(j->K), inputs = (j->K / blocks + 31) / 32 * 32;
    const long strips = blocks > 1 ? STRIPS : 1, apart = blocks > 1 ? 32 : 0, last = 2 * part->last;
    float *sums = thread_scratch((strips * rows + 32) * 32 * sizeof(float)); /* of one tile where there is one block */
    if (rows >= 32) configure_tiles(TILE_ROWS, TILE_ROWS);
    for (long first = 2 * part->first; first < last; first += strips)
        for (long begin = 0; begin < j->K; begin += inputs) {
            const long end = begin + inputs < j->K ? begin + inputs : j->K;
            for (long strip = first; strip < first + strips && strip < last; strip++)
                for (long row = part->begin; row < even; row += 32)
                    amx_wide(j, row, 32, strip, begin, end, sums + ((strip - first) * rows + row - part->begin) * apart);
        }
    if (rest > TILE_ROWS) {
        configure_tiles(TILE_ROWS, rest - TILE_ROWS);
        for (long strip = 2 * part->first; strip < 2 * part->last; strip++) amx_wide(j, even, rest, strip, 0, j->K, sums);
    } else if (rest) {
        configure_tiles(rest, 0);
        for (long panel = part->first; panel < part->last; panel++) amx_narrow(j, even, rest, panel);
    }
    _tile_release();
}

#undef STEP
#undef TILE_BYTES
#endif
#endif
