/* A tile of attention by AMX tiles: the layouts, the softmax and the roundings of attention_dot.h, 16 rows at a time.
 *
 * A number of the result is one chain over pairs of tokens in order, scaled where its row's best rises: that depends on no
 * other row. Tokens that no row sees have probability 0 and values that are numbers (gather_dot's, or 0).
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

/* Tiles 0 to 3: scores of one block of rows over a tile, [16][TILE]. */
INLINE void multiply_keys(const tile_state *s, long row)
{
    const long padded = s->j->padded;
    const bf16 *q = (const bf16 *)s->q + row * padded;
    zero_sums();
    for (long d = 0; d < padded; d += 32) {
        _tile_loadd(4, q + d, padded * 2);
        const uint32_t *keys = (const uint32_t *)s->keys + d / 2 * TILE;
        MULTIPLY_FOUR(keys, keys + 16, keys + 32, keys + 48, TILE * 4);
    }
}

INLINE void store_scores(float *scores)
{
    STORE_PAIR(0, 1, scores, TILE * 4);
    STORE_PAIR(2, 3, scores + 32, TILE * 4);
}

/* The block's sums = sums times factors, then + probabilities [16][TILE] times the values of the tile's first `end` tokens. */
INLINE void add_values(const tile_state *s, long row, long rows, long end, const uint32_t *probabilities, const float *factors)
{
    const long padded = s->j->padded;
    const __mmask16 valid = (__mmask16)((1u << rows) - 1);
    unsigned scaled = _mm512_mask_cmp_ps_mask(valid, _mm512_loadu_ps(factors), _mm512_set1_ps(1.0f), _CMP_NEQ_UQ);
    for (; scaled; scaled &= scaled - 1) {
        const long r = __builtin_ctz(scaled);
        float *part = s->part + (row + r) * padded;
        for (long c = 0; c < padded; c += VL) vstore(part + c, vload(part + c) * factors[r]);
    }
    written();
    long c = 0;
    for (; c + 64 <= padded; c += 64) {
        float *to = s->part + row * padded + c;
        LOAD_PAIR(0, 1, to, padded * 4);
        LOAD_PAIR(2, 3, to + 32, padded * 4);
        for (long t = 0; t < end; t += 32) {
            const uint32_t *values = (const uint32_t *)s->values + t / 2 * padded + c;
            _tile_loadd(4, probabilities + t / 2, TILE * 2);
            MULTIPLY_FOUR(values, values + 16, values + 32, values + 48, padded * 4);
        }
        STORE_PAIR(0, 1, to, padded * 4);
        STORE_PAIR(2, 3, to + 32, padded * 4);
    }
    if (c < padded) {
        float *to = s->part + row * padded + c;
        LOAD_PAIR(0, 1, to, padded * 4);
        for (long t = 0; t < end; t += 32) {
            const uint32_t *values = (const uint32_t *)s->values + t / 2 * padded + c;
            _tile_loadd(4, probabilities + t / 2, TILE * 2);
            _tile_loadd(5, values, padded * 4);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, values + 16, padded * 4);
            _tile_dpbf16ps(1, 4, 6);
        }
        STORE_PAIR(0, 1, to, padded * 4);
    }
}

/* Probabilities of one block of rows; returns how many of the tile's tokens any of them sees. */
INLINE long amx_softmax(const tile_state *s, long row, long rows, long base, float *scores, uint32_t *probabilities,
                        float *factors)
{
    const attention_job *j = s->j;
    uint64_t seen[TILE_ROWS], any = ~0ull, all = ~0ull;
    if (rows < TILE_ROWS || j->window > 0 || s->position[row / j->group] < base + TILE - 1) { /* else all rows see all of it */
        any = 0;
        for (long r = 0; r < rows; r++) {
            seen[r] = seen_of(s->position[(row + r) / j->group], base, j->window);
            any |= seen[r], all &= seen[r];
        }
    }
    if (any == 0) return 0;
    if (j->softcap > 0) cap(j, scores, rows * TILE);
    for (long r = 0; r < rows; r += FOLD_ROWS) {
        float *of = scores + r * TILE;
        uint32_t *to = probabilities + r * TILE / 2;
        if (all == ~0ull && rows == TILE_ROWS) softmax_dots(s, row + r, FOLD_ROWS, seen + r, 1, of, to, factors + r);
        else softmax_dots(s, row + r, rows - r < FOLD_ROWS ? rows - r : FOLD_ROWS, seen + r, 0, of, to, factors + r);
    }
    return TILE - __builtin_clzll(any);
}

/* `count` blocks of `rows` rows each from `row` on: the next block's scores are computed beside this one's softmax. */
static void attend_blocks(tile_state *s, long row, long rows, long count, long base)
{
    float scores[2][TILE_ROWS * TILE] __attribute__((aligned(64))), factors[2 * VL];
    uint32_t probabilities[TILE_ROWS * TILE / 2] __attribute__((aligned(64)));
    written();
    multiply_keys(s, row);
    store_scores(scores[0]);
    for (long b = 0; b < count; b++, row += rows) {
        if (b + 1 < count) multiply_keys(s, row + rows);
        const long end = amx_softmax(s, row, rows, base, scores[b % 2], probabilities, factors);
        if (b + 1 < count) store_scores(scores[(b + 1) % 2]);
        if (end) add_values(s, row, rows, end, probabilities, factors);
    }
}

/* A gathered tile of context for `rows` rows from `row` on. */
static void attend_amx(tile_state *s, long row, long rows, long base)
{
    const long rest = rows % TILE_ROWS, even = rows - rest;
    if (even) {
        configure_tiles(TILE_ROWS, 0);
        attend_blocks(s, row, TILE_ROWS, even / TILE_ROWS, base);
    }
    if (rest) {
        configure_tiles(rest, 0);
        attend_blocks(s, row + even, rest, 1, base);
    }
    _tile_release();
}

#endif
#endif
