/* Causal attention over KV blocks read in place, for decode rows and prompt chunks alike.
 *
 * A task is one tile of a sequence's tokens times one KV head; its rows are the tile's tokens times the query
 * heads that share the KV head, so each key and value is loaded once for all of them. Context is walked in TILE
 * tokens with an online softmax inside partitions of PART tokens, and partitions are merged in order. Tile and
 * partition borders are absolute positions, so a row's result depends on nothing but its own query and context:
 * decode equals prefill, chunked equals whole, alone equals batched, split over threads equals not, bit for bit.
 *
 * Source: FlashAttention-2 (Dao 2023), Flash-Decoding (Dao et al. 2023), PagedAttention (Kwon et al. 2023).
 */
#include <string.h>
#include "kv.h"
#include "pool.h"
#include "vec.h"

#define TILE 64
#define PART 512
#define ROWS_WANTED 48
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
    float scale, softcap;
    int wide, kv_kind;
} attention_job;

/* The rows of one task and their running sums. */
typedef struct {
    const attention_job *j;
    const int32_t *table;
    long kv_head, first_position, tokens, rows, kv_begin, kv_end;
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

/* Eight rows of eight numbers -> columns of `out` (row stride TILE). */
INLINE void transpose8(const char *const row[8], long i, float *out, int kind)
{
    v8 a[8], b[8], c[8];
    UNROLL for (int r = 0; r < 8; r++) a[r] = load8(row[r], i, kind);
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
        *(v8_mem *)(out + r * TILE) = SHUFFLE(c[r], c[r + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        *(v8_mem *)(out + (r + 4) * TILE) = SHUFFLE(c[r], c[r + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* Keys (transposed) and values of context tokens base .. base + n - 1, widened, fp8 without their scales; rows of keys are 8-padded by repeats. */
INLINE void gather_as(tile_state *s, long base, long n, const int kind)
{
    const attention_job *j = s->j;
    const long bytes = kv_row_bytes(j->dim, kind), row = j->kv_heads * bytes, part = j->block_size * row;
    const long whole = j->num_parts * part, to_value = whole - part;
    const char *key[TILE];
    const char *heads = j->kv + s->kv_head * bytes;
    long block = base / j->block_size, offset = base % j->block_size;
    for (long t = 0; t < n; block++, offset = 0) {
        const char *at = heads + s->table[block] * whole + offset * row;
        for (; offset < j->block_size && t < n; offset++, t++, at += row) key[t] = at;
    }
    for (long t = n; t % 8; t++) key[t] = key[n - 1];
    if (kind == KV_FP8)
        for (long t = 0; t < n; t++)
            s->key_scale[t] = kv_scale(key[t], j->dim), s->value_scale[t] = kv_scale(key[t] + to_value, j->dim);
    for (long t = 0; t < n; t += 8) {
        long d = 0;
        for (; d + 8 <= j->dim; d += 8) transpose8(key + t, d, s->keys + d * TILE + t, kind);
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
 * for the processor to guess, and prefetch instructions were measured to do nothing here (17.6 -> 12.0 ms for 47 MB). */
static void touch(const tile_state *s, long base, long n)
{
    const attention_job *j = s->j;
    const long bytes = kv_row_bytes(j->dim, j->kv_kind), row = j->kv_heads * bytes, part = j->block_size * row;
    const long whole = j->num_parts * part, to_value = whole - part;
    const char *heads = j->kv + s->kv_head * bytes;
    long block = base / j->block_size, offset = base % j->block_size;
    for (long t = 0; t < n; block++, offset = 0) {
        const char *at = heads + s->table[block] * whole + offset * row;
        for (; offset < j->block_size && t < n; offset++, t++, at += row)
            for (long b = 0; b < bytes; b += 64) {
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
    const long position = s->first_position + row / j->group;
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

/* One partition's own softmax sums, from nothing, into part / part_best / part_total. */
static void attend_partition(tile_state *s, long begin, long end)
{
    const attention_job *j = s->j;
    float carry[s->rows];
    memset(s->part, 0, s->rows * j->padded * sizeof(float));
    for (long r = 0; r < s->rows; r++) s->part_best[r] = -INFINITY, s->part_total[r] = 0;
    const long first = s->kv_begin / TILE * TILE > begin ? s->kv_begin / TILE * TILE : begin;
    touch(s, first, end - first < TILE ? end - first : TILE);
    for (long base = first; base < end; base += TILE) {
        long n = end - base < TILE ? end - base : TILE;
        gather(s, base, n);
        const long next = base + TILE, left = end - next;
        if (left > 0) touch(s, next, left < TILE ? left : TILE);
        product(s->q, j->padded, s->keys, TILE, s->scores, TILE, s->rows, (n + NC - 1) / NC * NC, j->dim, NULL);
        for (long r = 0; r < s->rows; r++) carry[r] = softmax_row(s, r, base, s->scores + r * TILE);
        product(s->scores, TILE, s->values, j->padded, s->part, j->padded, s->rows, j->padded, n, carry);
    }
}

/* Fold one partition's sums into the running ones of the same rows. */
static void merge(const tile_state *s, const float *part, const float *part_best, const float *part_total)
{
    const long padded = s->j->padded;
    for (long r = 0; r < s->rows; r++) {
        if (part_best[r] == -INFINITY) continue;
        float old = s->best[r], best = part_best[r] > old ? part_best[r] : old;
        float keep = old == -INFINITY ? 0.0f : expf(old - best), add = expf(part_best[r] - best);
        s->best[r] = best;
        s->total[r] = s->total[r] * keep + part_total[r] * add;
        for (long d = 0; d < padded; d += VL)
            vstore(s->out + r * padded + d, vload(s->out + r * padded + d) * keep + vload(part + r * padded + d) * add);
    }
}

static void place(tile_state *s, const attention_job *j, long index)
{
    long tile = index / j->kv_heads, sequence = j->tiles[2 * tile], offset = j->tiles[2 * tile + 1];
    long length = j->query_starts[sequence + 1] - j->query_starts[sequence];
    s->j = j;
    s->table = j->tables + sequence * j->max_blocks;
    s->kv_head = index % j->kv_heads;
    s->tokens = length - offset < j->tile_tokens ? length - offset : j->tile_tokens;
    s->rows = s->tokens * j->group;
    s->first_position = j->context_lens[sequence] - length + offset;
    s->kv_end = s->first_position + s->tokens;
    s->kv_begin = j->window > 0 && s->first_position >= j->window ? s->first_position - j->window + 1 : 0;
}

static long token_of(const attention_job *j, long index)
{
    long tile = index / j->kv_heads;
    return j->query_starts[j->tiles[2 * tile]] + j->tiles[2 * tile + 1];
}

/* Lay out this thread's scratch and load the queries, times scale. */
static void prepare(tile_state *s, long index)
{
    const attention_job *j = s->j;
    const long rows = s->rows, padded = j->padded, first = token_of(j, index);
    float *at = thread_scratch(((rows * 3 + TILE * 2) * padded + rows * TILE + rows * 4 + 64) * sizeof(float));
    s->q = at, at += rows * padded;
    s->out = at, at += rows * padded;
    s->part = at, at += rows * padded;
    s->keys = at, at += TILE * padded;
    s->values = at, at += TILE * padded;
    s->scores = at, at += rows * TILE;
    s->best = at, s->total = at + rows, s->part_best = at + 2 * rows, s->part_total = at + 3 * rows;
    memset(s->values, 0, TILE * padded * sizeof(float));
    for (int t = 0; t < TILE; t++) s->key_scale[t] = s->value_scale[t] = 1;
    for (long r = 0; r < rows; r++) {
        long from = (first + r / j->group) * j->q_stride + (s->kv_head * j->group + r % j->group) * j->q_head;
        for (long d = 0; d < j->dim; d++) s->q[r * padded + d] = load_any(j->q, from + d, j->wide) * j->scale;
    }
}

static void start_sums(tile_state *s)
{
    memset(s->out, 0, s->rows * s->j->padded * sizeof(float));
    for (long r = 0; r < s->rows; r++) s->best[r] = -INFINITY, s->total[r] = 0;
}

static void finish(const tile_state *s, long index)
{
    const attention_job *j = s->j;
    const long first = token_of(j, index);
    for (long r = 0; r < s->rows; r++) {
        long to = ((first + r / j->group) * j->heads + s->kv_head * j->group + r % j->group) * j->dim;
        const float factor = 1.0f / s->total[r], *row = s->out + r * j->padded;
        for (long d = 0; d < j->dim; d++) store_any(j->out, to + d, row[d] * factor, j->wide);
    }
}

static void whole_task(void *arg, long index)
{
    tile_state s;
    place(&s, arg, index);
    prepare(&s, index);
    start_sums(&s);
    for (long begin = s.kv_begin / PART * PART; begin < s.kv_end; begin += PART) {
        attend_partition(&s, begin, begin + PART < s.kv_end ? begin + PART : s.kv_end);
        merge(&s, s.part, s.part_best, s.part_total);
    }
    finish(&s, index);
}

static float *part_at(const attention_job *j, long index, long part)
{
    return j->parts + (index * j->max_parts + part) * j->part_floats;
}

static void split_task(void *arg, long index)
{
    const attention_job *j = arg;
    tile_state s;
    long item = index / j->max_parts, part = index % j->max_parts, begin = part * PART;
    place(&s, j, item);
    if (begin >= s.kv_end || begin + PART <= s.kv_begin) return;
    prepare(&s, item);
    attend_partition(&s, begin, begin + PART < s.kv_end ? begin + PART : s.kv_end);
    float *to = part_at(j, item, part);
    memcpy(to, s.part, s.rows * j->padded * sizeof(float));
    memcpy(to + s.rows * j->padded, s.part_best, 2 * s.rows * sizeof(float)); /* best, then total */
}

static void merge_task(void *arg, long index)
{
    const attention_job *j = arg;
    tile_state s;
    place(&s, j, index);
    prepare(&s, index);
    start_sums(&s);
    for (long part = s.kv_begin / PART; part * PART < s.kv_end; part++) {
        const float *from = part_at(j, index, part), *best = from + s.rows * j->padded;
        merge(&s, from, best, best + s.rows);
    }
    finish(&s, index);
}

/* Tokens of one tile for `group` query heads per KV head. */
long kr_attention_tile_tokens(long group) { return group >= ROWS_WANTED ? 1 : ROWS_WANTED / group; }

/* Fill tiles with (sequence, offset) pairs, longest contexts first within their sequence; returns how many. */
long kr_attention_tiles(const int32_t *query_starts, long sequences, long tile_tokens, int32_t *tiles)
{
    long count = 0;
    for (long s = 0; s < sequences; s++) {
        long length = query_starts[s + 1] - query_starts[s];
        for (long i = (length + tile_tokens - 1) / tile_tokens - 1; i >= 0; i--, count++) {
            tiles[2 * count] = (int32_t)s;
            tiles[2 * count + 1] = (int32_t)(i * tile_tokens);
        }
    }
    return count;
}

/* q [T, heads, dim] strided, out contiguous; kv: one layer's blocks [blocks, num_parts, block_size, kv_heads, row],
 * contiguous, rows of kv_kind. window, softcap: 0 for none. */
void kr_attention(pool *p, int wide, const void *q, void *out, const void *kv, const int32_t *query_starts,
                  const int32_t *context_lens, const int32_t *tables, long max_blocks, const int32_t *tiles,
                  long num_tiles, long heads, long kv_heads, long dim, long block_size, long q_stride, long q_head,
                  long max_query_len, long max_context_len, long window, float scale, float softcap, int kv_kind,
                  long num_parts)
{
    attention_job j = {.q = q, .out = out, .kv = kv, .query_starts = query_starts, .context_lens = context_lens,
                       .tables = tables, .tiles = tiles, .max_blocks = max_blocks, .num_tiles = num_tiles,
                       .heads = heads, .kv_heads = kv_heads, .dim = dim, .padded = (dim + NC - 1) / NC * NC,
                       .block_size = block_size, .q_stride = q_stride, .q_head = q_head, .group = heads / kv_heads,
                       .window = window, .scale = scale, .softcap = softcap, .wide = wide,
                       .kv_kind = kv_kind, .num_parts = num_parts};
    j.tile_tokens = kr_attention_tile_tokens(j.group);
    long items = num_tiles * kv_heads, rows = (max_query_len < j.tile_tokens ? max_query_len : j.tile_tokens) * j.group;
    j.max_parts = (max_context_len + PART - 1) / PART;
    if (pool_threads(p) == 1 || j.max_parts == 1 || items >= 4L * pool_threads(p)) {
        pool_run(p, whole_task, &j, items);
        return;
    }
    j.part_floats = rows * (j.padded + 2);
    j.parts = pool_scratch(p, 1, items * j.max_parts * j.part_floats * sizeof(float));
    pool_run(p, split_task, &j, items * j.max_parts);
    pool_run(p, merge_task, &j, items);
}
