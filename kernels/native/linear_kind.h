/* All tiles of one KIND. Few rows: several panels side by side keep enough independent chains in flight. */
#define JOIN4(a, k, r, n) a##k##_##r##x##n
#define NAME4(a, k, r, n) JOIN4(a, k, r, n)
#define NAME(r, n) NAME4(tile_, KIND, r, n)
#define ROWS 1
#define NP 4
#define TILE NAME(1, 4)
#include "linear_tile.h"
#define ROWS 1
#define NP 1
#define TILE NAME(1, 1)
#include "linear_tile.h"
#define ROWS 2
#define NP 2
#define TILE NAME(2, 2)
#include "linear_tile.h"
#define ROWS 2
#define NP 1
#define TILE NAME(2, 1)
#include "linear_tile.h"
#define ROWS 3
#define NP 2
#define TILE NAME(3, 2)
#include "linear_tile.h"
#define ROWS 3
#define NP 1
#define TILE NAME(3, 1)
#include "linear_tile.h"
#define ROWS 4
#define NP 1
#define TILE NAME(4, 1)
#include "linear_tile.h"
#define ROWS 5
#define NP 1
#define TILE NAME(5, 1)
#include "linear_tile.h"
#define ROWS 6
#define NP 1
#define TILE NAME(6, 1)
#include "linear_tile.h"

#define JOIN2(a, k) a##k
#define NAME2(a, k) JOIN2(a, k)
/* `rows` rows times the next panels before `end`; returns how many panels it took. */
static long NAME2(step_, KIND)(const linear_job *j, long row, long panel, long end, int rows)
{
    long np = rows == 1 && panel + 4 <= end ? 4 : (rows == 2 || rows == 3) && panel + 2 <= end ? 2 : 1;
    switch (rows) {
    case 1: (np == 4 ? NAME(1, 4) : NAME(1, 1))(j, row, panel); break;
    case 2: (np == 2 ? NAME(2, 2) : NAME(2, 1))(j, row, panel); break;
    case 3: (np == 2 ? NAME(3, 2) : NAME(3, 1))(j, row, panel); break;
    case 4: NAME(4, 1)(j, row, panel); break;
    case 5: NAME(5, 1)(j, row, panel); break;
    default: NAME(6, 1)(j, row, panel); break;
    }
    return np;
}
#undef KIND
#undef NAME
#undef NAME4
#undef JOIN4
#undef NAME2
#undef JOIN2
