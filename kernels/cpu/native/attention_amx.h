/* A tile of attention by AMX tiles: the layouts, the softmax and the roundings of attention_dot.h, 16 rows at a time.
 *
 * A number of the result is its old sum times a factor, plus the tile's own sum over pairs of 32 tokens each: that depends
 * on no other row. Tokens that no row sees have probability 0 and values that are numbers (gather_dot's, or 0).
 */
#ifndef KVRELAY_ATTENTION_AMX_H
#define KVRELAY_ATTENTION_AMX_H

#include "amx.h"
#include "attention_dot.h"

#if HAS_TILES

/* Values of tokens n to the next multiple of 32 are 0: tiles read them. */
static void fill_values(tile_state *s, long n)
{
    const long padded = s->j->padded, first = (n + 1) / 2, last = (n + 31) / 32 * 16;
    memset((uint32_t *)s->values + first * padded, 0, (last - first) * padded * sizeof(uint32_t));
}

/* Scores of one block of rows over a tile, [16][TILE]. */
INLINE void amx_scores(const tile_state *s, long row, float *scores)
{
    const long padded = s->j->padded;
    const bf16 *q = (const bf16 *)s->q + row * padded;
    zero_sums();
    for (long d = 0; d < padded; d += 32) {
        _tile_loadd(4, q + d, padded * 2);
        const uint32_t *keys = (const uint32_t *)s->keys + d / 2 * TILE;
        MULTIPLY_FOUR(keys, keys + 16, keys + 32, keys + 48, TILE * 4);
    }
    STORE_PAIR(0, 1, scores, TILE * 4);
    STORE_PAIR(2, 3, scores + 32, TILE * 4);
}

/* The block's sums = sums times factors + probabilities [16][TILE] times the values of the tile's first `end` tokens. */
INLINE void amx_values(const tile_state *s, long row, long rows, long end, const uint32_t *probabilities, const float *factors)
{
    const long padded = s->j->padded;
    float added[TILE_ROWS * 32];
    for (long c = 0; c < padded; c += 32) {
        _tile_zero(0);
        _tile_zero(1);
        for (long t = 0; t < end; t += 32) {
            const uint32_t *values = (const uint32_t *)s->values + t / 2 * padded + c;
            _tile_loadd(4, probabilities + t / 2, TILE * 2);
            _tile_loadd(5, values, padded * 4);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, values + 16, padded * 4);
            _tile_dpbf16ps(1, 4, 6);
        }
        STORE_PAIR(0, 1, added, 128);
        for (long r = 0; r < rows; r++) {
            float *to = s->part + (row + r) * padded + c;
            vstore(to, vload(to) * factors[r] + vload(added + r * 32));
            vstore(to + VL, vload(to + VL) * factors[r] + vload(added + r * 32 + VL));
        }
    }
}

/* A gathered tile of context for `rows` rows from `row` on, 16 at most. */
static void attend_amx_rows(tile_state *s, long row, long rows, long base)
{
    const attention_job *j = s->j;
    float scores[TILE_ROWS * TILE], factors[2 * VL];
    uint32_t probabilities[TILE_ROWS * TILE / 2];
    uint64_t seen[TILE_ROWS], any = 0, all = ~0ull;
    for (long r = 0; r < rows; r++) {
        seen[r] = seen_of(s->position[(row + r) / j->group], base, j->window);
        any |= seen[r], all &= seen[r];
    }
    if (any == 0) return;
    amx_scores(s, row, scores);
    if (j->softcap > 0) cap(j, scores, rows * TILE);
    for (long r = 0; r < rows; r += DOT_ROWS) {
        const long high = rows - r < DOT_ROWS ? rows - r : DOT_ROWS;
        float *of = scores + r * TILE;
        uint32_t *to = probabilities + r * TILE / 2;
        if (all == ~0ull) softmax_dots(s, row + r, high, seen + r, 1, of, to, factors + r);
        else softmax_dots(s, row + r, high, seen + r, 0, of, to, factors + r);
    }
    amx_values(s, row, rows, TILE - __builtin_clzll(any), probabilities, factors);
}

/* A gathered tile of context for `rows` rows from `row` on. */
static void attend_amx(tile_state *s, long row, long rows, long base)
{
    const long rest = rows % TILE_ROWS, even = rows - rest;
    if (even) {
        configure_tiles(TILE_ROWS, 0);
        for (long r = 0; r < even; r += TILE_ROWS) attend_amx_rows(s, row + r, TILE_ROWS, base);
    }
    if (rest) {
        configure_tiles(rest, 0);
        attend_amx_rows(s, row + even, rest, base);
    }
    _tile_release();
}

#endif
#endif
