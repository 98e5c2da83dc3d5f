/* The parts of a tile of attention: the rows, KV laid out for them, products, softmax. See attention.c. */
#ifndef KVRELAY_ATTENTION_TILE_H
#define KVRELAY_ATTENTION_TILE_H

#include <string.h>
#include "cascade.h"
#include "kv.h"
#include "vec.h"

#define ROWS_WANTED 144
#define MOST_TOKENS ROWS_WANTED /* of one task */
#define ROWS_BOUND 32 /* up to here a tile is bound by memory */
#define NEAR_BYTES (512 << 10) /* of a sequence's KV that stay in a core's cache while its heads take turns */
#define NC (2 * VL) /* columns of one product */

typedef struct {
    const void *q;
    void *out;
    const char *kv;
    const int32_t *query_starts, *context_lens, *tables, *tiles;
    float *parts; /* [tiles * kv_heads][max_parts][part_floats] when context is split over threads */
    long max_parts, part_floats, max_blocks, num_tiles;
    long heads, kv_heads, dim, padded, block_size, q_stride, q_head, group, tile_tokens, window;
    long num_parts; /* of a block: 2, keys and values, or 1, entries that are both (latent attention) */
    long block_bytes; /* from one block to the next: other layers lie between */
    float scale, softcap;
    int wide, kv_kind, dot, amx; /* dot: products of bf16 pairs, see attention_dot.h; amx: the same by tiles */
    int by_sequence; /* threads take whole sequences, one head after the other, but for the first and last of each */
    cascade shared;    /* what decode rows read together */
    float *slots;      /* [members][kv_heads][slot_floats]: sums of the tiles that were read for several rows at once */
    long slot_floats;
} attention_job;

/* The rows of one task and their running sums. */
typedef struct {
    const attention_job *j;
    const int32_t *table;
    long kv_head, sequence, rows, kv_begin, kv_end;
    long token[MOST_TOKENS], position[MOST_TOKENS]; /* whose rows these are: in the step, in its context */
    float *q, *keys, *values, *scores; /* [rows][padded], [padded][TILE], [TILE][padded], [rows][TILE] */
    float *out, *part, *best, *total, *part_best, *part_total;
    float key_scale[TILE], value_scale[TILE]; /* of the tile's vectors, with fp8 */
} tile_state;

typedef float v8_mem __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8_mem __attribute__((vector_size(16), aligned(2), may_alias));
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (i8){__VA_ARGS__})
#endif

INLINE v8 load8(const char *p, long i, int kind)
{
    if (kind == KV_F32) return *(const v8_mem *)((const float *)p + i);
    if (kind == KV_FP8) return E4M3_TO_FLOAT(v8, widen8(p + i));
    return (v8)(__builtin_convertvector(*(const h8_mem *)((const bf16 *)p + i), u8) << 16);
}

