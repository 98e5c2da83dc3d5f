/* AMX tiles: what linear_amx.h and attention_amx.h share. Tiles 0 to 3 hold sums, 4 to 7 what is multiplied. */
#ifndef KVRELAY_AMX_H
#define KVRELAY_AMX_H

#include "vec.h"

#if HAS_DOT && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES 1
#define TILE_ROWS 16

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

/* For one block of `high` rows: 4 is A, 5 to 7 are B. For two, the second of `low` rows: 0 and 1 are the first one's sums,
 * 4 and 5 are A, 6 and 7 are B. */
static inline void configure_tiles(long high, long low)
{
    volatile tile_config c = {.palette = 1}; /* GCC's intrinsic names only its first 8 bytes as read */
    for (int i = 0; i < 8; i++) c.row_bytes[i] = 64, c.rows[i] = TILE_ROWS;
    c.rows[0] = c.rows[1] = c.rows[4] = high;
    c.rows[2] = c.rows[3] = low ? low : high;
    if (low) c.rows[5] = low;
    _tile_loadconfig((const void *)&c);
}

static inline void zero_sums(void)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* out[16][...] = tiles `first` and `first` + 1, `row_bytes` from row to row. */
#define STORE_PAIR(first, second, out, row_bytes)  \
    do {                                           \
        _tile_stored(first, out, row_bytes);       \
        _tile_stored(second, (out) + 16, row_bytes); \
    } while (0)

#define LOAD_PAIR(first, second, from, row_bytes)    \
    do {                                             \
        _tile_loadd(first, from, row_bytes);         \
        _tile_loadd(second, (from) + 16, row_bytes); \
    } while (0)

/* GCC does not know that _tile_loadd reads memory: what it reads is written before this. */
static inline void written(void) { __asm__ volatile("" ::: "memory"); }

/* Sums += block 4 times four tiles of 16 columns. */
#define MULTIPLY_FOUR(a, b, c, d, row_bytes) \
    do {                                     \
        _tile_loadd(5, a, row_bytes);        \
        _tile_dpbf16ps(0, 4, 5);             \
        _tile_loadd(6, b, row_bytes);        \
        _tile_dpbf16ps(1, 4, 6);             \
        _tile_loadd(7, c, row_bytes);        \
        _tile_dpbf16ps(2, 4, 7);             \
        _tile_loadd(5, d, row_bytes);        \
        _tile_dpbf16ps(3, 4, 5);             \
    } while (0)
#else
#define HAS_TILES 0
#endif

/* Whether this process may use tiles, and is to: see kr_use_tiles. */
int uses_tiles(void);

#endif
