/* A tile of attention in products of bf16 pairs (AVX512-BF16), summed in float32: what bf16 queries over a bf16 cache take.
 *
 * Keys lie with pairs of dimensions as words, a tile's tokens side by side; values with pairs of tokens as words, dimensions
 * side by side. Scores are summed over dimensions and values over tokens, each number in one chain, and the softmax is in
 * powers of two. Probabilities are rounded to bf16 before they meet the values, their sum is taken before that. Rows go
 * DOT_ROWS at a time, so that their scores stay in the first-level cache, and only through what one of them sees: what
 * is left out has probability 0 and would add 0.
 *
 * Source: FlashAttention-2 (Dao 2023), which rounds probabilities likewise.
 */
#ifndef KVRELAY_ATTENTION_DOT_H
#define KVRELAY_ATTENTION_DOT_H

#include "vec.h"

#if HAS_DOT
#include "attention_tile.h"

#define DOT_ROWS 6
#define FOLD_ROWS 8 /* rows of one softmax at most */
#define SLACK 8.0f   /* a row's best is raised by no less, so that its sums are seldom scaled: probabilities reach 2 to that */
#define LOG2E 1.44269504088896341f
#define LEAST_EXPONENT (-200.0f) /* 2 to that is 0 in float32 */

/* Sixteen rows of sixteen words, transposed. */
INLINE void transpose16(__m512i a[16])
{
    __m512i b[16];
    UNROLL for (int r = 0; r < 16; r += 2) {
        b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
    }
    UNROLL for (int r = 0; r < 16; r += 4) {
        UNROLL for (int i = 0; i < 2; i++) {
            a[r + 2 * i] = _mm512_unpacklo_epi64(b[r + i], b[r + i + 2]);
            a[r + 2 * i + 1] = _mm512_unpackhi_epi64(b[r + i], b[r + i + 2]);
        }
    }
    UNROLL for (int h = 0; h < 16; h += 8) {
        UNROLL for (int i = 0; i < 4; i++) {
            b[h + i] = _mm512_shuffle_i32x4(a[h + i], a[h + i + 4], 0x88);
            b[h + i + 4] = _mm512_shuffle_i32x4(a[h + i], a[h + i + 4], 0xdd);
        }
    }
    UNROLL for (int i = 0; i < 8; i++) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
        a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
    }
}

/* Which of 32 numbers lie before `end`, from i on. */
INLINE __mmask32 before(long i, long end)
{
    return end - i >= 32 ? 0xffffffffu : (__mmask32)((1u << (end - i)) - 1);
}

/* Where keys of context tokens base .. base + n - 1 lie; repeats of the last fill up to a multiple of 16. Values lie
 * the returned number of bytes behind. */
INLINE long find_rows(const tile_state *s, long base, long n, const char *key[TILE])
{
    const attention_job *j = s->j;
    const long bytes = 2 * j->dim, row = j->kv_heads * bytes;
    const char *heads = j->kv + s->kv_head * bytes;
    long block = base / j->block_size, offset = base % j->block_size;
    for (long t = 0; t < n; block++, offset = 0) {
        const char *at = heads + s->table[block] * j->block_bytes + offset * row;
        for (; offset < j->block_size && t < n; offset++, t++, at += row) key[t] = at;
    }
    for (long t = n; t % VL; t++) key[t] = key[n - 1];
    return (j->num_parts - 1) * j->block_size * row;
}

