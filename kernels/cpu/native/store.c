/* Keys and values into a cache: of their own type, or as bf16, float32, or fp8 with a scale for each vector. */
#include "kv.h"
#include "pool.h"
#include "rows.h"

/* The scale's exponent: the smallest power of two that brings a vector with this largest magnitude to 448 or below. */
static int scale_exponent(uint32_t largest_bits)
{
    int exponent = (int)(largest_bits >> 23) - 126 - 9 + ((largest_bits & 0x7fffff) > 0x600000);
    return exponent < -126 ? -126 : exponent;
}

static float power_of_two(int exponent)
{
    union { uint32_t u; float f; } c = {(uint32_t)(exponent + 127) << 23};
    return c.f;
}

/* row: `padded` floats, of which dim count -> dim bytes and the scale. Rounds to nearest even. */
static void encode_fp8(const float *row, long dim, long padded, uint8_t *out)
{
    vu top = {0};
    for (long i = 0; i < padded; i += VL) {
        vu bits = (vu)vload(row + i) & 0x7fffffff;
        vu larger = (vu)((vi)bits > (vi)top);
        top = (bits & larger) | (top & ~larger);
    }
    uint32_t largest = 0;
    for (int i = 0; i < VL; i++) largest = top[i] > largest ? top[i] : largest;
    if (largest >= 0x7f800000) { /* not finite: the vector is lost */
        const float nan = NAN;
        memset(out, 0x7f, dim);
        memcpy(out + dim, &nan, sizeof nan);
        return;
    }
    const int exponent = largest ? scale_exponent(largest) : 0;
    const float scale = power_of_two(exponent), inverse = power_of_two(-exponent);
    uint8_t bytes[padded];
    for (long i = 0; i < padded; i += VL) {
        vf x = vload(row + i) * inverse;
        vu bits = (vu)x, magnitude = bits & 0x7fffffff;
        vu is_small = (vu)((vf)magnitude < 0x1p-6f);
        vu normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120u << 3);
        vu small = (vu)((vf)magnitude + 16384.0f) - 0x46800000u; /* 16384's steps are 2^-9, those of subnormals */
        vu code = (small & is_small) | (normal & ~is_small) | ((bits >> 24) & 0x80);
        *(vb_mem *)(bytes + i) = __builtin_convertvector(code, vb_mem);
    }
    memcpy(out, bytes, dim);
    memcpy(out + dim, &scale, sizeof scale);
}

static void store_row(const void *from, long first, int wide, char *to, int kind, long dim, long padded)
{
    float row[padded];
    long i = dim;
    widen_row(from, first, dim, wide, row);
    for (; i < padded; i++) row[i] = 0;
    if (kind == KV_FP8) encode_fp8(row, dim, padded, (uint8_t *)to);
    else
        for (i = 0; i < dim; i++) store_any(to, i, row[i], kind == KV_F32);
}

typedef struct {
    void *q, *k;
    const void *v, *q_norm, *k_norm;
    const float *table;
    const int64_t *positions, *slots;
    char *kv;
    long tokens, heads, kv_heads, q_stride, k_stride, v_stride, dim, rotary, block_size, block_bytes, chunk;
    float eps;
    int wide, kind, wide_norm;
} place_job;

INLINE void place_token(const place_job *j, long t, int wide)
{
    const long half = j->rotary / 2, dim = j->dim, item = wide ? 4 : 2;
    const long row_bytes = kv_row_bytes(dim, j->kind), padded = (dim + VL - 1) / VL * VL;
    const float *cos = j->table + j->positions[t] * j->rotary, *sin = cos + half;
    const long block = j->slots[t] / j->block_size, offset = j->slots[t] % j->block_size;
    const int as_it_is = j->kind == (wide ? KV_F32 : KV_BF16);
    char *keys = j->kv + block * j->block_bytes + offset * j->kv_heads * row_bytes;
    char *values = keys + j->block_size * j->kv_heads * row_bytes;
    for (long h = 0; h < j->heads; h++) {
        const long at = t * j->q_stride + h * dim;
        if (j->q_norm) normalise(j->q, at, j->q, at, j->q_norm, dim, j->eps, wide, j->wide_norm);
        rotate(j->q, at, cos, sin, half, wide);
    }
    for (long h = 0; h < j->kv_heads; h++) {
        const long at = t * j->k_stride + h * dim;
        if (j->k_norm) normalise(j->k, at, j->k, at, j->k_norm, dim, j->eps, wide, j->wide_norm);
        rotate(j->k, at, cos, sin, half, wide);
        if (!as_it_is) {
            store_row(j->k, at, wide, keys + h * row_bytes, j->kind, dim, padded);
            store_row(j->v, t * j->v_stride + h * dim, wide, values + h * row_bytes, j->kind, dim, padded);
        }
    }
    if (as_it_is) {
        memcpy(keys, (const char *)j->k + t * j->k_stride * item, j->kv_heads * row_bytes);
        memcpy(values, (const char *)j->v + t * j->v_stride * item, j->kv_heads * row_bytes);
    }
}

static void place_task(void *arg, long index)
{
    const place_job *j = arg;
    long end = (index + 1) * j->chunk < j->tokens ? (index + 1) * j->chunk : j->tokens;
    for (long t = index * j->chunk; t < end; t++)
        if (j->wide) place_token(j, t, 1);
        else place_token(j, t, 0);
}

/* One pass over a step's heads: the norms of queries and keys (where given), their rotation, and the cache write. In place.
 *
 * q [tokens, heads, dim], k and v [tokens, kv_heads, dim], heads contiguous, with strides of tokens, in numbers;
 * table: [positions, rotary] float32, cosines then sines; kv: blocks [2, block_size, kv_heads, row] of `kind`, each contiguous
 * and block_bytes behind the one before. Equals
 * kr_rms_norm, kr_rope and a cache write one after the other, bit for bit.
 */
void kr_norm_rope_store(pool *p, int wide, int kind, int wide_norm, void *q, void *k, const void *v, const void *q_norm,
              const void *k_norm, const float *table, const int64_t *positions, const int64_t *slots, char *kv, long tokens,
              long heads, long kv_heads, long q_stride, long k_stride, long v_stride, long dim, long rotary, long block_size,
              long block_bytes, float eps)
{
    long chunk = rows_per_task((heads + 2 * kv_heads) * dim);
    place_job j = {q, k, v, q_norm, k_norm, table, positions, slots, kv, tokens, heads, kv_heads, q_stride, k_stride,
                   v_stride, dim, rotary, block_size, block_bytes, chunk, eps, wide, kind, wide_norm};
    pool_run(p, place_task, &j, (tokens + chunk - 1) / chunk);
}
