/* A finished tile of a linear kernel to memory. */
#ifndef KVRELAY_LINEAR_STORE_H
#define KVRELAY_LINEAR_STORE_H

#include "vec.h"

/* [rows][width] floats to rows `row`.. and columns `first`.. of y [., N]: bias, rounding to bf16 unless `wide`, and the
 * panels' padding left out. */
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

#endif
