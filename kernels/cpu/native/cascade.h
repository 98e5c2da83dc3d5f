/* Which decode rows share the KV of which parts of the context: computed once per step (cascade.c), used in every layer.
 *
 * A partition of PART tokens is shared by the rows whose block ids are equal over its first tiles. A unit is a few such
 * rows, its members, sorted so that those with more tiles in common are neighbours: tile t is read once for every run of
 * members in which each has more than t tiles in common with the one before it.
 */
#ifndef KVRELAY_CASCADE_H
#define KVRELAY_CASCADE_H

#include <stdint.h>

#define TILE 64  /* tokens whose keys and values are laid out at a time */
#define PART 512 /* tokens whose softmax sums start from nothing */

enum { CASCADE_UNITS, CASCADE_MEMBERS, CASCADE_ROWS, CASCADE_PARTS, CASCADE_SAVED, CASCADE_HEADER = 8 };

typedef struct {
    long units, members, rows, parts; /* rows: of decode; parts: stride of `slot` */
    int32_t *first;                   /* [units + 1] member that a unit begins with */
    int32_t *part;                    /* [units] its partition */
    int32_t *row;                     /* [members] decode row */
    int32_t *common;                  /* [members] tiles in common with the member before, 0 for a unit's first */
    int32_t *tiles;                   /* [members] tiles in common with any member */
    int32_t *slot;                    /* [rows][parts] member, or -1; only for rows that share */
    int32_t *shares;                  /* [rows] whether any partition is shared */
} cascade;

/* A schedule's arrays in memory of kr_cascade_words(rows, parts) words that begin with the header. */
static inline cascade cascade_at(int32_t *words)
{
    const long rows = words[CASCADE_ROWS], parts = words[CASCADE_PARTS], most = rows * parts;
    cascade c = {.units = words[CASCADE_UNITS], .members = words[CASCADE_MEMBERS], .rows = rows, .parts = parts};
    c.first = words + CASCADE_HEADER;
    c.part = c.first + most / 2 + 1;
    c.row = c.part + most / 2;
    c.common = c.row + most;
    c.tiles = c.common + most;
    c.slot = c.tiles + most;
    c.shares = c.slot + most;
    return c;
}

#endif
