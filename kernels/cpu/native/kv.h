/* What a KV cache holds: bf16, float32, or fp8 (e4m3) vectors with a float32 scale behind each; see kvrelay/fp8.py,
 * which encodes to the same bytes.
 */
#ifndef KVRELAY_KV_H
#define KVRELAY_KV_H

#include <string.h>
#include "vec.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

enum { KV_BF16, KV_F32, KV_FP8 };

typedef int8_t vb_mem __attribute__((vector_size(VL), aligned(1), may_alias));
typedef int8_t b8_mem __attribute__((vector_size(8), aligned(1), may_alias));
typedef int16_t h8 __attribute__((vector_size(16)));

/* Bytes of one token's vector of one head. */
INLINE long kv_row_bytes(long dim, int kind)
{
    return kind == KV_FP8 ? dim + 4 : kind == KV_F32 ? 4 * dim : 2 * dim;
}

INLINE float kv_scale(const char *row, long dim)
{
    float scale;
    memcpy(&scale, row + dim, sizeof scale);
    return scale;
}

typedef int32_t i8 __attribute__((vector_size(32)));
typedef float v8 __attribute__((vector_size(32)));

/* Bytes, sign-extended. GCC 12 takes them one by one where it is left to it: twice the time of a whole decode step. */
INLINE i8 widen8(const char *p)
{
#ifdef __AVX2__
    return (i8)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    return __builtin_convertvector(__builtin_convertvector(*(const b8_mem *)p, h8), i8);
#endif
}

INLINE vi widen(const char *p)
{
#if VL == 16
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif VL == 8
    return (vi)widen8(p);
#else
    return __builtin_convertvector(*(const vb_mem *)p, vi);
#endif
}

/* e4m3 bytes, sign-extended to 32-bit elements I -> floats F, exact: sign and magnitude move to their place in a float,
 * which reads as the number times 2^-120. Numbers below 2^-6 are subnormal floats on the way: slow on some processors, but
 * few, since a vector's scale makes its largest number 224 at least. The scale marks NaN. */
#define E4M3_TO_FLOAT(F, codes) ((F)(((codes) << 20) & (int32_t)0x87f00000) * 0x1p120f)

INLINE vf vload_e4m3(const char *p) { return E4M3_TO_FLOAT(vf, widen(p)); }

INLINE float from_e4m3(uint8_t x)
{
    float value = (x & 0x7f) < 8 ? (x & 0x7f) * 0x1p-9f : 0;
    union { uint32_t u; float f; } c = {((uint32_t)(x & 0x7f) << 20) + (120u << 23)};
    if ((x & 0x7f) >= 8) value = c.f;
    return x & 0x80 ? -value : value;
}

/* Numbers i.. of a row; fp8 without its scale. */
INLINE vf kv_load(const char *row, long i, int kind)
{
    return kind == KV_FP8 ? vload_e4m3(row + i) : vload_any(row, i, kind == KV_F32);
}

INLINE float kv_load_one(const char *row, long i, int kind)
{
    return kind == KV_FP8 ? from_e4m3((uint8_t)row[i]) : load_any(row, i, kind == KV_F32);
}

#endif
