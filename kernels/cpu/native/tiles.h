/* All tiles of one KIND, each made by TILE_FILE, and tables of them by their rows: narrow_<KIND>[rows], against one panel,
 * and, unless NARROW, wide_<KIND>[rows], where few rows take side_by_side(rows) panels to keep enough chains in flight.
 * The includer defines KIND (a number), TILE_FILE and TILE_TYPE. */
#define JOIN4(a, k, r, n) a##k##_##r##x##n
#define NAME4(a, k, r, n) JOIN4(a, k, r, n)
#define NAME(r, n) NAME4(tile_, KIND, r, n)
#define JOIN2(a, k) a##k
#define NAME2(a, k) JOIN2(a, k)

#define NP 1
#define ROWS 1
#include TILE_FILE
#undef ROWS
#define ROWS 2
#include TILE_FILE
#undef ROWS
#define ROWS 3
#include TILE_FILE
#undef ROWS
#define ROWS 4
#include TILE_FILE
#undef ROWS
#define ROWS 5
#include TILE_FILE
#undef ROWS
#define ROWS 6
#include TILE_FILE
#undef ROWS
#undef NP
static const TILE_TYPE NAME2(narrow_, KIND)[MR + 1] = {
    0, NAME(1, 1), NAME(2, 1), NAME(3, 1), NAME(4, 1), NAME(5, 1), NAME(6, 1),
};

#ifndef NARROW
#ifndef ALONE
#define ALONE 4 /* panels that one row takes */
#endif
#define NP ALONE
#define ROWS 1
#include TILE_FILE
#undef ROWS
#undef NP
#define NP 2
#define ROWS 2
#include TILE_FILE
#undef ROWS
#define ROWS 3
#include TILE_FILE
#undef ROWS
#undef NP
static const TILE_TYPE NAME2(wide_, KIND)[MR + 1] = {
    0, NAME(1, ALONE), NAME(2, 2), NAME(3, 2), NAME(4, 1), NAME(5, 1), NAME(6, 1),
};
#endif

#ifndef KVRELAY_SIDE_BY_SIDE
#define KVRELAY_SIDE_BY_SIDE
static inline long side_by_side(long rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#endif
#undef KIND
#undef ALONE
#undef NAME
#undef NAME4
#undef JOIN4
#undef NAME2
#undef JOIN2
