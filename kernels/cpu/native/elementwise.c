/* Embedding rows, norms, rotary embedding, gated activations and the cache write: one pass over memory each, sums in float32.
 *
 * `wide`: float32, else bf16. Strides count elements; the last dimension is contiguous.
 */
#include <string.h>
#include "pool.h"
#include "rows.h"

typedef struct {
    const void *x;
    void *residual, *out;
    const void *weight;
    long outer_stride, inner, inner_stride, rows, columns, chunk;
    float eps;
    int wide, wide_weight;
} norm_job;

/* out = x * rsqrt(mean(x^2) + eps) * weight; with a residual, x + residual (rounded to the dtype) comes first. */
static void norm_row(const norm_job *j, long row)
{
    const int wide = j->wide;
    const long n = j->columns, at = row / j->inner * j->outer_stride + row % j->inner * j->inner_stride;
    const void *x = j->x;
    long from = at;
    if (j->residual) {
        void *r = j->residual;
        long i;
        for (i = 0; i + VL <= n; i += VL)
            vstore_any(r, row * n + i, vload_any(x, at + i, wide) + vload_any(r, row * n + i, wide), wide);
        for (; i < n; i++) store_any(r, row * n + i, load_any(x, at + i, wide) + load_any(r, row * n + i, wide), wide);
        x = r;
        from = row * n;
    }
    normalise(x, from, j->out, row * n, j->weight, n, j->eps, wide, j->wide_weight);
}

static void norm_task(void *arg, long index)
{
    const norm_job *j = arg;
    long end = (index + 1) * j->chunk < j->rows ? (index + 1) * j->chunk : j->rows;
    for (long row = index * j->chunk; row < end; row++) norm_row(j, row);
}

/* rows = outer * inner. x is strided by outer and inner; residual (or NULL) and out are contiguous [rows, columns]. */
void kr_rms_norm(pool *p, int wide, int wide_weight, const void *x, void *residual, void *out, const void *weight,
                 long rows, long columns, long inner, long outer_stride, long inner_stride, float eps)
{
    norm_job j = {x, residual, out, weight, outer_stride, inner, inner_stride, rows, columns, rows_per_task(columns), eps,
                  wide, wide_weight};
    pool_run(p, norm_task, &j, (rows + j.chunk - 1) / j.chunk);
}

typedef struct {
    void *q, *k;
    const float *table;
    const int64_t *positions;
    long tokens, heads, kv_heads, q_stride, q_head, k_stride, k_head, rotary, chunk;
    int wide;
} rope_job;

static void rope_task(void *arg, long index)
{
    const rope_job *j = arg;
    const long half = j->rotary / 2;
    long end = (index + 1) * j->chunk < j->tokens ? (index + 1) * j->chunk : j->tokens;
    for (long t = index * j->chunk; t < end; t++) {
        const float *cos = j->table + j->positions[t] * j->rotary, *sin = cos + half;
        for (long h = 0; h < j->heads; h++) rotate(j->q, t * j->q_stride + h * j->q_head, cos, sin, half, j->wide);
        for (long h = 0; h < j->kv_heads; h++) rotate(j->k, t * j->k_stride + h * j->k_head, cos, sin, half, j->wide);
    }
}

/* In place. table: [positions, rotary] float32, cosines then sines. */
void kr_rope(pool *p, int wide, void *q, void *k, const float *table, const int64_t *positions, long tokens, long heads,
             long kv_heads, long q_stride, long q_head, long k_stride, long k_head, long rotary)
{
    long chunk = rows_per_task((heads + kv_heads) * rotary);
    rope_job j = {q, k, table, positions, tokens, heads, kv_heads, q_stride, q_head, k_stride, k_head, rotary, chunk, wide};
    pool_run(p, rope_task, &j, (tokens + chunk - 1) / chunk);
}

typedef struct {
    const void *x;
    void *out;
    long rows, features, stride, chunk;
    int wide, gelu;
} gate_job;

INLINE vf activate(vf x, int gelu)
{
    if (!gelu) return x / (1.0f + vexp(-x));
    vf inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + vtanh(inner));
}

static void gate_task(void *arg, long index)
{
    const gate_job *j = arg;
    long end = (index + 1) * j->chunk < j->rows ? (index + 1) * j->chunk : j->rows;
    for (long row = index * j->chunk; row < end; row++) {
        long gate = row * j->stride, up = gate + j->features, to = row * j->features, i = 0;
        for (; i + VL <= j->features; i += VL) {
            vf a = activate(vload_any(j->x, gate + i, j->wide), j->gelu);
            vstore_any(j->out, to + i, a * vload_any(j->x, up + i, j->wide), j->wide);
        }
        for (; i < j->features; i++) {
            vf a = activate(vset(load_any(j->x, gate + i, j->wide)), j->gelu);
            store_any(j->out, to + i, a[0] * load_any(j->x, up + i, j->wide), j->wide);
        }
    }
}

/* x: [rows, 2 * features] gate then up, with row stride -> out [rows, features]. gelu 0: silu; 1: tanh gelu. */
void kr_gate(pool *p, int wide, int gelu, const void *x, void *out, long rows, long features, long stride)
{
    gate_job j = {x, out, rows, features, stride, rows_per_task(2 * features), wide, gelu};
    pool_run(p, gate_task, &j, (rows + j.chunk - 1) / j.chunk);
}

/* out [tokens, columns] = rows `ids` of table, times scale (1 copies). */
void kr_embed(int wide, const int64_t *ids, const void *table, void *out, long tokens, long columns, float scale)
{
    const long item = wide ? 4 : 2;
    for (long t = 0; t < tokens; t++) {
        const long from = ids[t] * columns, to = t * columns;
        if (scale == 1.0f) memcpy((char *)out + to * item, (const char *)table + from * item, columns * item);
        else
            for (long i = 0; i < columns; i++) store_any(out, to + i, load_any(table, from + i, wide) * scale, wide);
    }
}
