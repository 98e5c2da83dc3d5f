/* Products of rows that are sorted by expert: what experts.c asks of linear.c and quant_linear.c. */
#ifndef KVRELAY_EXPERTS_H
#define KVRELAY_EXPERTS_H

#include "linear_cut.h"

/* A task: some rows, all of one expert, times some panels of its weight. */
typedef struct {
    long expert;
    linear_part part;
} expert_part;

/* x [M, K] and y [M, N], contiguous; both bf16 unless `kind` (as in linear.c) is F32. weights: by expert, packed. */
void linear_grouped(pool *p, int kind, const void *x, void *y, const void *const *weights, const expert_part *parts,
                    long num_parts, long M, long N, long K);

/* The same with integers of 4 or 8 bits, `units` by expert; x and y are floats if `wide`, else bf16. */
void quant_grouped(pool *p, int bits, int wide, const void *x, void *y, const void *const *weights, const float *units,
                   const expert_part *parts, long num_parts, long M, long N, long K, long group);

#endif
