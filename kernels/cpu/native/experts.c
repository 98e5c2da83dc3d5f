/* A mixture of experts: which ones each token chooses, and the weighted sum of their outputs.
 *
 * Rows (a token and one of its choices) are sorted by expert and gathered; each expert's two products run over its rows,
 * panels of all experts side by side in the pool; a token's results are added up in the order of its choices. Every row's
 * sums run in one order in linear.c and quant_linear.c: a token's result does not depend on the tokens beside it.
 */
#include <string.h>
#include "experts.h"
#include "vec.h"

#define CHUNK_BYTES (64L << 20) /* of rows between the products; more tokens go through one after the other */

void kr_gate(pool *, int, int, const void *, void *, long, long, long);

typedef struct {
    const float *logits, *correction;
    float *weights;
    int64_t *chosen;
    long tokens, experts, num_chosen, groups, chosen_groups;
    int sigmoid, normalise;
    float scale;
} choice_job;

/* The indices of the `most` largest of the n values that are not `out`, best first; of equals the first. Returns how many. */
static long best_of(const float *values, const unsigned char *out, long n, long most, int64_t *best)
{
    long count = 0;
    for (long i = 0; i < n; i++) {
        if (out && out[i]) continue;
        if (count == most && !(values[i] > values[best[count - 1]])) continue;
        long at = count < most ? count++ : count - 1;
        for (; at > 0 && values[i] > values[best[at - 1]]; at--) best[at] = best[at - 1];
        best[at] = i;
    }
    return count;
}

/* Softmax or sigmoid of n logits; `scores` has room for whole vectors. */
static void score(const float *logits, float *scores, long n, int sigmoid)
{
    const long padded = (n + VL - 1) / VL * VL;
    float most = logits[0], sum = 0.0f;
    for (long i = 1; i < n; i++) most = logits[i] > most ? logits[i] : most;
    for (long i = 0; i < padded; i++) scores[i] = i < n ? logits[i] : 0.0f;
    for (long i = 0; i < padded; i += VL) {
        vf x = vload(scores + i);
        vstore(scores + i, sigmoid ? 1.0f / (1.0f + vexp(-x)) : vexp(x - most));
    }
    if (sigmoid) return;
    for (long i = 0; i < n; i++) sum += scores[i];
    for (long i = 0; i < n; i++) scores[i] /= sum;
}

/* Experts outside of the best groups are out. A group counts as its best member, or (sigmoid) as its two best together. */
static void leave_out(const choice_job *j, const float *ranks, unsigned char *out, float *of_groups, int64_t *best)
{
    const long size = j->experts / j->groups;
    for (long g = 0; g < j->groups; g++) {
        long found = best_of(ranks + g * size, NULL, size, j->sigmoid ? 2 : 1, best);
        of_groups[g] = 0.0f;
        for (long i = 0; i < found; i++) of_groups[g] += ranks[g * size + best[i]];
    }
    best_of(of_groups, NULL, j->groups, j->chosen_groups, best);
    memset(out, 1, j->experts);
    for (long i = 0; i < j->chosen_groups; i++) memset(out + best[i] * size, 0, size);
}

static void choose_task(void *arg, long index)
{
    const choice_job *j = arg;
    const long n = j->experts, padded = (n + VL - 1) / VL * VL, k = j->num_chosen;
    const long end = (index + 1) * 32 < j->tokens ? (index + 1) * 32 : j->tokens;
    float *scores = thread_scratch((2 * padded + n + 2) * sizeof(float) + n * sizeof(int64_t) + n);
    float *ranks = scores + padded, *of_groups = ranks + padded;
    int64_t *best = (int64_t *)(scores + (2 * padded + n + 1) / 2 * 2);
    unsigned char *out = (unsigned char *)(best + n);
    for (long t = index * 32; t < end; t++) {
        score(j->logits + t * n, scores, n, j->sigmoid);
        for (long i = 0; i < n; i++) ranks[i] = scores[i] + (j->correction ? j->correction[i] : 0.0f);
        if (j->groups > 1) leave_out(j, ranks, out, of_groups, best);
        best_of(ranks, j->groups > 1 ? out : NULL, n, k, best);
        float sum = 0.0f;
        for (long i = 0; i < k; i++) sum += scores[best[i]];
        for (long i = 0; i < k; i++) {
            j->chosen[t * k + i] = best[i];
            j->weights[t * k + i] = scores[best[i]] / (j->normalise ? sum + 1e-20f : 1.0f) * j->scale;
        }
    }
}

