/* Extension module `kvrelay_candidates`: `rank`, which does what PlainRanking of router/policies/joint.py does, to the same bits
 * (so it is compiled without fused operations): the shortlists of two tables of workers, and their candidates, best first.
 *
 * Terms and their order are those of router/types.py, then joint's own.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SHORTLIST 6
#define MOST_PAIRS (SHORTLIST * SHORTLIST)
#define MAX_CANDIDATES 16
#define NONE (-1)

enum {
    COMPUTE, QUEUE, PRESSURE, LOAD, HANDOFF, TRANSFER, DECODE_LOAD, DECODE_MEMORY, DECODE_WAIT, STALL,
    MISS, REPLICA, TENANT, SPREAD, OVERDUE, NUM_TERMS
};

/* The columns of a table, in the order of WorkerRow: integers, then floats. */
enum {
    NODES, HELD, EXPECTED, IN_ANY_TIER, QUEUED_TOKENS, QUEUED_REQUESTS, OVERDUE_TOKENS, SEQUENCES, WAITING, FREE_BLOCKS, TURN, BLOCK_SIZE,
    KV_BYTES_PER_TOKEN, DECODES, NUM_INTS, PREFILL_RATE = NUM_INTS, DECODE_STEP, RECENT_STEP, KV_RATE, AGE, OUTPUT, NUM_COLUMNS
};

/* What joint.py passes as `numbers`, in this order. Integers are exact. */
struct numbers {
    double num_tokens, max_tokens, width, is_local, is_remote, needs_decode;
    double stored_tokens, draw, unreported_share, arrivals_per_s, tenant_excess;
    double ttft_s, tpot_s, has_slo;
    double tier_rate, other_node_share, unhidden_share, handoff_s, displaced_share;
    double decode_load_weight, both_load_weight, stall_weight, next_stall_weight, max_pressure, missed_s;
    double expected_output_tokens, local_prefill_tokens;
    double sure_share, lost_share, fresh_s, same_share, overdue_weight, max_excess, golden, unit;
};
#define NUM_NUMBERS (sizeof(struct numbers) / sizeof(double))

struct table {
    Py_buffer views[NUM_COLUMNS];
    int num_open;
    Py_ssize_t count;
    struct { const char *data; Py_ssize_t stride; } columns[NUM_COLUMNS];
};

/* A prompt in blocks of one size. */
struct blocks {
    int64_t size, usable_tokens, stored_tokens; /* tokens: in whole blocks, without the last token of the prompt; in the cluster's store */
    int64_t full, now, grown;                   /* blocks: full ones of the prompt, those to reserve, those that it may grow to */
};

/* One worker's part of the work: seconds, and tokens to compute. */
struct work {
    double compute_s, queue_s, load_s;
    int64_t uncached;
};

struct ranking {
    struct numbers n;
    struct table prefills, decodes;
    struct blocks blocks; /* of the last size that was asked for: most workers have the same */
    struct work *work; /* of the prefill workers, then of the decode workers */
    double pressure;   /* harm per second of prefill */
    int is_split;      /* some workers compute prompts and do not decode */
    double load_weight; /* of a step, for each sequence on a decode worker */
    double missed_s;    /* cost of a target that is lost to a stall; 0 beside prefill workers under an SLO, to which steps are held */
    double new_share;   /* of the prompt, that no worker holds, where all do both under an SLO; else 0 */
    double least_s, held_share, lacking_share; /* see replica_s; lacking_share 0: no replica is wanted */
};

struct candidate {
    Py_ssize_t prefill, decode; /* rows, or NONE */
    double parts[NUM_TERMS], score, units;
    int64_t source_turn, target_turn;
};

/* The best rows, best first: by score in whole units, then by turn, then by row. */
struct shortlist {
    int count;
    struct { double units; int64_t turn; Py_ssize_t row; } best[SHORTLIST];
};

/* ---- arithmetic; in the same order as in Python */

