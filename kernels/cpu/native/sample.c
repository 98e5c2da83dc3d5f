/* One token per row of logits: its mask, temperature, top-k, top-p, min-p, then the inverse CDF in id order at the row's
 * number. Groups of 32 tokens of which none is allowed are skipped: the passes run over the other groups' weights, which
 * stand one after the other. Where all are allowed these are all weights, so that such a mask changes no bit. */
#include <stdlib.h>
#include <string.h>
#include "pool.h"
#include "vec.h"

#define BINS 0x3f81 /* weights are in [0, 1]: the high 16 bits of their float form (of 1.0: 0x3f80) sort them coarsely */
#define CHUNK 256   /* weights whose sum is kept, so that a draw scans one chunk and not the row */
#define GROUP 32    /* tokens of one word of a mask */

typedef struct {
    const float *logits;
    const float *temperature, *top_p, *min_p;
    const int64_t *top_k;
    const double *uniform;
    int64_t *out;
    const uint32_t *masks;
    const int32_t *mask_rows;
    long vocab;
} sample_job;

/* A row of logits, with its mask or NULL. */
typedef struct {
    const float *x;
    const uint32_t *mask;
    long n;
} masked_row;

/* The allowed tokens of group g, as bits. */
static uint32_t word_of(const masked_row *row, long g)
{
    const long rest = row->n - g * GROUP;
    const uint32_t word = row->mask ? row->mask[g] : ~0u;
    return rest < GROUP ? word & ((1u << rest) - 1) : word;
}

/* The logits of group g; of the last one a copy, as it may be shorter. */
static const float *logits_of(const masked_row *row, long g, float *copy)
{
    const float *x = row->x + g * GROUP;
    const long rest = row->n - g * GROUP;
    if (rest >= GROUP) return x;
    memset(copy, 0, GROUP * sizeof *copy);
    return memcpy(copy, x, rest * sizeof *x);
}

/* The elements of a vector whose tokens are allowed: those from bit `shift` of a group's word on. */
INLINE vi allowed(uint32_t word, int shift)
{
    vu bits = {0};
    for (int element = 0; element < VL; element++) bits[element] = 1u << (element + shift);
    return (vi)((word & bits) == bits);
}

/* The first of the largest allowed logits; where none is a number above -INFINITY, the first allowed token, or 0. */
static long argmax(const masked_row *row, float *value)
{
    vf top = vset(-INFINITY);
    vi at = {0}; /* the group of each element's largest */
    long first = -1, best = row->n;
    float copy[GROUP], most;
    for (long g = 0; g * GROUP < row->n; g++) {
        const uint32_t word = word_of(row, g);
        if (!word) continue;
        if (first < 0) first = g * GROUP + __builtin_ctz(word);
        const float *x = logits_of(row, g, copy);
        for (int i = 0; i < GROUP; i += VL) {
            vf y = vload(x + i);
            vi larger = (vi)(y > top) & allowed(word, i);
            top = vselect(larger, y, top);
            at = (vi)vselect(larger, (vf)((int32_t)g - (vi){0}), (vf)at);
        }
    }
    *value = most = vmaximum(top);
    for (int element = 0; element < VL && most > -INFINITY; element++) {
        if (top[element] != most || at[element] * GROUP >= best) continue;
        uint32_t word = word_of(row, at[element]);
        for (best = at[element] * GROUP; !(word & 1) || row->x[best] != most; best++) word >>= 1;
    }
    return most > -INFINITY ? best : first < 0 ? 0 : first;
}

/* exp((logit - most) * inverse) of the groups with an allowed token, 0 for masked ones; returns how many numbers. */
static long weigh(const masked_row *row, float most, float inverse, float *w, int32_t *groups)
{
    long num_groups = 0, g = 0;
    float copy[GROUP];
    for (; g * GROUP < row->n; g++) {
        const uint32_t word = word_of(row, g);
        if (!word) continue;
        const float *x = logits_of(row, g, copy);
        for (int i = 0; i < GROUP; i += VL) {
            vf weight = vexp((vload(x + i) - most) * inverse);
            vstore(w + num_groups * GROUP + i, vselect(allowed(word, i), weight, vset(0)));
        }
        groups[num_groups++] = g;
    }
    const long missing = num_groups && groups[num_groups - 1] == g - 1 ? g * GROUP - row->n : 0;
    return num_groups * GROUP - missing;
}

static uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static int descending(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* A weight's bin. A model that computes NaN must not write past the bins. */
static uint32_t bin_of(float weight)
{
    uint32_t bin = bits_of(weight) >> 16;
    return bin < BINS ? bin : BINS - 1;
}

/* The smallest kept weight: walk the bins from the top until `count` tokens or `mass` of weight are taken, then settle
 * the last bin by sorting it. `spare` receives how many tokens equal to the threshold are kept (all for a count). */
static float threshold(const float *w, long n, long count, double mass, float *sorted, long *spare)
{
    double *sums = thread_scratch(BINS * (sizeof(uint32_t) + sizeof(double)));
    uint32_t *counts = (uint32_t *)(sums + BINS);
    memset(counts, 0, BINS * sizeof *counts);
    if (count == 0) memset(sums, 0, BINS * sizeof *sums);
    for (long i = 0; i < n; i++) counts[bin_of(w[i])]++;
    if (count == 0)
        for (long i = 0; i < n; i++) sums[bin_of(w[i])] += w[i];
    long taken = 0, bin = BINS - 1, size = 0;
    double sum = 0;
    for (; bin > 0; bin--) {
        if (counts[bin] > 0 && (count > 0 ? taken + counts[bin] >= count : sum + sums[bin] >= mass)) break;
        taken += counts[bin];
        if (count == 0) sum += sums[bin];
    }
    for (long i = 0; i < n; i++)
        if (bin_of(w[i]) == (uint32_t)bin && w[i] != 0) sorted[size++] = w[i];
    qsort(sorted, size, sizeof *sorted, descending);
    *spare = n;
    if (size == 0) return 0;
    if (count > 0) return sorted[count - taken - 1 < size ? count - taken - 1 : size - 1];
    long last = 0;
    for (; last < size - 1; last++) {
        sum += sorted[last];
        if (sum >= mass) break;
    }
    long first = last;
    while (first > 0 && sorted[first - 1] == sorted[last]) first--;
    *spare = last - first + 1;
    return sorted[last];
}

/* Zero what is below `least`, and all but the first `spare` of those equal to it. */
static void keep_from(float *w, long n, float least, long spare)
{
    long i = 0, equal = 0;
    vi equals = {0};
    for (; i + VL <= n; i += VL) {
        vf x = vload(w + i);
        equals -= (vi)(x == vset(least));
        vstore(w + i, vselect((vi)(x < vset(least)), vset(0), x));
    }
    for (int element = 0; element < VL; element++) equal += equals[element];
    for (; i < n; i++) {
        equal += w[i] == least;
        if (w[i] < least) w[i] = 0;
    }
    for (i = n - 1; equal > spare; i--)
        if (w[i] == least) w[i] = 0, equal--;
}

/* Sums of the chunks of w into sums; returns the sum of those. */
static double sum_chunks(const float *w, long n, double *sums)
{
    double total = 0;
    for (long c = 0; c * CHUNK < n; c++) {
        long i = c * CHUNK, end = i + CHUNK < n ? i + CHUNK : n;
        vf sum = {0};
        for (; i + VL <= end; i += VL) sum += vload(w + i);
        double chunk = vsum(sum);
        for (; i < end; i++) chunk += w[i];
        total += sums[c] = chunk;
    }
    return total;
}

/* The first id whose cumulative weight exceeds target; the last one of any weight when rounding leaves none. */
static long find(const float *w, long n, const double *sums, double target)
{
    double before = 0;
    long chunk = 0, last = (n - 1) / CHUNK, found = -1;
    while (chunk < last && before + sums[chunk] <= target) before += sums[chunk++];
    while (chunk > 0 && sums[chunk] == 0) chunk--;
    const long end = (chunk + 1) * CHUNK < n ? (chunk + 1) * CHUNK : n;
    for (long i = chunk * CHUNK; i < end; i++) {
        if (w[i] > 0) found = i;
        before += w[i];
        if (w[i] > 0 && before > target) break;
    }
    return found;
}

static void sample_task(void *arg, long number)
{
    const sample_job *j = arg;
    const long num_groups = (j->vocab + GROUP - 1) / GROUP, padded = num_groups * GROUP;
    const int32_t own = j->mask_rows ? j->mask_rows[number] : -1;
    const masked_row row = {j->logits + number * j->vocab, own < 0 ? NULL : j->masks + own * num_groups, j->vocab};
    float most;
    long best = argmax(&row, &most), spare;
    j->out[number] = best;
    if (!(j->temperature[number] > 0) || !(most > -INFINITY) || most == INFINITY) return;
    const long num_sums = padded / CHUNK + 1;
    double *sums = malloc(num_sums * sizeof(double) + 2 * padded * sizeof(float) + num_groups * sizeof(int32_t));
    if (!sums) return;
    float *w = (float *)(sums + num_sums);
    int32_t *groups = (int32_t *)(w + 2 * padded);
    const long n = weigh(&row, most, 1.0f / j->temperature[number], w, groups);
    if (j->top_k[number] > 0 && j->top_k[number] < n)
        keep_from(w, n, threshold(w, n, j->top_k[number], 0, w + padded, &spare), n);
    double total = sum_chunks(w, n, sums);
    if (j->top_p[number] < 1) {
        float least = threshold(w, n, 0, j->top_p[number] * total, w + padded, &spare);
        keep_from(w, n, least, spare);
    }
    if (j->min_p[number] > 0) keep_from(w, n, j->min_p[number], n);
    if (j->top_p[number] < 1 || j->min_p[number] > 0) total = sum_chunks(w, n, sums);
    long drawn = find(w, n, sums, j->uniform[number] * total);
    if (drawn >= 0) j->out[number] = groups[drawn / GROUP] * GROUP + drawn % GROUP;
    free(sums);
}

/* logits [rows, vocab] contiguous -> out [rows]. mask_rows: [rows], each row's in masks [?, ceil(vocab / 32)], -1: none;
 * NULL: no masks. */
void kr_sample(pool *p, const float *logits, const float *temperature, const int64_t *top_k, const float *top_p,
               const float *min_p, const double *uniform, int64_t *out, const uint32_t *masks, const int32_t *mask_rows,
               long rows, long vocab)
{
    sample_job j = {logits, temperature, top_p, min_p, top_k, uniform, out, masks, mask_rows, vocab};
    pool_run(p, sample_task, &j, rows);
}
