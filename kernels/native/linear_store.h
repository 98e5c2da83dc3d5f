/* What the linear kernels share: a finished tile to memory, and how many rows a block of them has. */
#ifndef KVRELAY_LINEAR_STORE_H
#define KVRELAY_LINEAR_STORE_H

#include "vec.h"

/* A finished tile, [rows][width] floats, to rows `row`.. and columns `first`.. of y [., N]: bias, rounding to bf16
 * unless `wide`, and the panels' padding left out. */
static inline void store_tile(void *y, long N, const float *bias, int wide, long row, long first, int rows, int width,
                              const float *tile)
{
    const long end = first + width < N ? first + width : N;
    for (int r = 0; r < rows; r++, tile += width) {
        const long at = (row + r) * N;
        long n = first;
        for (; n + VL <= end; n += VL) {
            vf value = vload(tile + n - first);
            vstore_any(y, at + n, bias ? value + vload(bias + n) : value, wide);
        }
        for (; n < end; n++) {
            float value = tile[n - first];
            store_any(y, at + n, bias ? value + bias[n] : value, wide);
        }
    }
}

/* Rows of x whose float32 form fits half of a 512 KiB second-level cache, in whole tiles. */
static inline long rows_per_block(long M, long K)
{
    long rows = (256 << 10) / (K * 4) / MR * MR;
    rows = rows < 2 * MR ? 2 * MR : rows > 32 * MR ? 32 * MR : rows;
    return M <= rows ? M : rows;
}

#endif