static inline int64_t int_at(const struct table *table, int column, Py_ssize_t row)
{
    int64_t value;
    memcpy(&value, table->columns[column].data + row * table->columns[column].stride, sizeof value);
    return value;
}

static inline double float_at(const struct table *table, int column, Py_ssize_t row)
{
    double value;
    memcpy(&value, table->columns[column].data + row * table->columns[column].stride, sizeof value);
    return value;
}

static inline double least(double a, double b) { return b < a ? b : a; }
static inline double most(double a, double b) { return b > a ? b : a; }
static inline int64_t least_int(int64_t a, int64_t b) { return b < a ? b : a; }
static inline int64_t most_int(int64_t a, int64_t b) { return b > a ? b : a; }
static inline int64_t blocks_of(int64_t tokens, int64_t size) { return (tokens + size - 1) / size; }

static inline const struct blocks *in_blocks(struct ranking *r, int64_t size)
{
    if (size == r->blocks.size) return &r->blocks;
    int64_t num_tokens = (int64_t)r->n.num_tokens, most_tokens = num_tokens + (int64_t)least(r->n.max_tokens, r->n.expected_output_tokens);
    r->blocks = (struct blocks){
        size, (num_tokens - 1) / size * size, (int64_t)r->n.stored_tokens / size * size,
        num_tokens / size, blocks_of(num_tokens + 1, size), blocks_of(most_tokens, size),
    };
    return &r->blocks;
}

static inline double chance_of_missing(const struct numbers *n, double share)
{
    return least(most((share - n->sure_share) * (1.0 / (n->lost_share - n->sure_share)), 0.0), 1.0);
}

static inline struct work work_of(struct ranking *r, const struct table *table, Py_ssize_t row)
{
    const struct numbers *n = &r->n;
    const struct blocks *blocks = in_blocks(r, int_at(table, BLOCK_SIZE, row));
    int64_t expected = int_at(table, EXPECTED, row), in_any_tier = int_at(table, IN_ANY_TIER, row);
    int64_t usable = blocks->usable_tokens, cached = least_int(expected, usable), loaded = 0;
    double speed = float_at(table, PREFILL_RATE, row), load_s = 0.0;
    if (n->stored_tokens != 0.0 || in_any_tier > expected) {
        int64_t own = most_int(least_int(in_any_tier, usable) - cached, 0);
        int64_t stored = most_int(least_int(blocks->stored_tokens, usable) - cached - own, 0);
        int64_t token_bytes = int_at(table, KV_BYTES_PER_TOKEN, row);
        double own_s = (double)(own * token_bytes) / n->tier_rate;
        double stored_s = (double)(stored * token_bytes) / (float_at(table, KV_RATE, row) * n->other_node_share);
        if (own_s <= (double)own / speed) {
            int loads_stored = stored_s <= (double)stored / speed;
            loaded = own + (loads_stored ? stored : 0);
            load_s = own_s + (loads_stored ? stored_s : 0.0);
        }
    }
    int64_t uncached = (int64_t)n->num_tokens - cached - loaded;
    return (struct work){(double)uncached / speed, (double)int_at(table, QUEUED_TOKENS, row) / speed, load_s, uncached};
}

static inline void add_work(const struct ranking *r, const struct work *work, double *parts)
{
    parts[COMPUTE] = work->compute_s;
    parts[QUEUE] = work->queue_s;
    parts[PRESSURE] = work->compute_s * r->pressure;
    parts[LOAD] = work->load_s;
}

/* Sets load_weight and new_share. A sequence costs those that it joins for as long as the mean output. */
static void weigh_load(struct ranking *r)
{
    double tokens, sum = 0.0;
    int64_t num_known = 0, held = 0;
    r->load_weight = r->n.both_load_weight;
    if (!r->is_split && r->n.has_slo == 0.0) return;
    for (Py_ssize_t i = 0; i < r->decodes.count; i++) {
        if ((tokens = float_at(&r->decodes, OUTPUT, i)) > 0) sum += tokens, num_known++;
        held = most_int(held, int_at(&r->decodes, EXPECTED, i));
    }
    double split = r->n.decode_load_weight * (num_known ? sum / (double)num_known : r->n.expected_output_tokens);
    if (!r->is_split) r->new_share = 1.0 - (double)held / r->n.num_tokens;
    r->load_weight = r->is_split ? split : r->load_weight + (split - r->load_weight) * r->new_share;
}

