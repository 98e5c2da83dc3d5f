/* Kernels of quant_linear.c for bf16 activations, in the processor's products of bf16 pairs.
 *
 * Integers of 8 bits or fewer are exact in bf16, so that nothing is rounded but the sums, which are in float32 and in one
 * order for every M, tile and thread count: pair by pair, a product instruction each.
 *
 * bits 4: a word's input i stands in the low half of pair i, input i + 4 in the high half; a table of 16 turns both into
 * bf16 at once, and activations are put into that order. bits 8: a word's inputs make two pairs; integer i is converted
 * where it stands, times 2^(8 i) (the last one shifted down), and activations were multiplied by 2^-(8 i) before. Its
 * offset of -128 is there before the first product, times the sum of the activations.
 *
 * Each tile converts for itself, however many rows there are: that runs beside the products, and what a scratch panel of
 * pairs for all rows cost in stores and in waits for memory was more (64 rows: 1.1 to 1.2 times as long).
 */
#pragma GCC optimize("no-tree-pre") /* as in quant_linear.c */
#include "quant_job.h"

#if HAS_DOT
INLINE vf dot(vf sum, vf a, vf b) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }

INLINE __m512i repeated(const uint16_t table[16])
{
    const __m256i once = _mm256_loadu_si256((const __m256i *)table);
    return _mm512_inserti64x4(_mm512_castsi256_si512(once), once, 1);
}

/* bf16 of 0..15 */
static const uint16_t DIGITS[16] = {0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                    0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};

/* Pair i of each word. */
INLINE vf integer_pairs(vu words, int i, int bits)
{
    if (bits == 4) return (vf)_mm512_permutexvar_epi16((__m512i)(words >> 4 * i), repeated(DIGITS));
    const vu even = i == 0 ? words & 0xff : words & 0xff0000, odd = i == 0 ? words & 0xff00 : words >> 24;
    const __m512i low = (__m512i)__builtin_convertvector((vi)even, vf), high = (__m512i)__builtin_convertvector((vi)odd, vf);
    return (vf)_mm512_mask_alignr_epi8(high, 0x3333333333333333, low, low, 2); /* a float's upper half is its bf16 */
}

#define TILE_TYPE quant_tile
#define TILE_FILE "quant_dot_tile.h"
#define KIND 4
#define ALONE 2 /* four wait for memory 2 to 5 % longer */
#include "tiles.h"
#define KIND 8
#include "tiles.h"

/* 32 inputs in the order of pairs, or in the units of the integers. */
INLINE void store_inputs(bf16 *to, __m512i x, int bits)
{
    if (bits == 4) {
        const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
        _mm512_storeu_si512(to, _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(order)));
        return;
    }
    const float of_bytes[4] = {1.0f, 1.0f / 256, 1.0f / 65536, 1.0f};
    const vf units = (vf)_mm512_broadcast_f32x4(_mm_loadu_ps(of_bytes));
    _mm512_storeu_si512(to, x);
    for (int i = 0; i < 32; i += VL) vstore_bf16(to + i, vload_bf16(to + i) * units);
}

static void prepare(const quant_job *j, long m)
{
    const bf16 *from = (const bf16 *)j->source + m * j->source_ldx;
    bf16 *to = (bf16 *)(j->x + m * j->x_bytes);
    const vf ones = (vf)((vu){0} + 0x3f803f80u);
    for (long g = 0, k = 0; g < j->groups; g++) {
        vf sum = {0};
        for (long end = k + j->group; k < end; k += 32) {
            const long left = j->K - k;
            const __m512i x = left >= 32 ? _mm512_loadu_si512(from + k)
                                         : _mm512_maskz_loadu_epi16(left > 0 ? (1u << left) - 1 : 0, from + k);
            sum = dot(sum, (vf)x, ones);
            store_inputs(to + k, x, j->bits);
        }
        j->sums[m * j->groups + g] = _mm512_reduce_add_ps((__m512)sum);
    }
}

const quant_kernels *quant_dot_kernels(int bits)
{
    static const quant_kernels of_4 = {wide_4, narrow_4, 2, prepare, 2, NULL}, of_8 = {wide_8, narrow_8, 4, prepare, 2, NULL};
    return bits == 4 ? &of_4 : &of_8;
}
#else
const quant_kernels *quant_dot_kernels(int bits) { return 0; }
#endif
