/* Causal attention over KV blocks read in place, for decode rows and prompt chunks alike.
 *
 * A task is one tile of a sequence's tokens times one KV head; its rows are the tile's tokens times the query
 * heads that share the KV head, so each key and value is loaded once for all of them. Context is walked in TILE
 * tokens with an online softmax inside partitions of PART tokens, and partitions are merged in order. Tile and
 * partition borders are absolute positions, so a row's result depends on nothing but its own query and context:
 * decode equals prefill, chunked equals whole, alone equals batched, split over threads equals not, bit for bit.
 *
 * bf16 queries over a bf16 cache take products of bf16 pairs where the processor has them (attention_dot.h), decode and
 * chunks alike, by AMX tiles where it has those (attention_amx.h); all else is computed in float32 (attention_tile.h).
 *
 * Where decode rows share blocks (cascade.h), a unit of them goes through the tiles that they share together, and each
 * then continues alone from its sums there: the same products in the same order as alone, with KV read once.
 *
 * Source: FlashAttention-2 (Dao 2023), Flash-Decoding (Dao et al. 2023), PagedAttention (Kwon et al. 2023),
 * cascade inference (Ye et al. 2024).
 */
#pragma GCC optimize("no-tree-vectorize") /* its vectors are written out; gcc's own of the tails take 4 s more to compile */
#include <string.h>
#include "attention_amx.h"
#include "attention_dot.h"
#include "attention_tile.h"
#include "pool.h"

static long first_visible(const attention_job *j, long position)
{
    return j->window > 0 && position >= j->window ? position - j->window + 1 : 0;
}

/* One tile of context, of the tokens base .. end - 1 in s->table, for `rows` rows from `row` on. */
static __attribute__((noinline)) void attend_tile(tile_state *s, long row, long rows, long base, long end)
{
    const long next = base + TILE, left = end - next, n = left < 0 ? end - base : TILE;
#if HAS_DOT
    if (s->j->dot) gather_dot(s, base, n);
    else
#endif
        gather(s, base, n);
    if (left > 0 && rows <= ROWS_BOUND) touch(s, next, left < TILE ? left : TILE);
#if HAS_TILES
    if (s->j->amx) {
        fill_values(s, n);
        attend_amx(s, row, rows, base);
    } else
#endif
#if HAS_DOT
    if (s->j->dot) attend_dots(s, row, rows, base);
    else
#endif
        attend_floats(s, row, rows, base, n);
}

/* Where the sums of a member's rows of one head are. */
static float *slot_at(const attention_job *j, long member, long kv_head)
{
    return j->slots + (member * j->kv_heads + kv_head) * j->slot_floats;
}

/* The member that this sequence is in a unit of the partition, if its rows see any of what that shares; else -1. */
static long member_of(const tile_state *s, long part)
{
    const cascade *c = &s->j->shared;
    if (c->units == 0 || s->sequence >= c->rows) return -1;
    const long member = c->slot[s->sequence * c->parts + part];
    return member >= 0 && s->kv_begin < part * PART + c->tiles[member] * TILE ? member : -1;
}

/* One partition's own softmax sums, from zero or from a unit's sums, into part / part_best / part_total. */
static void attend_partition(tile_state *s, long part)
{
    const attention_job *j = s->j;
    const long begin = part * PART, end = begin + PART < s->kv_end ? begin + PART : s->kv_end;
    const long visible = s->kv_begin / TILE * TILE, member = member_of(s, part);
    long first = visible > begin ? visible : begin;
    if (member >= 0) {
        const float *from = slot_at(j, member, s->kv_head), *best = from + s->rows * j->padded;
        memcpy(s->part, from, s->rows * j->padded * sizeof(float));
        memcpy(s->part_best, best, s->rows * sizeof(float));
        memcpy(s->part_total, best + s->rows, s->rows * sizeof(float));
        first = begin + j->shared.tiles[member] * TILE;
    } else {
        start_part(s);
    }
    if (first < end && s->rows <= ROWS_BOUND) touch(s, first, end - first < TILE ? end - first : TILE);
    for (long base = first; base < end; base += TILE) attend_tile(s, 0, s->rows, base, end);
}

