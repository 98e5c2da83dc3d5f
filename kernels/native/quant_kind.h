/* All tiles that take their integers from SOURCE: 4 or 8 bits, or (0) floats in a scratch panel. */
#define JOIN4(a, k, r, n) a##k##_##r##x##n
#define NAME4(a, k, r, n) JOIN4(a, k, r, n)
#define NAME(r, n) NAME4(quant_, SOURCE, r, n)
#if SOURCE
#define PER (32 / SOURCE)
#else
#define PER 8
#endif
#if SOURCE
#define ROWS 1
#define NP 4
#define TILE NAME(1, 4)
#include "quant_tile.h"
#define ROWS 2
#define NP 2
#define TILE NAME(2, 2)
#include "quant_tile.h"
#endif
#define ROWS 1
#define NP 1
#define TILE NAME(1, 1)
#include "quant_tile.h"
#define ROWS 2
#define NP 1
#define TILE NAME(2, 1)
#include "quant_tile.h"
#define ROWS 3
#define NP 1
#define TILE NAME(3, 1)
#include "quant_tile.h"
#define ROWS 4
#define NP 1
#define TILE NAME(4, 1)
#include "quant_tile.h"
#define ROWS 5
#define NP 1
#define TILE NAME(5, 1)
#include "quant_tile.h"
#define ROWS 6
#define NP 1
#define TILE NAME(6, 1)
#include "quant_tile.h"

#define JOIN2(a, k) a##k
#define NAME2(a, k) JOIN2(a, k)
static const quant_tile NAME2(quant_narrow_, SOURCE)[MR + 1] = {
    0, NAME(1, 1), NAME(2, 1), NAME(3, 1), NAME(4, 1), NAME(5, 1), NAME(6, 1),
};
#if SOURCE
static const quant_tile NAME2(quant_wide_, SOURCE)[MR + 1] = {
    0, NAME(1, 4), NAME(2, 2), NAME(3, 1), NAME(4, 1), NAME(5, 1), NAME(6, 1),
};
#endif
#undef SOURCE
#undef PER
#undef NAME
#undef NAME4
#undef JOIN4
#undef NAME2
#undef JOIN2
