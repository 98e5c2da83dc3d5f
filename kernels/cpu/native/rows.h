/* One row: its norm, its rotation. Sums in float32, in one fixed order. */
#ifndef KVRELAY_ROWS_H
#define KVRELAY_ROWS_H

#include "vec.h"

/* Rows per task so that a task moves about 64 KiB; small work runs on the caller alone. */
INLINE long rows_per_task(long columns)
{
    long rows = 16384 / (columns > 0 ? columns : 1);
    return rows < 1 ? 1 : rows;
}

/* out[to..] = x[from..] * rsqrt(mean(x^2) + eps) * weight, n numbers; out may be x. */
INLINE void normalise(const void *x, long from, void *out, long to, const void *weight, long n, float eps, int wide,
                      int wide_weight)
{
    vf squares[2] = {{0}, {0}};
    long i;
    for (i = 0; i + 2 * VL <= n; i += 2 * VL) {
        vf a = vload_any(x, from + i, wide), b = vload_any(x, from + i + VL, wide);
        squares[0] += a * a;
        squares[1] += b * b;
    }
    float sum = vsum(squares[0] + squares[1]);
    for (; i < n; i++) {
        float a = load_any(x, from + i, wide);
        sum += a * a;
    }
    const float factor = 1.0f / sqrtf(sum / n + eps);
    for (i = 0; i + VL <= n; i += VL)
        vstore_any(out, to + i, vload_any(x, from + i, wide) * factor * vload_any(weight, i, wide_weight), wide);
    for (; i < n; i++) store_any(out, to + i, load_any(x, from + i, wide) * factor * load_any(weight, i, wide_weight), wide);
}

/* Rotary embedding of x[at..] in place, half-split; half numbers of each table. */
INLINE void rotate(void *x, long at, const float *cos, const float *sin, long half, int wide)
{
    long i = 0;
    for (; i + VL <= half; i += VL) {
        vf a = vload_any(x, at + i, wide), b = vload_any(x, at + half + i, wide), c = vload(cos + i), s = vload(sin + i);
        vstore_any(x, at + i, a * c - b * s, wide);
        vstore_any(x, at + half + i, b * c + a * s, wide);
    }
    for (; i < half; i++) {
        float a = load_any(x, at + i, wide), b = load_any(x, at + half + i, wide);
        store_any(x, at + i, a * cos[i] - b * sin[i], wide);
        store_any(x, at + half + i, b * cos[i] + a * sin[i], wide);
    }
}

#endif