/* Factor of sums whose best score is less by -x than the new one. */
static float factor(const attention_job *j, float x) { return x == 0 ? 1.0f : j->dot ? exp2f(x) : expf(x); }

/* Fold one partition's sums into the running ones of the same rows. */
static void merge(const tile_state *s, const float *part, const float *part_best, const float *part_total)
{
    const long padded = s->j->padded;
    for (long r = 0; r < s->rows; r++) {
        if (part_best[r] == -INFINITY) continue;
        float old = s->best[r], best = part_best[r] > old ? part_best[r] : old;
        float keep = old == -INFINITY ? 0.0f : factor(s->j, old - best), add = factor(s->j, part_best[r] - best);
        s->best[r] = best;
        s->total[r] = s->total[r] * keep + part_total[r] * add;
        for (long d = 0; d < padded; d += VL)
            vstore(s->out + r * padded + d, vload(s->out + r * padded + d) * keep + vload(part + r * padded + d) * add);
    }
}

static void place(tile_state *s, const attention_job *j, long index)
{
    const long tile = index / j->kv_heads, sequence = j->tiles[2 * tile], offset = j->tiles[2 * tile + 1];
    const long start = j->query_starts[sequence], length = j->query_starts[sequence + 1] - start;
    const long tokens = length - offset < j->tile_tokens ? length - offset : j->tile_tokens;
    const long first_position = j->context_lens[sequence] - length + offset;
    s->j = j, s->sequence = sequence;
    s->table = j->tables + sequence * j->max_blocks;
    s->kv_head = index % j->kv_heads;
    s->rows = tokens * j->group;
    for (long t = 0; t < tokens; t++) s->token[t] = start + offset + t, s->position[t] = first_position + t;
    s->kv_begin = first_visible(j, first_position);
    s->kv_end = first_position + tokens;
}

/* The queries as they are, rows filled up with zeros. */
static void load_pairs(tile_state *s)
{
    const attention_job *j = s->j;
    for (long r = 0; r < s->rows; r++) {
        const long from = s->token[r / j->group] * j->q_stride + (s->kv_head * j->group + r % j->group) * j->q_head;
        bf16 *to = (bf16 *)s->q + r * j->padded;
        memcpy(to, (const bf16 *)j->q + from, j->dim * sizeof(bf16));
        memset(to + j->dim, 0, (j->padded - j->dim) * sizeof(bf16));
    }
}

/* Lay out this thread's scratch and load the queries, those of floats times scale. */
static void prepare(tile_state *s)
{
    const attention_job *j = s->j;
    const long rows = s->rows, padded = j->padded;
    float *at = thread_scratch(((rows * 3 + TILE * 2) * padded + rows * TILE + rows * 4 + 64) * sizeof(float));
    s->q = at, at += rows * padded;
    s->out = at, at += rows * padded;
    s->part = at, at += rows * padded;
    s->keys = at, at += TILE * padded;
    s->values = at, at += TILE * padded;
    s->scores = at, at += rows * TILE;
    s->best = at, s->total = at + rows, s->part_best = at + 2 * rows, s->part_total = at + 3 * rows;
    if (j->dot) {
        load_pairs(s);
        return;
    }
    memset(s->values, 0, TILE * padded * sizeof(float));
    for (int t = 0; t < TILE; t++) s->key_scale[t] = s->value_scale[t] = 1;
    for (long r = 0; r < rows; r++) {
        long from = s->token[r / j->group] * j->q_stride + (s->kv_head * j->group + r % j->group) * j->q_head;
        long d = 0;
        for (; d + VL <= j->dim; d += VL) vstore(s->q + r * padded + d, vload_any(j->q, from + d, j->wide) * j->scale);
        for (; d < j->dim; d++) s->q[r * padded + d] = load_any(j->q, from + d, j->wide) * j->scale;
    }
}

static void start_sums(tile_state *s)
{
    memset(s->out, 0, s->rows * s->j->padded * sizeof(float));
    for (long r = 0; r < s->rows; r++) s->best[r] = -INFINITY, s->total[r] = 0;
}