/* logits [tokens, experts] -> weights, chosen [tokens, num_chosen]. correction: [experts], added to scores for the choice
 * alone, or NULL. groups: experts are chosen from the best `chosen_groups` of so many; 1: from all. */
void kr_choose(pool *p, const float *logits, const float *correction, float *weights, int64_t *chosen, long tokens,
               long experts, long num_chosen, int sigmoid, long groups, long chosen_groups, int normalise, float scale)
{
    choice_job j = {logits, correction, weights, chosen, tokens, experts, num_chosen, groups, chosen_groups, sigmoid,
                    normalise, scale};
    pool_run(p, choose_task, &j, (tokens + 31) / 32);
}

typedef struct {
    const void *x, *base;
    void *sorted, *out; /* [rows, columns]: gathered inputs, and later their outputs; [tokens, columns] */
    long *source, *place; /* a sorted row's token; where each choice of each token stands */
    const float *weights, *base_logits;
    long tokens, rows, ldx, columns, num_chosen;
    int wide;
} rows_job;

static void gather_task(void *arg, long index)
{
    const rows_job *j = arg;
    const long item = j->wide ? 4 : 2, end = (index + 1) * 64 < j->rows ? (index + 1) * 64 : j->rows;
    for (long r = index * 64; r < end; r++)
        memcpy((char *)j->sorted + r * j->columns * item, (const char *)j->x + j->source[r] * j->ldx * item,
               j->columns * item);
}

/* One token: its experts' rows times their weights, in the order of its choices, then `base` times sigmoid(base_logits). */
static void sum_row(const rows_job *j, long t)
{
    const long *place = j->place + t * j->num_chosen, at = t * j->columns;
    const float *weights = j->weights + t * j->num_chosen;
    const float share = j->base_logits ? 1.0f / (1.0f + expf(-j->base_logits[t])) : 1.0f;
    long i = 0;
    for (; i + VL <= j->columns; i += VL) {
        vf sum = {0};
        for (long c = 0; c < j->num_chosen; c++)
            sum += weights[c] * vload_any(j->sorted, place[c] * j->columns + i, j->wide);
        if (j->base) sum += share * vload_any(j->base, at + i, j->wide);
        vstore_any(j->out, at + i, sum, j->wide);
    }
    for (; i < j->columns; i++) {
        float sum = 0.0f;
        for (long c = 0; c < j->num_chosen; c++) sum += weights[c] * load_any(j->sorted, place[c] * j->columns + i, j->wide);
        if (j->base) sum += share * load_any(j->base, at + i, j->wide);
        store_any(j->out, at + i, sum, j->wide);
    }
}

static void sum_task(void *arg, long index)
{
    const rows_job *j = arg;
    const long end = (index + 1) * 16 < j->tokens ? (index + 1) * 16 : j->tokens;
    for (long t = index * 16; t < end; t++) sum_row(j, t);
}

/* starts [experts + 1]: of each expert's rows among the sorted ones, a token's in the order of tokens. */
static void sort_rows(const int64_t *chosen, long rows, long num_chosen, long experts, long *starts, long *source, long *place)
{
    memset(starts, 0, (experts + 1) * sizeof(long));
    for (long r = 0; r < rows; r++) starts[chosen[r] + 1]++;
    for (long e = 0; e < experts; e++) starts[e + 1] += starts[e];
    for (long r = 0; r < rows; r++) {
        place[r] = starts[chosen[r]]++;
        source[place[r]] = r / num_chosen;
    }
    for (long e = experts; e > 0; e--) starts[e] = starts[e - 1];
    starts[0] = 0;
}

