#ifndef KVRELAY_MOVE_H
#define KVRELAY_MOVE_H

#include <stdint.h>

#define OUT_OF_BOUNDS (-1) /* results of kt_move, beside 0 */
#define CANCELLED (-2)

/* The same as _Job in mover.py. */
struct move {
    uint64_t source, target; /* addresses */
    int64_t source_bytes, target_bytes;
    int64_t num_rows;
    const int64_t *source_offset, *target_offset, *num_bytes; /* [num_rows] */
    int64_t num_chunks, pieces_per_chunk, piece_bytes;
    const int64_t *pieces;        /* [num_chunks, pieces_per_chunk] offsets in the target */
    const uint8_t *is_checked;    /* [num_chunks], NULL: all */
    uint8_t *scratch;             /* a chunk's bytes, where it has several pieces */
    uint64_t *found;              /* [num_chunks] */
    int64_t *landed;              /* bytes so far */
    int64_t row, inside;          /* the cursor: this many bytes of this row are there */
    int64_t hashed;               /* chunks so far */
    int64_t hash_ns;              /* of hashing apart from copying */
    int64_t is_cancelled;         /* set by another thread: end at the next step */
    int64_t is_done, problem;     /* set by a worker: kt_move's result */
    struct move *next;            /* in a worker's queue */
};

int kt_move(struct move *m);

#endif