static void finish(const tile_state *s)
{
    const attention_job *j = s->j;
    for (long r = 0; r < s->rows; r++) {
        long to = (s->token[r / j->group] * j->heads + s->kv_head * j->group + r % j->group) * j->dim;
        const float factor = 1.0f / s->total[r], *row = s->out + r * j->padded;
        long d = 0;
        for (; d + VL <= j->dim; d += VL) vstore_any(j->out, to + d, vload(row + d) * factor, j->wide);
        for (; d < j->dim; d++) store_any(j->out, to + d, row[d] * factor, j->wide);
    }
}

static long unit_tasks(const attention_job *j) { return j->shared.units * j->kv_heads; }

/* Whether the tiles up to `tile` of a unit's partition lie before every window. */
static int is_unseen(const tile_state *s, long begin, long members, long end)
{
    for (long i = begin; i < members; i++)
        if (first_visible(s->j, s->position[i]) < end) return 0;
    return 1;
}

/* The tiles that a unit's rows share, each read once for every run of members that have it in common. */
static void unit_task(const attention_job *j, long index)
{
    const cascade *c = &j->shared;
    const long unit = index / j->kv_heads, first = c->first[unit], members = c->first[unit + 1] - first;
    const long begin = c->part[unit] * (long)PART, group = j->group;
    const int32_t *common = c->common + first, *tiles = c->tiles + first;
    tile_state s = {.j = j, .kv_head = index % j->kv_heads, .rows = members * group};
    long most = 0;
    for (long i = 0; i < members; i++) {
        s.token[i] = j->query_starts[c->row[first + i]], s.position[i] = j->context_lens[c->row[first + i]] - 1;
        most = tiles[i] > most ? tiles[i] : most;
    }
    if (is_unseen(&s, 0, members, begin + most * TILE)) return;
    s.kv_end = most * TILE; /* how much its heads read, for touch() */
    prepare(&s);
    start_part(&s);
    for (long tile = 0; tile < most; tile++) {
        for (long from = 0, to; from < members; from = to) {
            for (to = from + 1; to < members && common[to] > tile;) to++;
            const long base = begin + tile * TILE;
            if (to - from == 1 || is_unseen(&s, from, to, base + TILE)) continue;
            s.table = j->tables + c->row[first + from] * j->max_blocks;
            attend_tile(&s, from * group, (to - from) * group, base, begin + tiles[from] * TILE);
        }
    }
    for (long i = 0; i < members; i++) {
        float *to = slot_at(j, first + i, s.kv_head), *best = to + group * j->padded;
        memcpy(to, s.part + i * group * j->padded, group * j->padded * sizeof(float));
        memcpy(best, s.part_best + i * group, group * sizeof(float));
        memcpy(best + group, s.part_total + i * group, group * sizeof(float));
    }
}

/* Whether an item is of a row that shares: it waits for the units. */
static int waits(const attention_job *j, long item)
{
    const long sequence = j->tiles[2 * (item / j->kv_heads)];
    return j->shared.units > 0 && sequence < j->shared.rows && j->shared.shares[sequence];
}

static void attend_item(const attention_job *j, long item)
{
    tile_state s;
    place(&s, j, item);
    prepare(&s);
    start_sums(&s);
    for (long part = s.kv_begin / PART; part * PART < s.kv_end; part++) {
        attend_partition(&s, part);
        merge(&s, s.part, s.part_best, s.part_total);
    }
    finish(&s);
}

static void whole_task(void *arg, long index)
{
    const attention_job *j = arg;
    const long item = index - unit_tasks(j);
    if (item < 0) unit_task(j, index);
    else if (!waits(j, item)) attend_item(j, item);
}

static void waiting_task(void *arg, long item)
{
    if (waits(arg, item)) attend_item(arg, item);
}

static float *part_at(const attention_job *j, long index, long part)
{
    return j->parts + (index * j->max_parts + part) * j->part_floats;
}

static void split_task(void *arg, long index)
{
    const attention_job *j = arg;
    tile_state s;
    const long own = index - unit_tasks(j), item = own / j->max_parts, part = own % j->max_parts;
    if (own < 0) {
        unit_task(j, index);
        return;
    }
    place(&s, j, item);
    if (part * PART >= s.kv_end || (part + 1) * PART <= s.kv_begin || member_of(&s, part) >= 0) return;
    prepare(&s);
    attend_partition(&s, part);
    float *to = part_at(j, item, part);
    memcpy(to, s.part, s.rows * j->padded * sizeof(float));
    memcpy(to + s.rows * j->padded, s.part_best, 2 * s.rows * sizeof(float)); /* best, then total */
}

