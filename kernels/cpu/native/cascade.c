/* Find the parts of the context whose blocks several decode rows share, and decide whether to read them once.
 *
 * Equal block ids mean equal KV, independent of what precedes them: partitions are processed one after another, which gives a tree of
 * prefixes any depth. Rows are sorted by their block ids; those that share are neighbours then.
 */
#include <string.h>
#include "cascade.h"

#define UNIT_ROWS 48   /* query rows that go together: past this a tile's products, not its loads, are the cost */
#define FEWEST_ROWS 12 /* units are not cut below this to occupy more threads */
#define TASKS_WANTED 3 /* per thread */

typedef struct {
    const int32_t *tables, *context_lens;
    long max_blocks, block_size, part;
} stretch;

/* Whole tiles that a row's context has in the partition. */
static long tiles_of(const stretch *s, long row)
{
    long tiles = (s->context_lens[row] - s->part * PART) / TILE;
    return tiles > PART / TILE ? PART / TILE : tiles;
}

/* Whole tiles from the partition's begin on in which two rows have equal blocks; `order`: < 0 where a sorts before b. */
static long compare(const stretch *s, long a, long b, long *order)
{
    const int32_t *of_a = s->tables + a * s->max_blocks, *of_b = s->tables + b * s->max_blocks;
    const long tiles_a = tiles_of(s, a), tiles_b = tiles_of(s, b), tiles = tiles_a < tiles_b ? tiles_a : tiles_b;
    const long begin = s->part * PART, end = begin + tiles * TILE;
    long block = begin / s->block_size, blocks = (end + s->block_size - 1) / s->block_size;
    while (block < blocks && of_a[block] == of_b[block]) block++;
    if (block == blocks) {
        *order = tiles_a != tiles_b ? tiles_a - tiles_b : a - b;
        return tiles;
    }
    *order = of_a[block] < of_b[block] ? -1 : 1;
    const long same = block * s->block_size - begin;
    return same > 0 ? same / TILE : 0;
}

/* Put `row` into its place among `count` sorted rows. */
static void insert(const stretch *s, int32_t *sorted, long count, long row)
{
    long low = 0, high = count, order, middle = count - 1; /* the order of the partition before often holds */
    for (; low < high; middle = (low + high) / 2) {
        compare(s, row, sorted[middle], &order);
        if (order < 0) high = middle;
        else low = middle + 1;
    }
    memmove(sorted + low + 1, sorted + low, (count - low) * sizeof *sorted);
    sorted[low] = (int32_t)row;
}

/* One unit of sorted rows; common[i]: tiles that row i shares with row i - 1. */
static void add_unit(cascade *c, const stretch *s, const int32_t *rows, const int32_t *common, long count)
{
    c->part[c->units++] = (int32_t)s->part;
    for (long i = 0; i < count; i++) {
        const int32_t before = i ? common[i] : 0, after = i + 1 < count ? common[i + 1] : 0;
        const long member = c->members++;
        c->row[member] = rows[i];
        c->common[member] = before;
        c->tiles[member] = before > after ? before : after;
        c->slot[rows[i] * c->parts + s->part] = (int32_t)member;
        c->shares[rows[i]] = 1;
    }
    c->first[c->units] = (int32_t)c->members;
}

/* Rows that share at least a tile, in units of at most `most` rows of nearly equal size. */
static void add_group(cascade *c, const stretch *s, const int32_t *rows, const int32_t *common, long count, long most)
{
    const long units = (count + most - 1) / most;
    for (long u = 0; u < units; u++) {
        const long begin = count * u / units, end = count * (u + 1) / units;
        if (end - begin > 1) add_unit(c, s, rows + begin, common + begin, end - begin);
    }
}

/* Groups of one partition. `sorted` has room for all rows, `common` as well. */
static void share_part(cascade *c, const stretch *s, int32_t *sorted, long count, int32_t *common, long most)
{
    long order, begin = 0;
    for (long i = 1; i < count; i++) common[i] = (int32_t)compare(s, sorted[i - 1], sorted[i], &order);
    for (long i = 1; i <= count; i++) {
        if (i < count && common[i] > 0) continue;
        if (i - begin > 1) add_group(c, s, sorted + begin, common + begin, i - begin, most);
        begin = i;
    }
}

static long saved_tokens(const cascade *c)
{
    long saved = 0;
    for (long m = 0; m < c->members; m++) saved += c->common[m] * TILE;
    return saved;
}

static void share_all(cascade *c, stretch *s, int32_t *sorted, int32_t *common, long most)
{
    long count = 0;
    c->units = c->members = c->first[0] = 0;
    memset(c->slot, 0xff, c->rows * c->parts * sizeof *c->slot);
    memset(c->shares, 0, c->rows * sizeof *c->shares);
    for (s->part = 0; s->part < c->parts; s->part++) {
        long kept = 0, had = count;
        int32_t before[had + 1];
        memcpy(before, sorted, had * sizeof *before);
        if (s->part == 0)
            for (long row = 0; row < c->rows; row++) kept += tiles_of(s, row) > 0 ? insert(s, sorted, kept, row), 1 : 0;
        for (long i = 0; i < had; i++) kept += tiles_of(s, before[i]) > 0 ? insert(s, sorted, kept, before[i]), 1 : 0;
        if (kept < 2) return;
        share_part(c, s, sorted, count = kept, common, most);
    }
}

long kr_cascade_words(long rows, long parts) { return CASCADE_HEADER + 5 * rows * parts + 3 * rows + 2; }

/* Fill `words` with the schedule of the first `rows` sequences, one new token each, over the first `parts` partitions.
 * tables: [rows][max_blocks]. `worth`: fewest tokens of KV, summed over the rows, that must be saved; below it nothing
 * is shared. Returns the tokens saved, in a layer without a window. */
long kr_cascade_plan(int32_t *words, const int32_t *tables, const int32_t *context_lens, long rows, long max_blocks,
                     long parts, long block_size, long group, long kv_heads, long threads, long worth)
{
    memset(words, 0, CASCADE_HEADER * sizeof *words);
    words[CASCADE_ROWS] = (int32_t)rows, words[CASCADE_PARTS] = (int32_t)parts;
    if (rows < 2 || parts < 1) return 0;
    cascade c = cascade_at(words);
    stretch s = {tables, context_lens, max_blocks, block_size, 0};
    int32_t *sorted = c.shares + rows, *common = sorted + rows;
    long most = UNIT_ROWS / group > 2 ? UNIT_ROWS / group : 2;
    share_all(&c, &s, sorted, common, most);
    while (threads > 1 && c.units && c.units * kv_heads < TASKS_WANTED * threads && most * group >= 2 * FEWEST_ROWS && most > 3)
        share_all(&c, &s, sorted, common, most /= 2);
    const long saved = saved_tokens(&c);
    if (saved < worth || !c.units) return 0;
    words[CASCADE_UNITS] = (int32_t)c.units, words[CASCADE_MEMBERS] = (int32_t)c.members;
    words[CASCADE_SAVED] = (int32_t)saved;
    return saved;
}