static inline void add_decode(struct ranking *r, Py_ssize_t row, double *parts)
{
    const struct numbers *n = &r->n;
    const struct table *table = &r->decodes;
    const struct blocks *blocks = in_blocks(r, int_at(table, BLOCK_SIZE, row));
    int64_t held = int_at(table, HELD, row), others = (int64_t)n->width - 1;
    if (held != 0) held /= blocks->size;
    int64_t now = blocks->now - held + others, later = blocks->grown - held + others * (blocks->grown - blocks->full);
    int64_t sequences = int_at(table, SEQUENCES, row), num_free = int_at(table, FREE_BLOCKS, row);
    double step_s = float_at(table, DECODE_STEP, row);
    int64_t missing = now * (1 + int_at(table, WAITING, row)) - num_free;
    parts[DECODE_LOAD] = r->load_weight * step_s * (double)sequences;
    parts[DECODE_MEMORY] = step_s * least((double)later / (double)most_int(num_free, 1), 1.0);
    parts[DECODE_WAIT] = missing > 0 ? (double)(missing * blocks->size) * step_s / (double)most_int(sequences, 1) : 0.0;
}

static inline int is_near(const struct ranking *r, const struct work *work)
{
    return work->uncached <= (int64_t)r->n.local_prefill_tokens;
}

/* How often harm to running sequences counts: twice unless an SLO says what they need. */
static inline double caution(const struct numbers *n)
{
    return n->has_slo != 0.0 ? 1.0 : 2.0;
}

static inline double harm_s(const struct ranking *r, const struct table *table, Py_ssize_t row, const struct work *work, double missed_s)
{
    if (is_near(r, work)) return 0.0;
    const struct numbers *n = &r->n;
    double output_tokens = float_at(table, OUTPUT, row), sequences = (double)int_at(table, SEQUENCES, row);
    if (!(output_tokens > 0)) output_tokens = n->expected_output_tokens;
    double slack_s = most(n->tpot_s - float_at(table, RECENT_STEP, row), 0.1 * n->tpot_s) * output_tokens;
    double queue_s = r->is_split ? work->queue_s : 0.0, weight = n->stall_weight * (r->is_split ? 1.0 : caution(n));
    double before = queue_s / slack_s, after = (queue_s + work->compute_s) / slack_s;
    double missed = (1.0 + before) * exp(-before) - (1.0 + after) * exp(-after);
    return (1.0 - r->new_share) * ((weight * sequences + n->next_stall_weight) * work->compute_s + missed_s * sequences * missed);
}

static inline double stall_s(const struct ranking *r, const struct table *table, Py_ssize_t row, const struct work *work)
{
    return harm_s(r, table, row, work, r->missed_s);
}

/* What a second of prefill costs where no queue of prefill workers grows by it: on the decode worker with the fewest sequences. */
static double local_price(const struct ranking *r)
{
    const struct table *decodes = &r->decodes;
    Py_ssize_t fewest = 0;
    if (!r->is_split || r->n.is_remote != 0.0 || decodes->count == 0) return INFINITY;
    for (Py_ssize_t i = 1; i < decodes->count; i++)
        if (int_at(decodes, SEQUENCES, i) < int_at(decodes, SEQUENCES, fewest)) fewest = i;
    const struct work *work = &r->work[r->prefills.count + fewest];
    return caution(&r->n) * harm_s(r, decodes, fewest, work, r->n.missed_s) / work->compute_s;
}

static inline double prefill_stall_s(const struct ranking *r, Py_ssize_t row)
{
    return int_at(&r->prefills, DECODES, row) ? stall_s(r, &r->prefills, row, &r->work[row]) : 0.0;
}