/* Keys and values of context tokens base .. base + n - 1 as words of pairs; missing dimensions and tokens are 0. */
static void gather_dot(tile_state *s, long base, long n)
{
    const long dim = s->j->dim, padded = s->j->padded;
    const char *key[TILE];
    const long to_value = find_rows(s, base, n, key);
    uint32_t *keys = (uint32_t *)s->keys, *values = (uint32_t *)s->values;
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                         36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (long d = 0; d < dim; d += 32) {
        const __mmask32 mask = before(d, dim);
        for (long t = 0; t < n; t += VL) {
            __m512i a[16];
            UNROLL for (int r = 0; r < 16; r++) a[r] = _mm512_maskz_loadu_epi16(mask, key[t + r] + 2 * d);
            transpose16(a);
            UNROLL for (int r = 0; r < 16; r++) _mm512_storeu_si512(keys + (d / 2 + r) * TILE + t, a[r]);
        }
        for (long t = 0; t < n; t += 2) {
            const __m512i a = _mm512_maskz_loadu_epi16(mask, key[t] + to_value + 2 * d);
            const __m512i b = _mm512_maskz_loadu_epi16(t + 1 < n ? mask : 0, key[t + 1] + to_value + 2 * d);
            uint32_t *to = values + t / 2 * padded + d;
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, low, b));
            _mm512_storeu_si512(to + VL, _mm512_permutex2var_epi16(a, high, b));
        }
    }
}

#define DEFINE_DOT(ROWS, WIDTH)                                                                                       \
    /* out[r][...] = out[r] * carry[r] + sum over pairs k of a[r][k] * b[k][...], WIDTH vectors */                    \
    static void dot_##ROWS##x##WIDTH(const uint32_t *a, long lda, const uint32_t *b, long ldb, float *out, long ldo, \
                                     long pairs, const float *carry)                                                  \
    {                                                                                                                 \
        __m512 acc[ROWS][WIDTH];                                                                                      \
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < WIDTH; v++)                                  \
            acc[r][v] = carry ? (__m512)(vload(out + r * ldo + v * VL) * carry[r]) : _mm512_setzero_ps();             \
        for (long k = 0; k < pairs; k++) {                                                                            \
            __m512i w[WIDTH];                                                                                         \
            UNROLL for (int v = 0; v < WIDTH; v++) w[v] = _mm512_loadu_si512(b + k * ldb + v * VL);                   \
            UNROLL for (int r = 0; r < ROWS; r++) {                                                                   \
                const __m512i x = _mm512_set1_epi32(a[r * lda + k]);                                                  \
                UNROLL for (int v = 0; v < WIDTH; v++)                                                                \
                    acc[r][v] = _mm512_dpbf16_ps(acc[r][v], (__m512bh)x, (__m512bh)w[v]);                             \
            }                                                                                                         \
        }                                                                                                             \
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < WIDTH; v++)                                  \
            vstore(out + r * ldo + v * VL, (vf)acc[r][v]);                                                            \
    }
DEFINE_DOT(1, 2)
DEFINE_DOT(2, 2)
DEFINE_DOT(3, 2)
DEFINE_DOT(4, 2)
DEFINE_DOT(5, 2)
DEFINE_DOT(6, 2)
DEFINE_DOT(1, 4)
DEFINE_DOT(2, 4)
DEFINE_DOT(3, 4)
DEFINE_DOT(4, 4)
DEFINE_DOT(5, 4)
DEFINE_DOT(6, 4)
typedef void (*dot_product)(const uint32_t *, long, const uint32_t *, long, float *, long, long, const float *);

/* out [rows][columns] (+)= a [rows][pairs] b [pairs][columns], up to DOT_ROWS rows; columns in multiples of NC. */
INLINE void dots(const uint32_t *a, long lda, const uint32_t *b, long ldb, float *out, long ldo, long rows, long columns,
                 long pairs, const float *carry)
{
    static const dot_product narrow[] = {dot_1x2, dot_2x2, dot_3x2, dot_4x2, dot_5x2, dot_6x2};
    static const dot_product wide[] = {dot_1x4, dot_2x4, dot_3x4, dot_4x4, dot_5x4, dot_6x4};
    long c = 0;
    for (; c + 2 * NC <= columns; c += 2 * NC) wide[rows - 1](a, lda, b + c, ldb, out + c, ldo, pairs, carry);
    if (c < columns) narrow[rows - 1](a, lda, b + c, ldb, out + c, ldo, pairs, carry);
}

