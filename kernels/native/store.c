/* Keys and values into a cache of another type than theirs: bf16, float32, or fp8 with a scale for each vector. */
#include "kv.h"

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

/* k, v [tokens, heads, dim] with strides of tokens, in numbers; kv [blocks, 2, block_size, heads, row] of `kind`. */
void kr_store_kv_as(int wide, int kind, const void *k, const void *v, char *kv, const int64_t *slots, long tokens,
                    long k_stride, long v_stride, long block_size, long heads, long dim)
{
    const long row_bytes = kv_row_bytes(dim, kind), padded = (dim + VL - 1) / VL * VL;
    for (long t = 0; t < tokens; t++) {
        const long block = slots[t] / block_size, offset = slots[t] % block_size;
        char *at = kv + (block * 2 * block_size + offset) * heads * row_bytes;
        for (long h = 0; h < heads; h++, at += row_bytes) {
            store_row(k, t * k_stride + h * dim, wide, at, kind, dim, padded);
            store_row(v, t * v_stride + h * dim, wide, at + block_size * heads * row_bytes, kind, dim, padded);
        }
    }
}
