/* Weights in groups of small integers, and how they lie in panels.
 *
 * Of an output n and a group of inputs, w = scale * q + offset with half floats scale and offset that stand for
 * multiples of `unit`, a power of two of the whole weight. bits 4: q is 0..15. bits 8: q is 1..255, and the offset, which
 * is -128 scale, is not stored.
 *
 * A panel is NR outputs: [groups] of { NR scales, NR offsets (bits 4), integers }, the integers in words of 32 bits,
 * [group * bits / 32][NR]: the lowest bits of word w are of input 32 / bits * w, the next of the input after it.
 * Inputs past K, up to whole groups, are there; the activations that they meet are zero.
 */
#ifndef KVRELAY_QUANT_H
#define KVRELAY_QUANT_H

#include "vec.h"
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define HALF_UNIT 5192296858534827628530496329220096.0f /* 2^112: a half float's bits, as a float's, to its value */

static inline long quant_scale_bytes(int bits) { return (bits == 4 ? 2 : 1) * NR * 2; }
static inline long quant_group_bytes(int bits, long group) { return quant_scale_bytes(bits) + NR * group * bits / 8; }

INLINE vf vload_half(const uint16_t *p)
{
#if defined(__F16C__) && VL == 8
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX512F__) && VL == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    vu wide = __builtin_convertvector(*(const vh_mem *)p, vu);
    vf size = (vf)((wide & 0x7fff) << 13) * HALF_UNIT;
    return (vf)((vu)size | (wide & 0x8000) << 16);
#endif
}

INLINE float from_half(uint16_t h)
{
    union { uint32_t u; float f; } c = {(uint32_t)(h & 0x7fff) << 13};
    return (h & 0x8000 ? -c.f : c.f) * HALF_UNIT;
}

INLINE uint16_t to_half(float x) /* nearest even; beyond the largest: the largest */
{
    union { float f; uint32_t u; } c = {x};
    uint16_t sign = (uint16_t)(c.u >> 16 & 0x8000);
    c.u &= 0x7fffffff;
    if (c.f > 65504.0f) return sign | 0x7bff;
    if (c.f < 6.103515625e-5f) return sign | (uint16_t)rintf(c.f * 16777216.0f);
    c.u -= 112u << 23;
    return sign | (uint16_t)((c.u + 0xfff + (c.u >> 13 & 1)) >> 13);
}

#endif