static inline double arriving_s(const struct numbers *n, const struct table *table, Py_ssize_t row)
{
    int64_t lacking = (int64_t)n->num_tokens - int_at(table, HELD, row);
    return (double)(lacking * int_at(table, KV_BYTES_PER_TOKEN, row)) / float_at(table, KV_RATE, row);
}

static inline double transfer_s(const struct ranking *r, Py_ssize_t prefill, Py_ssize_t decode)
{
    double seconds = arriving_s(&r->n, &r->decodes, decode);
    if (int_at(&r->prefills, NODES, prefill) != int_at(&r->decodes, NODES, decode)) seconds /= r->n.other_node_share;
    seconds -= (1 - r->n.unhidden_share) * least(seconds, r->work[prefill].compute_s);
    if (int_at(&r->prefills, DECODES, prefill)) {
        double copied = r->n.num_tokens - (double)int_at(&r->decodes, HELD, decode);
        seconds += r->n.displaced_share * (copied / float_at(&r->decodes, PREFILL_RATE, decode)) * (1.0 + r->pressure);
    }
    return seconds;
}

/* The credit of computing a popular prefix once more. */
static inline double replica_s(const struct ranking *r, const double *parts)
{
    double own_s = parts[COMPUTE], extra_s = least(own_s - r->least_s, r->held_share * own_s);
    return -r->lacking_share * most(extra_s, 0.0) * (1.0 + parts[PRESSURE] / most(own_s, 1e-9));
}

static inline double spread_s(const struct ranking *r, const struct table *table, Py_ssize_t row)
{
    Py_ssize_t number = row + (table == &r->decodes ? r->prefills.count : 0);
    double whole = (double)(number + 1) * r->n.golden, drawn = r->n.draw + (whole - floor(whole));
    if (drawn >= 1.0) drawn -= 1.0;
    return drawn * least(float_at(table, AGE, row), r->n.fresh_s) * r->n.unreported_share;
}

/* Fills in joint's own terms and returns the sum of all. `decode`: a row, or NONE. */
static inline double add_own(const struct ranking *r, const struct table *computing, Py_ssize_t row, Py_ssize_t decode, double *parts)
{
    const struct numbers *n = &r->n;
    double share = (parts[COMPUTE] + parts[QUEUE] + parts[LOAD] + parts[HANDOFF] + parts[DECODE_WAIT]) * (1.0 / n->ttft_s);
    if (decode != NONE) share = most(share, float_at(&r->decodes, RECENT_STEP, decode) * (1.0 / n->tpot_s));
    parts[MISS] = chance_of_missing(n, share) * n->missed_s;
    parts[REPLICA] = r->lacking_share != 0.0 ? replica_s(r, parts) : 0.0;
    parts[TENANT] = n->tenant_excess != 0.0 ? (parts[PRESSURE] + parts[STALL]) * least(n->tenant_excess, n->max_excess) : 0.0;
    parts[SPREAD] = n->unreported_share != 0.0 ? spread_s(r, computing, row) : 0.0;
    parts[OVERDUE] = n->overdue_weight * (double)int_at(computing, OVERDUE_TOKENS, row) / float_at(computing, PREFILL_RATE, row);
    double score = 0.0;
    for (int term = 0; term < NUM_TERMS; term++) score += parts[term];
    return score;
}

static inline double prefill_score(const struct ranking *r, Py_ssize_t prefill, double *parts)
{
    memset(parts, 0, NUM_TERMS * sizeof *parts);
    add_work(r, &r->work[prefill], parts);
    parts[STALL] = prefill_stall_s(r, prefill);
    return add_own(r, &r->prefills, prefill, NONE, parts);
}

/* Of parts that have the decode worker's terms. */
static inline double local_score(const struct ranking *r, Py_ssize_t decode, double *parts)
{
    const struct work *work = &r->work[r->prefills.count + decode];
    add_work(r, work, parts);
    parts[HANDOFF] = parts[TRANSFER] = 0.0;
    parts[STALL] = stall_s(r, &r->decodes, decode, work);
    return add_own(r, &r->decodes, decode, decode, parts);
}

