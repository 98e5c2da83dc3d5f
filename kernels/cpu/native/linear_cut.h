/* How the products of the linear kernels are cut into tasks: blocks of rows times shares of the weight's panels. */
#ifndef KVRELAY_LINEAR_CUT_H
#define KVRELAY_LINEAR_CUT_H

#include "pool.h"
#include "vec.h"

#define TASKS_PER_THREAD 8 /* of one block of rows: balances two uneven threads; shares of two panels took 15 % longer */

#define MOST_ROWS (32 * MR) /* of a block */

typedef struct {
    long rows, panels, rows_per_block, share, shares;
} linear_cut;

/* Rows begin..end - 1 times panels first..last - 1. */
typedef struct {
    long begin, end, first, last;
} linear_part;

/* Rows of x whose float32 form fits half of a 512 KiB second-level cache, in whole tiles. */
static inline long rows_per_block(long M, long K)
{
    long rows = (256 << 10) / (K * 4) / MR * MR;
    rows = rows < 2 * MR ? 2 * MR : rows > MOST_ROWS ? MOST_ROWS : rows;
    return M <= rows ? M : rows;
}

static inline linear_cut cut_linear(const pool *p, long M, long N, long K)
{
    linear_cut c = {.rows = M, .panels = (N + NR - 1) / NR, .rows_per_block = rows_per_block(M, K)};
    const long tasks = pool_threads(p) == 1 ? 1 : TASKS_PER_THREAD * pool_threads(p);
    c.share = ((c.panels + tasks - 1) / tasks + 3) / 4 * 4; /* one row takes four panels at once */
    c.shares = (c.panels + c.share - 1) / c.share;
    return c;
}

#define MOST_INPUTS 1536 /* of a strip of AMX tiles in one go: up to here blocks of inputs gain nothing */
#define INPUT_BLOCK 576  /* else: so many stay in the first-level cache */

static inline long input_blocks(long K) { return K > MOST_INPUTS ? (K + INPUT_BLOCK - 1) / INPUT_BLOCK : 1; }

/* For AMX tiles: 32 rows by 32 outputs. What a block's rows have of a block of inputs fits half of a 2 MiB second-level
 * cache; many rows are cut so that each thread has its own, and then a long strip's block of inputs meets several strips. */
static inline linear_cut cut_tiles(const pool *p, long M, long N, long K)
{
    const long threads = pool_threads(p), tasks = threads == 1 ? 1 : TASKS_PER_THREAD * threads, parts = input_blocks(K);
    const long fitting = (512 << 10) / (K / parts * 2) / 32 * 32;
    linear_cut c = {.rows = M, .panels = (N + NR - 1) / NR, .rows_per_block = fitting > 512 ? 512 : fitting};
    c.share = (c.panels + tasks - 1) / tasks;
    if (M >= 128 * threads) {
        const long blocks = ((M + c.rows_per_block - 1) / c.rows_per_block + threads - 1) / threads * threads;
        c.rows_per_block = ((M + blocks - 1) / blocks + 31) / 32 * 32;
        if (parts > 1 && c.share < 4) c.share = 4;
    }
    c.shares = (c.panels + c.share - 1) / c.share;
    return c;
}

static inline long cut_tasks(const linear_cut *c)
{
    return c->shares * ((c->rows + c->rows_per_block - 1) / c->rows_per_block);
}

static inline linear_part cut_part(const linear_cut *c, long task)
{
    linear_part part = {.begin = task / c->shares * c->rows_per_block, .first = task % c->shares * c->share};
    part.end = part.begin + c->rows_per_block < c->rows ? part.begin + c->rows_per_block : c->rows;
    part.last = part.first + c->share < c->panels ? part.first + c->share : c->panels;
    return part;
}

/* A part's rows in tiles of nearly equal height: how many, and where tile t begins. */
static inline long part_tiles(const linear_part *part) { return (part->end - part->begin + MR - 1) / MR; }
static inline long tile_begin(const linear_part *part, long t)
{
    return part->begin + (part->end - part->begin) * t / part_tiles(part);
}

#endif
