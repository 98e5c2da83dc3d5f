/* Quantising KV and splitting it into planes: what kvcache/stores/codec_kernels.py does in numpy, to the bit, on one thread.
 *
 * Kinds of numbers: 0 float32, 1 bfloat16, 2 float16. A group is `size` neighbouring numbers that share a scale. */
#include <stdint.h>
#include <string.h>
#include <math.h>

enum { F32, BF16, F16 };
#define TILE 1024 /* numbers that are widened at a time: stays in the first cache */

static inline float from_bits(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline uint32_t to_bits(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }

static void widen(const void *source, int kind, long first, long count, float *target) {
    if (kind == F32) {
        memcpy(target, (const float *)source + first, 4 * count);
    } else if (kind == BF16) {
        const uint16_t *from = (const uint16_t *)source + first;
        for (long i = 0; i < count; i++) target[i] = from_bits((uint32_t)from[i] << 16);
    } else {
        const _Float16 *from = (const _Float16 *)source + first;
        for (long i = 0; i < count; i++) target[i] = (float)from[i];
    }
}

static void narrow(const float *source, long count, void *target, int kind, long first) {
    if (kind == F32) {
        memcpy((float *)target + first, source, 4 * count);
    } else if (kind == BF16) {
        uint16_t *to = (uint16_t *)target + first;
        for (long i = 0; i < count; i++) {
            uint32_t bits = to_bits(source[i]);
            to[i] = (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
        }
    } else {
        _Float16 *to = (_Float16 *)target + first;
        for (long i = 0; i < count; i++) to[i] = (_Float16)source[i];
    }
}

/* The largest magnitude, as bits: integers compare alike, and a number that is not finite is larger than all that are. */
static uint32_t largest_of(const float *values, long count) {
    uint32_t largest = 0;
    for (long i = 0; i < count; i++) {
        uint32_t size = to_bits(values[i]) & 0x7FFFFFFF;
        largest = size > largest ? size : largest;
    }
    return largest;
}

/* The scale as the upper half of a float32, rounded up, so that no quotient exceeds `most`; 0 where it has no inverse. */
static uint16_t scale_of(uint32_t largest, float most) {
    uint16_t scale = (uint16_t)((to_bits(from_bits(largest) / most) + 0xFFFF) >> 16);
    return scale < 0x80 ? 0 : scale;
}

static inline float inverse_of(uint16_t scale) {
    float value = from_bits((uint32_t)scale << 16);
    return value > 0 ? 1.0f / value : 0.0f;
}

static void to_int8(const float *values, long count, float inverse, uint8_t *codes) {
    for (long i = 0; i < count; i++) {
        float scaled = rintf(values[i] * inverse);
        scaled = scaled > 127 ? 127 : scaled < -127 ? -127 : scaled;
        codes[i] = (uint8_t)(int8_t)(int32_t)scaled;
    }
}

static void to_e4m3(const float *values, long count, float inverse, uint8_t *codes) {
    for (long i = 0; i < count; i++) {
        uint32_t bits = to_bits(values[i] * inverse);
        uint32_t sign = bits >> 31 << 7, size = bits & 0x7FFFFFFF;
        uint32_t normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3);
        uint32_t small = (uint32_t)(int32_t)rintf(from_bits(size) * 512.0f);
        uint32_t code = size < (121u << 23) ? small : normal;
        codes[i] = (uint8_t)(sign | (code > 0x7E ? 0x7E : code));
    }
}

static inline float of_e4m3(uint8_t code) {
    uint32_t exponent = (code >> 3) & 15, mantissa = code & 7;
    float small = (float)mantissa * 0x1p-9f, normal = from_bits((exponent + 120) << 23 | mantissa << 20);
    float size = exponent ? normal : small;
    return code & 0x80 ? -size : size;
}

/* groups of `size` numbers each -> a scale per group and a byte per number; 0, or -1 at a number that is not finite. */
int kvrelay_quantise(const void *source, int kind, int is_fp8, long groups, long size, uint16_t *scales, uint8_t *codes) {
    float tile[TILE];
    if (size > TILE) return -2;
    for (long group = 0; group < groups; group++) {
        widen(source, kind, group * size, size, tile);
        uint32_t largest = largest_of(tile, size);
        if (largest >= 0x7F800000) return -1;
        scales[group] = scale_of(largest, is_fp8 ? 448.0f : 127.0f);
        (is_fp8 ? to_e4m3 : to_int8)(tile, size, inverse_of(scales[group]), codes + group * size);
    }
    return 0;
}

int kvrelay_dequantise(const uint16_t *scales, const uint8_t *codes, int is_fp8, long groups, long size, void *target, int kind) {
    float tile[TILE], table[256];
    if (size > TILE) return -2;
    for (int code = 0; code < 256; code++) table[code] = of_e4m3((uint8_t)code);
    for (long group = 0; group < groups; group++) {
        const uint8_t *from = codes + group * size;
        float scale = from_bits((uint32_t)scales[group] << 16);
        if (is_fp8)
            for (long i = 0; i < size; i++) tile[i] = table[from[i]] * scale;
        else
            for (long i = 0; i < size; i++) tile[i] = (float)(int8_t)from[i] * scale;
        narrow(tile, size, target, kind, group * size);
    }
    return 0;
}

/* Exponents of `count` numbers into `top` (with the sign turned to the lowest place), the other bytes into `rest`. */
void kvrelay_split(const void *source, long width, long count, uint8_t *top, uint8_t *rest) {
    if (width == 2) {
        const uint16_t *from = source;
        for (long i = 0; i < count; i++) {
            uint16_t turned = (uint16_t)(from[i] << 1 | from[i] >> 15);
            top[i] = (uint8_t)(turned >> 8);
            rest[i] = (uint8_t)turned;
        }
    } else {
        const uint32_t *from = source;
        for (long i = 0; i < count; i++) {
            uint32_t turned = from[i] << 1 | from[i] >> 31;
            top[i] = (uint8_t)(turned >> 24);
            rest[3 * i] = (uint8_t)turned, rest[3 * i + 1] = (uint8_t)(turned >> 8), rest[3 * i + 2] = (uint8_t)(turned >> 16);
        }
    }
}

void kvrelay_merge(const uint8_t *top, const uint8_t *rest, long width, long count, void *target) {
    if (width == 2) {
        uint16_t *to = target;
        for (long i = 0; i < count; i++) {
            uint16_t turned = (uint16_t)(top[i] << 8 | rest[i]);
            to[i] = (uint16_t)(turned >> 1 | turned << 15);
        }
    } else {
        uint32_t *to = target;
        for (long i = 0; i < count; i++) {
            uint32_t turned = (uint32_t)top[i] << 24 | rest[3 * i] | rest[3 * i + 1] << 8 | rest[3 * i + 2] << 16;
            to[i] = turned >> 1 | turned << 31;
        }
    }
}