/* Cut a product of K inputs and N outputs into tasks. Returns how many; `parts` NULL: only counts. */
static long cut(expert_part *parts, const long *starts, long experts, long N, long K, int threads)
{
    const long panels = (N + NR - 1) / NR;
    long blocks = 0, count = 0;
    for (long e = 0; e < experts; e++) {
        const long rows = starts[e + 1] - starts[e], most = rows ? rows_per_block(rows, K) : 1;
        blocks += (rows + most - 1) / most;
    }
    long share = (blocks * panels + TASKS_PER_THREAD * threads - 1) / (TASKS_PER_THREAD * threads);
    share = threads == 1 || share > panels ? panels : (share + 3) / 4 * 4;
    for (long e = 0; e < experts; e++) {
        const long rows = starts[e + 1] - starts[e], most = rows ? rows_per_block(rows, K) : 1;
        for (long begin = starts[e]; begin < starts[e + 1]; begin += most)
            for (long first = 0; first < panels; first += share, count++) {
                if (!parts) continue;
                const long end = begin + most, last = first + share;
                const linear_part part = {begin, end < starts[e + 1] ? end : starts[e + 1], first,
                                          last < panels ? last : panels};
                parts[count] = (expert_part){e, part};
            }
    }
    return count;
}

typedef struct {
    int kind, wide;
    const void *const *weights;
    const float *units;
    long group;
} product;

/* y [rows, N] = x [rows, K] times each row's expert. */
static void multiply(pool *p, const product *w, const void *x, void *y, const long *starts, long experts, long N, long K)
{
    const int threads = pool_threads(p);
    const long rows = starts[experts], count = cut(NULL, starts, experts, N, K, threads);
    expert_part *parts = pool_scratch(p, 3, count * sizeof *parts);
    cut(parts, starts, experts, N, K, threads);
    if (w->units) quant_grouped(p, w->kind, w->wide, x, y, w->weights, w->units, parts, count, rows, N, K, w->group);
    else linear_grouped(p, w->kind, x, y, w->weights, parts, count, rows, N, K);
}

/* x [tokens, hidden] with row stride ldx -> out [tokens, hidden]; floats if `wide`, else bf16.
 *
 * kind: of the packed weights, as in linear.c; where `units` [2, experts] is not NULL, the bits of quant_linear.c.
 * weights, chosen: [tokens, num_chosen], 0 <= chosen < experts. gate_up: by expert, [2 ffn, hidden]; down: [hidden, ffn].
 * base [tokens, hidden] or NULL is added, times sigmoid(base_logits [tokens]) unless that is NULL. */
void kr_experts(pool *p, int kind, int wide, int gelu, const void *x, long ldx, const float *weights,
                const int64_t *chosen, const void *const *gate_up, const void *const *down, const float *units,
                const void *base, const float *base_logits, void *out, long tokens, long num_chosen, long experts,
                long hidden, long ffn, long group)
{
    const long item = wide ? 4 : 2, row_bytes = (hidden + 3 * ffn) * item;
    const product first = {kind, wide, gate_up, units, group}, second = {kind, wide, down, units ? units + experts : NULL, group};
    const long most = CHUNK_BYTES / (row_bytes * num_chosen) + 1;
    for (long done = 0; done < tokens; done += most) {
        const long now = tokens - done < most ? tokens - done : most, rows = now * num_chosen;
        const long plain = (rows * row_bytes + 63) / 64 * 64;
        char *sorted = pool_scratch(p, 1, plain + (2 * rows + experts + 1) * sizeof(long));
        char *both = sorted + rows * hidden * item, *gated = both + rows * 2 * ffn * item;
        long *source = (long *)(sorted + plain), *place = source + rows, *starts = place + rows;
        rows_job j = {.x = (const char *)x + done * ldx * item, .base = base ? (const char *)base + done * hidden * item : NULL,
                      .sorted = sorted, .out = (char *)out + done * hidden * item, .source = source, .place = place,
                      .weights = weights + done * num_chosen, .base_logits = base_logits ? base_logits + done : NULL,
                      .tokens = now, .rows = rows, .ldx = ldx, .columns = hidden, .num_chosen = num_chosen, .wide = wide};
        sort_rows(chosen + done * num_chosen, rows, num_chosen, experts, starts, source, place);
        pool_run(p, gather_task, &j, (rows + 63) / 64);
        multiply(p, &first, sorted, both, starts, experts, 2 * ffn, hidden);
        kr_gate(p, wide, gelu, both, gated, rows, ffn, 2 * ffn);
        multiply(p, &second, gated, sorted, starts, experts, hidden, ffn);
        pool_run(p, sum_task, &j, (now + 15) / 16);
    }
}