/* 2^x by a minimax polynomial on [-1/2, 1/2]; relative error 2e-7. */
INLINE __m512 exp2_fine(__m512 x)
{
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(1.326472731e-3f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.671512991e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.550733581e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.402224243e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.931470037e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

/* The same by one on [0, 1] with a relative error of 7.5e-5, a fiftieth of what rounding to bf16 costs. 0 of minus infinity. */
INLINE __m512 exp2_coarse(__m512 x)
{
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(7.802452e-2f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.2606716e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9583354e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.9992522e-1f));
    return _mm512_scalef_ps(p, x);
}

/* Which of a tile's tokens the row at `position` sees. */
INLINE uint64_t seen_of(long position, long base, long window)
{
    const long end = position + 1 - base, begin = window > 0 ? end - window : 0;
    if (end <= 0 || begin >= TILE) return 0;
    return (end >= TILE ? ~0ull : (1ull << end) - 1) & (begin <= 0 ? ~0ull : ~0ull << begin);
}

#define FOLD(name, op)                                                                                                \
    /* Eight vectors -> the result of `op` over each, in elements 0..7; every one by the same tree. */                        \
    INLINE __m512 name(const __m512 v[8])                                                                             \
    {                                                                                                                 \
        __m512 a[4], b[2];                                                                                            \
        UNROLL for (int i = 0; i < 4; i++)                                                                            \
            a[i] = op(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));        \
        UNROLL for (int i = 0; i < 2; i++) {                                                                          \
            const __m512d x = (__m512d)a[2 * i], y = (__m512d)a[2 * i + 1];                                           \
            b[i] = op((__m512)_mm512_unpacklo_pd(x, y), (__m512)_mm512_unpackhi_pd(x, y));                            \
        }                                                                                                             \
        const __m512 c = op(_mm512_shuffle_f32x4(b[0], b[1], 0x44), _mm512_shuffle_f32x4(b[0], b[1], 0xee));          \
        const __m512 d = op(c, _mm512_shuffle_f32x4(c, c, 0xb1));                                                     \
        return _mm512_shuffle_f32x4(d, d, 0x08);                                                                      \
    }
FOLD(fold_max, _mm512_max_ps)
FOLD(fold_sum, _mm512_add_ps)

/* Scores capped, as powers of two. */
static void cap(const attention_job *j, float *scores, long count)
{
    for (long i = 0; i < count; i += VL)
        vstore(scores + i, j->softcap * LOG2E * vtanh(vload(scores + i) * (j->scale / j->softcap)));
}

/* Scores of `rows` rows over a tile -> probabilities by their partition's best so far, in bf16, and factors for older sums.
 * seen: tokens that each row sees; `all`: whether that is every one. */