/* Of parts that have the decode worker's terms. */
static inline double pair_score(const struct ranking *r, Py_ssize_t prefill, Py_ssize_t decode, double *parts)
{
    add_work(r, &r->work[prefill], parts);
    parts[HANDOFF] = r->n.handoff_s;
    parts[TRANSFER] = transfer_s(r, prefill, decode);
    parts[STALL] = prefill_stall_s(r, prefill);
    return add_own(r, &r->prefills, prefill, decode, parts);
}

/* What a decode worker costs any request that another worker computes, of parts that have its terms. */
static inline double decode_score(const struct ranking *r, Py_ssize_t row, const double *parts)
{
    const struct numbers *n = &r->n;
    return parts[DECODE_LOAD] + parts[DECODE_MEMORY] + parts[DECODE_WAIT] + n->unhidden_share * arriving_s(n, &r->decodes, row)
           + n->missed_s * chance_of_missing(n, float_at(&r->decodes, RECENT_STEP, row) / n->tpot_s);
}

/* ---- the ranking */

static inline double whole_units(const struct numbers *n, double score) { return rint(score * (1.0 / n->unit)); }

static inline void offer(struct shortlist *list, double units, int64_t turn, Py_ssize_t row)
{
    int place = list->count; /* rows come in ascending order: an equal one stays behind */
    for (; place > 0 && units <= list->best[place - 1].units; place--)
        if (units == list->best[place - 1].units && turn >= list->best[place - 1].turn) break;
    if (place == SHORTLIST) return;
    if (list->count < SHORTLIST) list->count++;
    memmove(&list->best[place + 1], &list->best[place], (size_t)(list->count - 1 - place) * sizeof list->best[0]);
    list->best[place].units = units, list->best[place].turn = turn, list->best[place].row = row;
}

static void find_popular(struct ranking *r, Py_ssize_t fewest, Py_ssize_t count)
{
    double load = r->n.arrivals_per_s * r->work[fewest].compute_s;
    if (!(load > 1.0)) return;
    double most_held = r->n.num_tokens - (double)r->work[fewest].uncached, bound = r->n.num_tokens - r->n.same_share * most_held;
    double holders = 0.0;
    for (Py_ssize_t i = 0; i < count; i++) holders += (double)r->work[i].uncached <= bound;
    if (load <= holders) return;
    r->least_s = r->work[fewest].compute_s;
    r->held_share = most_held / r->n.num_tokens;
    r->lacking_share = 1.0 - holders / load;
}

/* What all workers have to do for this request. 0, or -1 with an exception set. */
static int prepare(struct ranking *r)
{
    Py_ssize_t num_prefills = r->prefills.count, count = num_prefills + r->decodes.count, fewest = 0;
    r->work = PyMem_Malloc((size_t)(count ? count : 1) * sizeof *r->work);
    if (r->work == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < num_prefills; i++) r->work[i] = work_of(r, &r->prefills, i);
    for (Py_ssize_t i = num_prefills; i < count; i++) r->work[i] = work_of(r, &r->decodes, i - num_prefills);
    const struct table *computing = num_prefills > 0 && r->n.is_local == 0.0 ? &r->prefills : &r->decodes;
    int64_t num_busy = 0;
    for (Py_ssize_t i = 0; i < computing->count; i++) num_busy += int_at(computing, QUEUED_REQUESTS, i) != 0;
    double busy = (double)num_busy / (double)(computing->count ? computing->count : 1);
    for (Py_ssize_t i = 0; i < num_prefills && !r->is_split; i++) r->is_split = int_at(&r->prefills, DECODES, i) == 0;
    weigh_load(r);
    r->missed_s = r->is_split && r->n.has_slo != 0.0 ? 0.0 : r->n.missed_s;
    r->pressure = least(r->n.max_pressure, local_price(r)) * (busy * busy * busy) * (busy * busy * busy);
    if (r->n.arrivals_per_s != 0.0 && count > 0) {
        for (Py_ssize_t i = 1; i < count; i++)
            if (r->work[i].uncached < r->work[fewest].uncached) fewest = i;
        find_popular(r, fewest, count);
    }
    return 0;
}