/* Eight rows of eight words, transposed. */
INLINE void transpose8(v8 a[8])
{
    v8 b[8], c[8];
    UNROLL for (int r = 0; r < 8; r += 2) {
        b[r] = SHUFFLE(a[r], a[r + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        b[r + 1] = SHUFFLE(a[r], a[r + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    UNROLL for (int h = 0; h < 8; h += 4) {
        UNROLL for (int r = 0; r < 2; r++) {
            c[h + 2 * r] = SHUFFLE(b[h + r], b[h + r + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            c[h + 2 * r + 1] = SHUFFLE(b[h + r], b[h + r + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    }
    UNROLL for (int r = 0; r < 4; r++) {
        a[r] = SHUFFLE(c[r], c[r + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        a[r + 4] = SHUFFLE(c[r], c[r + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* Numbers i..i+7 of eight rows -> columns of `out` (row stride TILE). */
INLINE void columns8(const char *const row[8], long i, float *out, int kind)
{
    v8 a[8];
    UNROLL for (int r = 0; r < 8; r++) a[r] = load8(row[r], i, kind);
    transpose8(a);
    UNROLL for (int r = 0; r < 8; r++) *(v8_mem *)(out + r * TILE) = a[r];
}

/* Numbers i..i+15 of eight rows of bf16: pairs are transposed as one word, and widened then. */
INLINE void columns16(const char *const row[8], long i, float *out)
{
    v8 a[8];
    UNROLL for (int r = 0; r < 8; r++) a[r] = *(const v8_mem *)((const bf16 *)row[r] + i);
    transpose8(a);
    UNROLL for (int r = 0; r < 8; r++) {
        *(v8_mem *)(out + 2 * r * TILE) = (v8)((u8)a[r] << 16);
        *(v8_mem *)(out + (2 * r + 1) * TILE) = (v8)((u8)a[r] & 0xffff0000u);
    }
}

/* Keys (transposed) and values of context tokens base .. base + n - 1, widened, fp8 without their scales; rows of keys are 8-padded by repeats. */
INLINE void gather_as(tile_state *s, long base, long n, const int kind)
{
    const attention_job *j = s->j;
    const long bytes = kv_row_bytes(j->dim, kind), row = j->kv_heads * bytes;
    const long to_value = (j->num_parts - 1) * j->block_size * row;
    const char *key[TILE];
    const char *heads = j->kv + s->kv_head * bytes;
    long block = base / j->block_size, offset = base % j->block_size;
    for (long t = 0; t < n; block++, offset = 0) {
        const char *at = heads + s->table[block] * j->block_bytes + offset * row;
        for (; offset < j->block_size && t < n; offset++, t++, at += row) key[t] = at;
    }
    for (long t = n; t % 8; t++) key[t] = key[n - 1];
    if (kind == KV_FP8)
        for (long t = 0; t < n; t++)
            s->key_scale[t] = kv_scale(key[t], j->dim), s->value_scale[t] = kv_scale(key[t] + to_value, j->dim);
    for (long t = 0; t < n; t += 8) {
        long d = 0;
        if (kind == KV_BF16)
            for (; d + 16 <= j->dim; d += 16) columns16(key + t, d, s->keys + d * TILE + t);
        for (; d + 8 <= j->dim; d += 8) columns8(key + t, d, s->keys + d * TILE + t, kind);
        for (; d < j->dim; d++)
            for (int r = 0; r < 8; r++) s->keys[d * TILE + t + r] = kv_load_one(key[t + r], d, kind);
    }
    for (long t = 0; t < n; t++) {
        const char *value = key[t] + to_value;
        long d = 0;
        for (; d + VL <= j->dim; d += VL) vstore(s->values + t * j->padded + d, kv_load(value, d, kind));
        for (; d < j->dim; d++) s->values[t * j->padded + d] = kv_load_one(value, d, kind);
    }
}

static void gather(tile_state *s, long base, long n)
{
    switch (s->j->kv_kind) {
    case KV_F32: gather_as(s, base, n, KV_F32); break;
    case KV_FP8: gather_as(s, base, n, KV_FP8); break;
    default: gather_as(s, base, n, KV_BF16);
    }
}

/* Read one byte of every line of a later tile, so that its memory accesses overlap: one head's rows lie too far apart
 * for the processor to guess, and prefetch instructions were measured to do nothing here (17.6 -> 12.0 ms for 47 MB).
 * Where the thread takes all heads of a sequence, the first reads the others' rows as well, which lie between its own:
 * one run of memory in place of three (5.8 -> 4.7 ms for 141 MB). */
static void touch(const tile_state *s, long base, long n)
{
    const attention_job *j = s->j;
    const long bytes = kv_row_bytes(j->dim, j->kv_kind), row = j->kv_heads * bytes;
    const long wanted = j->by_sequence && s->kv_head == 0 && j->num_parts * row * s->kv_end <= NEAR_BYTES ? row : bytes;
    const long to_value = (j->num_parts - 1) * j->block_size * row;
    const char *heads = j->kv + s->kv_head * bytes;
    long block = base / j->block_size, offset = base % j->block_size;
    for (long t = 0; t < n; block++, offset = 0) {
        const char *at = heads + s->table[block] * j->block_bytes + offset * row;
        for (; offset < j->block_size && t < n; offset++, t++, at += row)
            for (long b = 0; b < wanted; b += 64) {
                (void)*(const volatile char *)(at + b);
                (void)*(const volatile char *)(at + to_value + b);
            }
    }
}

#define DEFINE_PRODUCT(ROWS, WIDTH)                                                                                   \
    /* out[r][...] = out[r] * carry[r] + sum over k of a[r][k] * b[k][...], WIDTH vectors; one chain per number */     \
    static void product_##ROWS##x##WIDTH(const float *a, long lda, const float *b, long ldb, float *out, long ldo,    \
                                         long K, const float *carry)                                                  \
    {                                                                                                                 \
        vf acc[ROWS][WIDTH];                                                                                          \
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < WIDTH; v++)                                  \
            acc[r][v] = carry ? vload(out + r * ldo + v * VL) * carry[r] : (vf){0};                                   \
        for (long k = 0; k < K; k++) {                                                                                \
            vf w[WIDTH];                                                                                              \
            UNROLL for (int v = 0; v < WIDTH; v++) w[v] = vload(b + k * ldb + v * VL);                                \
            UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < WIDTH; v++)                              \
                acc[r][v] += a[r * lda + k] * w[v];                                                                   \
        }                                                                                                             \
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < WIDTH; v++)                                  \
            vstore(out + r * ldo + v * VL, acc[r][v]);                                                                \
    }
DEFINE_PRODUCT(1, 2)
DEFINE_PRODUCT(2, 2)
DEFINE_PRODUCT(3, 2)
DEFINE_PRODUCT(4, 2)
DEFINE_PRODUCT(5, 2)
DEFINE_PRODUCT(6, 2)
DEFINE_PRODUCT(1, 4)
DEFINE_PRODUCT(2, 4)
DEFINE_PRODUCT(3, 4)
typedef void (*product_tile)(const float *, long, const float *, long, float *, long, long, const float *);

/* out [rows][columns] (+)= a [rows][K] b [K][columns]; columns in multiples of NC. Few rows take wider columns. */
static void product(const float *a, long lda, const float *b, long ldb, float *out, long ldo, long rows, long columns,
                    long K, const float *carry)
{
    static const product_tile narrow[] = {product_1x2, product_2x2, product_3x2, product_4x2, product_5x2, product_6x2};
    static const product_tile wide[] = {product_1x4, product_2x4, product_3x4};
    const long count = (rows + MR - 1) / MR;
    for (long c = 0, step; c < columns; c += step) {
        const product_tile *tiles = rows <= 3 && c + 2 * NC <= columns ? wide : narrow;
        step = tiles == wide ? 2 * NC : NC;
        for (long t = 0; t < count; t++) {
            long top = rows * t / count, high = rows * (t + 1) / count - top;
            tiles[high - 1](a + top * lda, lda, b + c, ldb, out + top * ldo + c, ldo, K, carry ? carry + top : NULL);
        }
    }
}

INLINE vi lane_ids(void)
{
    vi ids;
    for (int i = 0; i < VL; i++) ids[i] = i;
    return ids;
}

/* Mask, cap and exponentiate one row of scores over context base .. base+TILE; returns the factor for older sums. */
static float softmax_row(const tile_state *s, long row, long base, float *scores)
{
    const attention_job *j = s->j;
    const long position = s->position[row / j->group];
    const long low = j->window > 0 ? position - j->window + 1 - base : -1, high = position + 1 - base;
    vf top = vset(-INFINITY);
    for (int i = 0; i < TILE; i += VL) {
        vf x = vload(scores + i);
        if (j->kv_kind == KV_FP8) x *= vload(s->key_scale + i);
        if (j->softcap > 0) x = j->softcap * vtanh(x / j->softcap);
        vi at = lane_ids() + i;
        if (high < TILE) x = vselect(at < (int32_t)(high < 0 ? 0 : high), x, vset(-INFINITY));
        if (low > 0) x = vselect(at >= (int32_t)(low > TILE ? TILE : low), x, vset(-INFINITY));
        vstore(scores + i, x);
        top = vmax(top, x);
    }
    float best = vmaximum(top), old = s->part_best[row];
    if (best == -INFINITY) {
        memset(scores, 0, TILE * sizeof *scores);
        return 1.0f;
    }
    best = best > old ? best : old;
    vf sum = {0};
    for (int i = 0; i < TILE; i += VL) {
        vf e = vexp(vload(scores + i) - best);
        vstore(scores + i, j->kv_kind == KV_FP8 ? e * vload(s->value_scale + i) : e);
        sum += e;
    }
    float factor = old == -INFINITY ? 0.0f : expf(old - best);
    s->part_best[row] = best;
    s->part_total[row] = s->part_total[row] * factor + vsum(sum);
    return factor;
}

/* A tile of n tokens of context, as gathered, for `rows` rows from `row` on. */
static void attend_floats(tile_state *s, long row, long rows, long base, long n)
{
    const long padded = s->j->padded;
    float carry[rows], *scores = s->scores + row * TILE;
    product(s->q + row * padded, padded, s->keys, TILE, scores, TILE, rows, (n + NC - 1) / NC * NC, s->j->dim, NULL);
    for (long r = 0; r < rows; r++) carry[r] = softmax_row(s, row + r, base, scores + r * TILE);
    product(scores, TILE, s->values, padded, s->part + row * padded, padded, rows, padded, n, carry);
}

/* The sums of a partition before its first tile. */
static void start_part(tile_state *s)
{
    memset(s->part, 0, s->rows * s->j->padded * sizeof(float));
    for (long r = 0; r < s->rows; r++) s->part_best[r] = -INFINITY, s->part_total[r] = 0;
}

#endif
