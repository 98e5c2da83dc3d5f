/* XXH3-64 with seed 0 of inputs of more than 240 bytes, after the algorithm's specification
 * (doc/xxhash_spec.md of github.com/Cyan4973/xxHash). A block is 16 stripes of 64 bytes.
 *
 * Two liberties that leave the result alone: what a stripe adds to its neighbours' accumulators is
 * summed apart and swapped over once for each block, and the first lines of the next page are asked
 * for in the middle of this one, because the processor's own prefetching ends at a page's edge
 * (13.5 -> 16.5 GB/s over scattered 32 KiB regions in cold memory, Zen 3).
 */
#include "xxh3.h"
#include "vector.h"

#define PARTS (64 / WIDTH)
#define STRIPES 16
#define BLOCK (64 * STRIPES)
#define PAGE 4096
#define AHEAD 16 /* lines of the next page */

#define P32_1 0x9E3779B1ULL
#define P32_2 0x85EBCA77ULL
#define P32_3 0xC2B2AE3DULL
#define P64_1 0x9E3779B185EBCA87ULL
#define P64_2 0xC2B2AE3D27D4EB4FULL
#define P64_3 0x165667B19E3779F9ULL
#define P64_4 0x85EBCA77C2B2AE63ULL
#define P64_5 0x27D4EB2F165667C5ULL
#define MIX 0x165667919E3779F9ULL

static const uint8_t SECRET[192] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

INLINE uint64_t word(const uint8_t *p)
{
    uint64_t x;
    memcpy(&x, p, 8);
    return x;
}