static void complete(const struct ranking *r, struct candidate *one, Py_ssize_t prefill, Py_ssize_t decode, double score)
{
    one->prefill = prefill, one->decode = decode, one->score = score, one->units = whole_units(&r->n, score);
    one->source_turn = prefill == NONE ? int_at(&r->decodes, TURN, decode) : int_at(&r->prefills, TURN, prefill);
    one->target_turn = decode == NONE ? NONE : int_at(&r->decodes, TURN, decode);
}

static struct shortlist best_prefills(const struct ranking *r)
{
    struct shortlist list = {0};
    double parts[NUM_TERMS];
    for (Py_ssize_t row = 0; row < r->prefills.count; row++)
        offer(&list, whole_units(&r->n, prefill_score(r, row, parts)), int_at(&r->prefills, TURN, row), row);
    return list;
}

/* Fills in all candidates, unordered. Returns their number. */
static int list_candidates(struct ranking *r, struct candidate *found)
{
    int may_send = r->prefills.count > 0 && r->n.is_local == 0.0, may_stay = r->n.is_remote == 0.0, count = 0;
    struct shortlist sources = {0}, targets = {0}, local = {0};
    if (may_send) sources = best_prefills(r);
    if (may_send && r->n.needs_decode == 0.0) {
        for (int i = 0; i < sources.count; i++, count++) {
            double score = prefill_score(r, sources.best[i].row, found[count].parts);
            complete(r, &found[count], sources.best[i].row, NONE, score);
        }
        return count;
    }
    double parts[NUM_TERMS];
    for (Py_ssize_t row = 0; row < r->decodes.count; row++) {
        int64_t turn = int_at(&r->decodes, TURN, row);
        add_decode(r, row, parts);
        if (may_send) offer(&targets, whole_units(&r->n, decode_score(r, row, parts)), turn, row);
        if (may_stay) offer(&local, whole_units(&r->n, local_score(r, row, parts)), turn, row);
    }
    for (int i = 0; i < sources.count * targets.count; i++) {
        Py_ssize_t prefill = sources.best[i / targets.count].row, decode = targets.best[i % targets.count].row;
        if (may_stay && is_near(r, &r->work[r->prefills.count + decode])) continue; /* it needs no prefill worker */
        add_decode(r, decode, found[count].parts);
        complete(r, &found[count], prefill, decode, pair_score(r, prefill, decode, found[count].parts));
        count++;
    }
    for (int i = 0; i < local.count; i++, count++) {
        add_decode(r, local.best[i].row, found[count].parts);
        complete(r, &found[count], NONE, local.best[i].row, local_score(r, local.best[i].row, found[count].parts));
    }
    return count;
}

static int compare(const void *left, const void *right)
{
    const struct candidate *a = left, *b = right;
    if (a->units != b->units) return a->units < b->units ? -1 : 1;
    if (a->source_turn != b->source_turn) return a->source_turn < b->source_turn ? -1 : 1;
    if (a->target_turn != b->target_turn) return a->target_turn < b->target_turn ? -1 : 1;
    if (a->prefill != b->prefill) return a->prefill < b->prefill ? -1 : 1;
    return (a->decode > b->decode) - (a->decode < b->decode);
}

/* ---- Python */

static PyObject *row_object(Py_ssize_t row) { return row == NONE ? Py_NewRef(Py_None) : PyLong_FromSsize_t(row); }

/* (prefill row or None, decode row or None, score, terms). */
static PyObject *tuple_of(const struct candidate *one)
{
    PyObject *parts = PyTuple_New(NUM_TERMS);
    for (int term = 0; parts != NULL && term < NUM_TERMS; term++) {
        PyObject *value = PyFloat_FromDouble(one->parts[term]);
        if (value == NULL) Py_CLEAR(parts);
        else PyTuple_SET_ITEM(parts, term, value);
    }
    return parts == NULL ? NULL : Py_BuildValue("NNdN", row_object(one->prefill), row_object(one->decode), one->score, parts);
}

