/* One token per row of logits: temperature, top-k, top-p, min-p, then the inverse CDF in id order at the row's number. */
#include <stdlib.h>
#include <string.h>
#include "pool.h"
#include "vec.h"

#define BINS 0x3f81 /* weights are in [0, 1]: the high 16 bits of their float form (of 1.0: 0x3f80) sort them coarsely */
#define CHUNK 256   /* weights whose sum is kept, so that a draw scans one chunk and not the row */

typedef struct {
    const float *logits;
    const float *temperature, *top_p, *min_p;
    const int64_t *top_k;
    const double *uniform;
    int64_t *out;
    long vocab;
} sample_job;

static long argmax(const float *x, long n, float *value)
{
    vf top = vset(-INFINITY);
    long i = 0, best = 0;
    for (; i + VL <= n; i += VL) top = vmax(top, vload(x + i));
    float most = vmaximum(top);
    for (; i < n; i++) most = x[i] > most ? x[i] : most;
    while (best < n - 1 && x[best] != most) best++;
    *value = most;
    return x[best] == most ? best : 0;
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
        if (bin_of(w[i]) == (uint32_t)bin) sorted[size++] = w[i];
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

static void sample_task(void *arg, long row)
{
    const sample_job *j = arg;
    const float *x = j->logits + row * j->vocab;
    const long n = j->vocab;
    float most;
    long best = argmax(x, n, &most), spare;
    j->out[row] = best;
    if (!(j->temperature[row] > 0) || !(most > -INFINITY) || most == INFINITY) return;
    float *w = malloc(2 * n * sizeof(float) + (n / CHUNK + 1) * sizeof(double));
    if (!w) return;
    const float inverse = 1.0f / j->temperature[row];
    long i = 0;
    for (; i + VL <= n; i += VL) vstore(w + i, vexp((vload(x + i) - most) * inverse));
    for (; i < n; i++) w[i] = vexp(vset((x[i] - most) * inverse))[0];
    if (j->top_k[row] > 0 && j->top_k[row] < n)
        keep_from(w, n, threshold(w, n, j->top_k[row], 0, w + n, &spare), n);
    double *sums = (double *)(w + 2 * n), total = sum_chunks(w, n, sums);
    if (j->top_p[row] < 1) {
        float least = threshold(w, n, 0, j->top_p[row] * total, w + n, &spare);
        keep_from(w, n, least, spare);
    }
    if (j->min_p[row] > 0) keep_from(w, n, j->min_p[row], n);
    if (j->top_p[row] < 1 || j->min_p[row] > 0) total = sum_chunks(w, n, sums);
    long drawn = find(w, n, sums, j->uniform[row] * total);
    if (drawn >= 0) j->out[row] = drawn;
    free(w);
}

/* logits [rows, vocab] contiguous -> out [rows]. */
void kr_sample(pool *p, const float *logits, const float *temperature, const int64_t *top_k, const float *top_p,
               const float *min_p, const double *uniform, int64_t *out, long rows, long vocab)
{
    sample_job j = {logits, temperature, top_p, min_p, top_k, uniform, out, vocab};
    pool_run(p, sample_task, &j, rows);
}