INLINE void softmax_dots(const tile_state *s, long row, long rows, const uint64_t *seen, const int all, const float *scores,
                         uint32_t *probabilities, float *factors)
{
    const attention_job *j = s->j;
    const __m512 scale = _mm512_set1_ps(j->softcap > 0 ? 1.0f : j->scale * LOG2E), nothing = _mm512_set1_ps(-INFINITY);
    const __mmask16 valid = (__mmask16)((1u << rows) - 1);
    __mmask16 sees = valid;
    __m512 fold[8];
    float best[VL];
    UNROLL for (int r = 0; r < 8; r++) fold[r] = nothing;
    UNROLL for (int r = 0; r < FOLD_ROWS; r++) {
        if (r >= rows) break;
        __m512 x[4];
        UNROLL for (int i = 0; i < 4; i++) x[i] = _mm512_loadu_ps(scores + r * TILE + i * VL);
        if (!all) {
            UNROLL for (int i = 0; i < 4; i++) x[i] = _mm512_mask_blend_ps((__mmask16)(seen[r] >> i * VL), nothing, x[i]);
            if (seen[r] == 0) sees &= (__mmask16)~(1u << r);
        }
        fold[r] = _mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3]));
    }
    const __m512 old = _mm512_mask_loadu_ps(nothing, valid, s->part_best + row), now = _mm512_mul_ps(fold_max(fold), scale);
    const __mmask16 rises = _mm512_cmp_ps_mask(now, _mm512_add_ps(old, _mm512_set1_ps(SLACK)), _CMP_GT_OQ);
    const __m512 top = _mm512_mask_mov_ps(old, rises, now);
    _mm512_storeu_ps(best, top);
    UNROLL for (int r = 0; r < FOLD_ROWS; r++) {
        if (r >= rows) break;
        const __m512 minus = _mm512_set1_ps(-best[r]);
        __m512 x[4];
        UNROLL for (int i = 0; i < 4; i++)
            x[i] = exp2_coarse(_mm512_fmadd_ps(_mm512_loadu_ps(scores + r * TILE + i * VL), scale, minus));
        if (!all)
            UNROLL for (int i = 0; i < 4; i++) x[i] = _mm512_maskz_mov_ps((__mmask16)(seen[r] >> i * VL), x[i]);
        fold[r] = _mm512_add_ps(_mm512_add_ps(x[0], x[1]), _mm512_add_ps(x[2], x[3]));
        UNROLL for (int i = 0; i < 4; i += 2)
            _mm512_storeu_si512(probabilities + r * TILE / 2 + i * VL / 2, (__m512i)_mm512_cvtne2ps_pbh(x[i + 1], x[i]));
    }
    const __m512 drop = _mm512_max_ps(_mm512_set1_ps(LEAST_EXPONENT), _mm512_sub_ps(old, top));
    const __m512 factor = _mm512_mask_blend_ps(sees, _mm512_set1_ps(1.0f), exp2_fine(drop));
    const __m512 total = _mm512_maskz_loadu_ps(valid, s->part_total + row);
    _mm512_storeu_ps(factors, factor);
    _mm512_mask_storeu_ps(s->part_best + row, valid, top);
    _mm512_mask_storeu_ps(s->part_total + row, valid, _mm512_fmadd_ps(total, factor, fold_sum(fold)));
}

/* A gathered tile of context for `rows` rows from `row` on, DOT_ROWS at most. */
static void attend_dot_rows(tile_state *s, long row, long rows, long base)
{
    const attention_job *j = s->j;
    const long padded = j->padded;
    float scores[DOT_ROWS * TILE], factors[VL];
    uint32_t probabilities[DOT_ROWS * TILE / 2];
    uint64_t seen[DOT_ROWS], any = 0, all = ~0ull;
    for (long r = 0; r < rows; r++) {
        seen[r] = seen_of(s->position[(row + r) / j->group], base, j->window);
        any |= seen[r], all &= seen[r];
    }
    if (any == 0) return;
    const long end = TILE - __builtin_clzll(any);
    dots((const uint32_t *)s->q + row * padded / 2, padded / 2, (const uint32_t *)s->keys, TILE, scores, TILE, rows,
         (end + NC - 1) / NC * NC, (j->dim + 1) / 2, NULL);
    if (j->softcap > 0) cap(j, scores, rows * TILE);
    if (all == ~0ull) softmax_dots(s, row, rows, seen, 1, scores, probabilities, factors);
    else softmax_dots(s, row, rows, seen, 0, scores, probabilities, factors);
    dots(probabilities, TILE / 2, (const uint32_t *)s->values, padded, s->part + row * padded, padded, rows, padded,
         (end + 1) / 2, factors);
}

/* A gathered tile of context for `rows` rows from `row` on. */
static void attend_dots(tile_state *s, long row, long rows, long base)
{
    const long count = (rows + DOT_ROWS - 1) / DOT_ROWS;
    for (long t = 0; t < count; t++) {
        const long top = rows * t / count;
        attend_dot_rows(s, row + top, rows * (t + 1) / count - top, base);
    }
}

#endif
#endif
