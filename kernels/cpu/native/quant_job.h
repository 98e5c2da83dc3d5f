/* A product with weights in groups of integers, and its kernels: those of quant_linear.c or of
 * quant_dot.c. */
#ifndef KVRELAY_QUANT_JOB_H
#define KVRELAY_QUANT_JOB_H

#include "linear_cut.h"
#include "quant.h"

#define AHEAD 5 /* groups that weights are fetched ahead of their use */

typedef struct quant_kernels quant_kernels;

typedef struct {
    int bits, wide;
    const quant_kernels *kernels;
    const void *source; /* x as given */
    long source_ldx;
    char *x;     /* [M] rows of x_bytes, in the kernels' layout */
    float *sums; /* [M][groups], of x */
    long x_bytes;
    void *y;
    const char *w;
    const float *bias;
    long M, N, K, group, groups;
    float unit;
    long panel_bytes, group_bytes;
    linear_cut cut;
} quant_job;

/* Rows at x times `groups` groups of panels at w, added to acc, in units; `plain`: their integers as floats, or NULL. */
typedef void (*quant_tile)(const quant_job *, const char *x, const float *sums, const char *w, const float *plain,
                           long groups, float *acc);

struct quant_kernels {
    const quant_tile *wide, *narrow;              /* by rows, see tiles.h */
    long alone;                                   /* panels that one row takes */
    void (*prepare)(const quant_job *, long row); /* x and its sums from the source */
    long input_bytes;                             /* of x */
    const quant_tile *plain; /* that take integers as floats, for many rows; NULL: it is faster to convert for each tile */
};

const quant_kernels *quant_dot_kernels(int bits); /* of bf16 pairs; NULL where the processor has no such products */

#endif