static void merge_task(void *arg, long index)
{
    const attention_job *j = arg;
    tile_state s;
    place(&s, j, index);
    prepare(&s);
    start_sums(&s);
    for (long part = s.kv_begin / PART; part * PART < s.kv_end; part++) {
        if (member_of(&s, part) >= 0) {
            attend_partition(&s, part);
            merge(&s, s.part, s.part_best, s.part_total);
            continue;
        }
        const float *from = part_at(j, index, part), *best = from + s.rows * j->padded;
        merge(&s, from, best, best + s.rows);
    }
    finish(&s);
}

/* Tokens of one tile for `group` query heads per KV head. */
long kr_attention_tile_tokens(long group) { return group >= ROWS_WANTED ? 1 : ROWS_WANTED / group; }

/* Fill tiles with (sequence, offset) pairs, longest contexts first within their sequence; returns how many. */
long kr_attention_tiles(const int32_t *query_starts, long sequences, long tile_tokens, int32_t *tiles)
{
    long count = 0;
    for (long s = 0; s < sequences; s++) {
        long length = query_starts[s + 1] - query_starts[s];
        for (long i = (length + tile_tokens - 1) / tile_tokens - 1; i >= 0; i--, count++) {
            tiles[2 * count] = (int32_t)s;
            tiles[2 * count + 1] = (int32_t)(i * tile_tokens);
        }
    }
    return count;
}

/* q [T, heads, dim] strided, out contiguous; kv: one layer's blocks [num_parts, block_size, kv_heads, row],
 * rows of kv_kind, each contiguous and block_bytes behind the one before. window, softcap: 0 for none. schedule: from kr_cascade_plan. */
void kr_attention(pool *p, int wide, const void *q, void *out, const void *kv, const int32_t *query_starts,
                  const int32_t *context_lens, const int32_t *tables, long max_blocks, const int32_t *tiles,
                  long num_tiles, long heads, long kv_heads, long dim, long block_size, long q_stride, long q_head,
                  long max_query_len, long max_context_len, long window, float scale, float softcap, int kv_kind,
                  long num_parts, long block_bytes, int32_t *schedule)
{
    attention_job j = {.q = q, .out = out, .kv = kv, .query_starts = query_starts, .context_lens = context_lens,
                       .tables = tables, .tiles = tiles, .max_blocks = max_blocks, .num_tiles = num_tiles,
                       .heads = heads, .kv_heads = kv_heads, .dim = dim, .padded = (dim + NC - 1) / NC * NC,
                       .block_size = block_size, .q_stride = q_stride, .q_head = q_head, .group = heads / kv_heads,
                       .window = window, .scale = scale, .softcap = softcap, .wide = wide,
                       .kv_kind = kv_kind, .dot = HAS_DOT && !wide && kv_kind == KV_BF16,
                       .amx = uses_tiles() && !wide && kv_kind == KV_BF16, .num_parts = num_parts,
                       .block_bytes = block_bytes,
                       .shared = cascade_at(schedule)};
    j.tile_tokens = kr_attention_tile_tokens(j.group);
    long items = num_tiles * kv_heads, rows = (max_query_len < j.tile_tokens ? max_query_len : j.tile_tokens) * j.group;
    j.max_parts = (max_context_len + PART - 1) / PART;
    j.slot_floats = j.group * (j.padded + 2);
    if (j.shared.units) j.slots = pool_scratch(p, 2, j.shared.members * kv_heads * j.slot_floats * sizeof(float));
    if (pool_threads(p) == 1 || j.max_parts == 1 || items >= 4L * pool_threads(p)) {
        j.by_sequence = num_tiles >= 2L * pool_threads(p);
        pool_run(p, whole_task, &j, unit_tasks(&j) + items);
        if (j.shared.units) pool_run(p, waiting_task, &j, items);
        return;
    }
    j.part_floats = rows * (j.padded + 2);
    j.parts = pool_scratch(p, 1, items * j.max_parts * j.part_floats * sizeof(float));
    pool_run(p, split_task, &j, unit_tasks(&j) + items * j.max_parts);
    pool_run(p, merge_task, &j, items);
}