static PyObject *ranked(struct ranking *r)
{
    struct candidate found[MOST_PAIRS + SHORTLIST];
    int count = list_candidates(r, found);
    qsort(found, (size_t)count, sizeof found[0], compare);
    if (count > MAX_CANDIDATES) count = MAX_CANDIDATES;
    PyObject *list = PyList_New(count);
    for (int i = 0; list != NULL && i < count; i++) {
        PyObject *one = tuple_of(&found[i]);
        if (one == NULL) Py_CLEAR(list);
        else PyList_SET_ITEM(list, i, one);
    }
    return list;
}

static int is_tuple(PyObject *object, Py_ssize_t size)
{
    if (PyTuple_Check(object) && PyTuple_GET_SIZE(object) == size) return 1;
    PyErr_Format(PyExc_TypeError, "takes a tuple of %zd", size);
    return 0;
}

static int read_numbers(PyObject *tuple, struct numbers *numbers)
{
    double values[NUM_NUMBERS];
    if (!is_tuple(tuple, NUM_NUMBERS)) return -1;
    for (size_t i = 0; i < NUM_NUMBERS; i++) {
        values[i] = PyFloat_AsDouble(PyTuple_GET_ITEM(tuple, i));
        if (values[i] == -1.0 && PyErr_Occurred()) return -1;
    }
    memcpy(numbers, values, sizeof values);
    return 0;
}

static void close_table(struct table *table)
{
    while (table->num_open > 0) PyBuffer_Release(&table->views[--table->num_open]);
}

/* Opens the columns of a table: of int64 or float64, equally long. 0, or -1 with an exception set. */
static int open_table(PyObject *tuple, struct table *table)
{
    if (!is_tuple(tuple, NUM_COLUMNS)) return -1;
    for (int column = 0; column < NUM_COLUMNS; column++) {
        Py_buffer *view = &table->views[column];
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(tuple, column), view, PyBUF_RECORDS_RO) != 0) return -1;
        table->num_open++;
        const char *formats = column < NUM_INTS ? "lq" : "d";
        int is_right = view->ndim == 1 && view->itemsize == 8 && strlen(view->format) == 1 && strchr(formats, view->format[0]) != NULL;
        if (!is_right || view->shape[0] != table->views[0].shape[0]) {
            PyErr_Format(PyExc_TypeError, "column %d is not as long as the first, or of another type", column);
            return -1;
        }
        table->columns[column].data = view->buf, table->columns[column].stride = view->strides[0];
        for (Py_ssize_t row = 0; column == BLOCK_SIZE && row < view->shape[0] && (row == 0 || view->strides[0] != 0); row++)
            if (int_at(table, BLOCK_SIZE, row) <= 0) {
                PyErr_SetString(PyExc_ValueError, "a block has no tokens");
                return -1;
            }
    }
    table->count = table->views[0].shape[0];
    return 0;
}

static PyObject *rank(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 3) return PyErr_Format(PyExc_TypeError, "takes 3 arguments, not %zd", num_args);
    struct ranking r = {0};
    PyObject *list = NULL;
    int is_open = read_numbers(args[0], &r.n) == 0 && open_table(args[1], &r.prefills) == 0 && open_table(args[2], &r.decodes) == 0;
    if (is_open && prepare(&r) == 0) list = ranked(&r);
    PyMem_Free(r.work);
    close_table(&r.prefills);
    close_table(&r.decodes);
    return list;
}

static PyMethodDef FUNCTIONS[] = {
    {"rank", (PyCFunction)(void (*)(void))rank, METH_FASTCALL,
     "rank(numbers, prefill columns, decode columns) -> [(prefill row or None, decode row or None, score, terms)], best first"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, .m_name = "kvrelay_candidates", .m_size = -1, .m_methods = FUNCTIONS};

PyMODINIT_FUNC PyInit_kvrelay_candidates(void) { return PyModule_Create(&MODULE); }
