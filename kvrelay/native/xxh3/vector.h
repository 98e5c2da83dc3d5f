/* The widest vector of 64-bit numbers that this processor has, and what C cannot say portably about it. */
#ifndef KVRELAY_VECTOR_H
#define KVRELAY_VECTOR_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "little-endian processors only"
#endif

#if defined(__AVX512F__)
#define WIDTH 64
#elif defined(__AVX2__)
#define WIDTH 32
#else
#define WIDTH 16
#endif

#define INLINE static inline __attribute__((always_inline))

typedef uint64_t u64v __attribute__((vector_size(WIDTH)));
typedef uint64_t u64v_mem __attribute__((vector_size(WIDTH), aligned(1), may_alias));

INLINE u64v load(const void *p) { return *(const u64v_mem *)p; }

/* Each number's low half times its high half. */
INLINE u64v halves_product(u64v x)
{
#if defined(__AVX512F__)
    return (u64v)_mm512_mul_epu32((__m512i)x, (__m512i)(x >> 32));
#elif defined(__AVX2__)
    return (u64v)_mm256_mul_epu32((__m256i)x, (__m256i)(x >> 32));
#elif defined(__SSE2__)
    return (u64v)_mm_mul_epu32((__m128i)x, (__m128i)(x >> 32));
#elif defined(__ARM_NEON)
    uint64x2_t y = (uint64x2_t)x;
    return (u64v)vmull_u32(vmovn_u64(y), vshrn_n_u64(y, 32));
#else
    return (x & 0xffffffff) * (x >> 32);
#endif
}

/* Neighbouring numbers swapped. */
INLINE u64v swapped(u64v x)
{
#if defined(__clang__) && WIDTH == 64
    return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
#elif defined(__clang__) && WIDTH == 32
    return __builtin_shufflevector(x, x, 1, 0, 3, 2);
#elif defined(__clang__)
    return __builtin_shufflevector(x, x, 1, 0);
#elif WIDTH == 64
    return __builtin_shuffle(x, (u64v){1, 0, 3, 2, 5, 4, 7, 6});
#elif WIDTH == 32
    return __builtin_shuffle(x, (u64v){1, 0, 3, 2});
#else
    return __builtin_shuffle(x, (u64v){1, 0});
#endif
}

#if defined(__SSE2__)
#define HAS_STREAM 1
/* Store past the caches; p is aligned to WIDTH. Order it with stream_fence(). */
INLINE void stream(void *p, u64v x)
{
#if WIDTH == 64
    _mm512_stream_si512((__m512i *)p, (__m512i)x);
#elif WIDTH == 32
    _mm256_stream_si256((__m256i *)p, (__m256i)x);
#else
    _mm_stream_si128((__m128i *)p, (__m128i)x);
#endif
}
INLINE void stream_fence(void) { _mm_sfence(); }
#else
#define HAS_STREAM 0
#endif

#endif
