/* Portable vectors by GCC and clang extensions: width, loads, bf16 conversion, exp, tanh.
 *
 * VL floats make one vector; a weight panel is NV vectors (NR outputs) wide. Intrinsics only where compilers do not find
 * the instruction: maxima, AVX512-BF16's dot product and rounding (and half floats, in quant.h; transposes and powers of
 * two, in attention_dot.h). No fast-math: NaN, infinity and the order of sums are kept.
 */
#ifndef KVRELAY_VEC_H
#define KVRELAY_VEC_H

#include <stdint.h>
#include <stddef.h>
#include <math.h>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define VL 16
#define NV 4
#elif defined(__AVX2__)
#define VL 8
#define NV 2
#else
#define VL 4
#define NV 2
#endif
#if defined(__AVX512BF16__) && VL == 16
#define HAS_DOT 1 /* products of bf16 pairs */
#else
#define HAS_DOT 0
#endif
#define NR (VL * NV)
#define MR 6
#if VL > 4
#include <immintrin.h>
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef float vf_mem __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint32_t vu_mem __attribute__((vector_size(VL * 4), aligned(2), may_alias));
typedef uint16_t vh_mem __attribute__((vector_size(VL * 2), aligned(2), may_alias));
typedef uint16_t bf16;

INLINE vf vset(float x) { return x - (vf){0}; }
INLINE vf vload(const float *p) { return *(const vf_mem *)p; }
INLINE void vstore(float *p, vf x) { *(vf_mem *)p = x; }
INLINE vf vselect(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
/* a > b ? a : b, and a < b ? a : b: b where one is NaN. */
INLINE vf vmax(vf a, vf b)
{
#if VL == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif VL == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vselect((vi)(a > b), a, b);
#endif
}
INLINE vf vmin(vf a, vf b)
{
#if VL == 16
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif VL == 8
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return vselect((vi)(a < b), a, b);
#endif
}

INLINE float to_float(bf16 h)
{
    union { uint32_t u; float f; } c = {(uint32_t)h << 16};
    return c.f;
}

INLINE bf16 to_bf16(float x) /* nearest even; NaN stays NaN */
{
    union { float f; uint32_t u; } c = {x};
    if (x != x) return 0x7fc0;
    return (bf16)((c.u + 0x7fff + ((c.u >> 16) & 1)) >> 16);
}

INLINE vf vload_bf16(const bf16 *p)
{
    vu wide = __builtin_convertvector(*(const vh_mem *)p, vu);
    return (vf)(wide << 16);
}

INLINE void vstore_bf16(bf16 *p, vf x) /* like to_bf16, but AVX512-BF16 flushes subnormal numbers to 0 */
{
#if HAS_DOT
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    vu u = (vu)x;
    vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    vu is_nan = (vu)(x != x);
    rounded = (rounded & ~is_nan) | (is_nan & 0x7fc0);
    *(vh_mem *)p = __builtin_convertvector(rounded, vh);
#endif
}

/* One element type for both: `wide`: float32, else bf16. Index i counts elements. */
INLINE vf vload_any(const void *p, long i, int wide)
{
    return wide ? vload((const float *)p + i) : vload_bf16((const bf16 *)p + i);
}
INLINE void vstore_any(void *p, long i, vf x, int wide)
{
    if (wide) vstore((float *)p + i, x);
    else vstore_bf16((bf16 *)p + i, x);
}
INLINE float load_any(const void *p, long i, int wide)
{
    return wide ? ((const float *)p)[i] : to_float(((const bf16 *)p)[i]);
}
INLINE void store_any(void *p, long i, float x, int wide)
{
    if (wide) ((float *)p)[i] = x;
    else ((bf16 *)p)[i] = to_bf16(x);
}

/* out[0..n-1] = p[i..], exactly. */
INLINE void widen_row(const void *p, long i, long n, int wide, float *out)
{
    long k = 0;
    for (; k + VL <= n; k += VL) vstore(out + k, vload_any(p, i + k, wide));
    for (; k < n; k++) out[k] = load_any(p, i + k, wide);
}

INLINE float vsum(vf x) /* pairs, in one fixed order */
{
    float element[VL];
    vstore(element, x);
    for (int n = VL / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) element[i] += element[i + n];
    return element[0];
}

INLINE float vmaximum(vf x)
{
    float best = x[0];
    for (int i = 1; i < VL; i++) best = x[i] > best ? x[i] : best;
    return best;
}

/* e^x within 2 ulp for -87 <= x <= 88; 0 below, e^88 above. Range reduction and polynomial: Cephes expf. */
INLINE vf vexp(vf x)
{
    vi alive = (vi)(x > vset(-87.0f));
    vf y = vmin(vmax(x, vset(-87.0f)), vset(88.0f));
    vf n = (y * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    vf r = y - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf poly = vset(1.9875691500e-4f);
    poly = poly * r + 1.3981999507e-3f;
    poly = poly * r + 8.3334519073e-3f;
    poly = poly * r + 4.1665795894e-2f;
    poly = poly * r + 1.6666665459e-1f;
    poly = poly * r + 5.0000001201e-1f;
    poly = poly * r * r + r + 1.0f;
    vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    return (vf)((vi)(poly * (vf)exponent) & alive);
}

INLINE vf vtanh(vf x) { return 1.0f - 2.0f / (vexp(2.0f * x) + 1.0f); }

#endif