INLINE uint64_t folded_product(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

enum store { NONE, CACHED, STREAMED };

INLINE void put(uint8_t *to, u64v x, enum store how)
{
#if HAS_STREAM
    if (how == STREAMED) {
        stream(to, x);
        return;
    }
#endif
    if (how != NONE) *(u64v_mem *)to = x;
}

/* The stripes of one block; n is 16 but in the last one. What is hashed is stored at `to` in the same pass: each word
 * is read once, so that the hash is of what was stored, also where another process writes the source meanwhile.
 */
INLINE void accumulate(u64v *acc, const uint8_t *data, int64_t n, uint8_t *to, enum store how)
{
    u64v own[PARTS], neighbours[PARTS];
    for (int k = 0; k < PARTS; k++) {
        own[k] = acc[k];
        neighbours[k] = (u64v){0};
    }
    _Pragma("GCC unroll 16")
    for (int64_t i = 0; i < n; i++) {
        for (int k = 0; k < PARTS; k++) {
            u64v x = load(data + i * 64 + k * WIDTH);
            put(to + i * 64 + k * WIDTH, x, how);
            neighbours[k] += x;
            own[k] += halves_product(x ^ load(SECRET + i * 8 + k * WIDTH));
        }
    }
    for (int k = 0; k < PARTS; k++) acc[k] = own[k] + swapped(neighbours[k]);
}

INLINE void scramble(u64v *acc)
{
    for (int k = 0; k < PARTS; k++) {
        u64v x = acc[k] ^ (acc[k] >> 47) ^ load(SECRET + 128 + k * WIDTH);
        acc[k] = x * P32_1;
    }
}

INLINE void last_stripe(u64v *acc, const uint8_t *data)
{
    for (int k = 0; k < PARTS; k++) {
        u64v x = load(data + k * WIDTH);
        acc[k] += swapped(x) + halves_product(x ^ load(SECRET + 121 + k * WIDTH));
    }
}

/* In the middle of a page: the first lines of the next one, or of what is hashed after this. */
INLINE void look_ahead(const uint8_t *block, const uint8_t *end, const uint8_t *after)
{
    if (((uintptr_t)block & (PAGE - 1)) / BLOCK != PAGE / BLOCK / 2) return;
    const uint8_t *next = (const uint8_t *)(((uintptr_t)block | (PAGE - 1)) + 1);
    if (next >= end) next = after;
    for (int line = 0; line < AHEAD; line++) __builtin_prefetch(next + line * 64, 0, 3);
}

static const uint64_t START[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};

/* The last block, of which `left` bytes lie at `data`, and what all `size` bytes come to. */
INLINE uint64_t finished(u64v *acc, const uint8_t *data, int64_t left, int64_t size)
{
    accumulate(acc, data, (left - 1) / 64, 0, NONE);
    last_stripe(acc, data + left - 64);
    uint64_t a[8], hash = (uint64_t)size * P64_1;
    memcpy(a, acc, 64);
    for (int i = 0; i < 4; i++)
        hash += folded_product(a[2 * i] ^ word(SECRET + 11 + 16 * i), a[2 * i + 1] ^ word(SECRET + 19 + 16 * i));
    hash ^= hash >> 37;
    hash *= MIX;
    return hash ^ (hash >> 32);
}

uint64_t kt_xxh3_long(const uint8_t *data, int64_t size, const uint8_t *after)
{
    u64v acc[PARTS];
    memcpy(acc, START, 64);
    int64_t num_blocks = (size - 1) / BLOCK;
    for (int64_t b = 0; b < num_blocks; b++) {
        look_ahead(data + b * BLOCK, data + size, after);
        accumulate(acc, data + b * BLOCK, STRIPES, 0, NONE);
        scramble(acc);
    }
    return finished(acc, data + num_blocks * BLOCK, size - num_blocks * BLOCK, size);
}

/* One block past the caches: what is moved to another tier is not read again soon. */
INLINE void place_block(uint8_t *to, const uint8_t *from)
{
#if HAS_STREAM
    if (!((uintptr_t)to & (WIDTH - 1))) {
        for (int i = 0; i < BLOCK; i += 4 * WIDTH) {
            u64v a = load(from + i), b = load(from + i + WIDTH);
            u64v c = load(from + i + 2 * WIDTH), d = load(from + i + 3 * WIDTH);
            stream(to + i, a);
            stream(to + i + WIDTH, b);
            stream(to + i + 2 * WIDTH, c);
            stream(to + i + 3 * WIDTH, d);
        }
        return;
    }
#endif
    memcpy(to, from, BLOCK);
}

void kt_copy_pieces(uint8_t *target, const uint8_t *source, const int64_t *target_pieces, const int64_t *source_pieces,
                    int64_t num_pieces, int64_t piece_bytes)
{
    for (int64_t i = 0; i < num_pieces; i++) {
        const uint8_t *from = source + source_pieces[i], *after = source + source_pieces[i + 1 < num_pieces ? i + 1 : i];
        uint8_t *to = target + target_pieces[i];
        int64_t at = 0;
        for (; at + BLOCK <= piece_bytes; at += BLOCK) {
            look_ahead(from + at, from + piece_bytes, after);
            place_block(to + at, from + at);
        }
        memcpy(to + at, from + at, piece_bytes - at);
    }
#if HAS_STREAM
    stream_fence();
#endif
}

INLINE uint64_t copy_hashed(uint8_t *target, const uint8_t *source, int64_t size, const uint8_t *after, enum store how)
{
    u64v acc[PARTS];
    memcpy(acc, START, 64);
    int64_t last = (size - 1) / BLOCK * BLOCK;
    for (int64_t at = 0; at < last; at += BLOCK) {
        look_ahead(source + at, source + size, after);
        accumulate(acc, source + at, STRIPES, target + at, how);
        scramble(acc);
    }
    memcpy(target + last, source + last, size - last);
    return finished(acc, target + last, size - last, size);
}

uint64_t kt_xxh3_copy(uint8_t *target, const uint8_t *source, int64_t size, const uint8_t *after)
{
    if (!HAS_STREAM || ((uintptr_t)target & (WIDTH - 1))) return copy_hashed(target, source, size, after, CACHED);
    uint64_t hash = copy_hashed(target, source, size, after, STREAMED);
#if HAS_STREAM
    stream_fence();
#endif
    return hash;
}

uint64_t kt_xxh3_chunk(const uint8_t *base, const int64_t *pieces, int64_t each, int64_t piece_bytes,
                      uint8_t *scratch, const uint8_t *after)
{
    if (each == 1) return kt_xxh3_long(base + *pieces, piece_bytes, after);
    for (int64_t i = 0; i < each; i++) memcpy(scratch + i * piece_bytes, base + pieces[i], piece_bytes);
    return kt_xxh3_long(scratch, each * piece_bytes, scratch);
}
