/* Products of bf16 by AMX tiles, for the panels of kind DOT and K a multiple of 32.
 *
 * A tile of B is 16 outputs at 16 pairs of k, read where the panels lie. Every output is one chain of tile products over
 * k = 0, 32, ... in float32, whatever the rows beside it: a row's result depends on no other, as in linear_tile.h.
 * Prefetches and blocks of inputs gained nothing (bench/results/2026-11-27-cpu-batch.md).
 */
#ifndef KVRELAY_LINEAR_AMX_H
#define KVRELAY_LINEAR_AMX_H

#include "amx.h"
#include "linear_cut.h"
#include "linear_store.h"

#if HAS_TILES
#define STEP (NR * 64) /* bytes of a panel for 32 inputs */

typedef struct {
    const bf16 *x;
    long ldx;
    void *y;
    const char *w;
    const float *bias;
    long N, K;
} amx_job;

/* Up to 16 rows times one panel. */
static inline void amx_narrow(const amx_job *j, long row, int rows, long panel)
{
    const bf16 *x = j->x + row * j->ldx;
    const char *w = j->w + panel * (j->K / 32) * STEP;
    float out[TILE_ROWS * NR];
    zero_sums();
    for (long k = 0; k < j->K; k += 32, w += STEP) {
        _tile_loadd(4, x + k, j->ldx * 2);
        MULTIPLY_FOUR(w, NR * 4);
    }
    STORE_PAIR(0, 1, out, NR * 4);
    STORE_PAIR(2, 3, out + 32, NR * 4);
    store_tile(j->y, j->N, j->bias, 0, row, panel * NR, rows, NR, out);
}

/* 16 rows and up to 16 more times one half of a panel. */
static inline void amx_wide(const amx_job *j, long row, int rows, long panel, int half)
{
    const bf16 *x = j->x + row * j->ldx, *below = x + TILE_ROWS * j->ldx;
    const char *w = j->w + panel * (j->K / 32) * STEP + half * 128;
    float out[2 * TILE_ROWS * 32];
    zero_sums();
    for (long k = 0; k < j->K; k += 32, w += STEP) {
        _tile_loadd(4, x + k, j->ldx * 2);
        _tile_loadd(6, w, NR * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 64, NR * 4);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, below + k, j->ldx * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    STORE_PAIR(0, 1, out, 128);
    STORE_PAIR(2, 3, out + TILE_ROWS * 32, 128);
    store_tile(j->y, j->N, j->bias, 0, row, panel * NR + half * 32, rows, 32, out);
}

static void amx_multiply(const amx_job *j, const linear_part *part)
{
    const long rows = part->end - part->begin, rest = rows % 32, even = part->end - rest;
    if (rows >= 32) {
        configure_tiles(TILE_ROWS, TILE_ROWS);
        for (long panel = part->first; panel < part->last; panel++)
            for (int half = 0; half < 2; half++)
                for (long row = part->begin; row < even; row += 32) amx_wide(j, row, 32, panel, half);
    }
    if (rest > TILE_ROWS) {
        configure_tiles(TILE_ROWS, rest - TILE_ROWS);
        for (long panel = part->first; panel < part->last; panel++)
            for (int half = 0; half < 2; half++) amx_wide(j, even, rest, panel, half);
    } else if (rest) {
        configure_tiles(rest, 0);
        for (long panel = part->first; panel < part->last; panel++) amx_narrow(j, even, rest, panel);
    }
    _tile_release();
}

#undef STEP
#endif
#endif
